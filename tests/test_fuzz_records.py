"""Files of runs and answers of servers: a value or one line, whatever they hold."""

import json
from functools import cache

import httpx
import hypothesis.strategies as st
from omegaconf import OmegaConf
from test_compare import BASE
from test_report import METRICS, alpha_values

import fuzz
from conf.cli import load
from conf.schema import TrainConf
from eval.alpha_file import read_alpha
from eval.compare import read_arms
from eval.plots import plot_training, read_metrics
from eval.report import write_report
from eval.serving import metrics
from eval.serving.client import Server
from eval.serving.engine import EngineRun, Job, check_run, read_run
from eval.study import last_accuracy
from eval.tables import alpha_tables
from train.resolve import resumed_config, write_config

ALPHA = alpha_values() | {"prompts": BASE}


@fuzz.fuzz(fuzz.jsons(ALPHA), json.dumps(ALPHA).encode())
def test_alpha_json(data, folder):
    (folder / "alpha.json").write_bytes(data)
    alpha_tables(read_alpha(folder))
    read_arms([str(folder), str(folder)], ["a", "b"])


@fuzz.fuzz(fuzz.jsons(ALPHA), json.dumps(ALPHA).encode(), few=3, many=300)
def test_report_of_an_alpha_json(data, folder):
    """With its plots, which take most of a second."""
    (folder / "alpha.json").write_bytes(data)
    write_report(folder)


PROVENANCE = {"seed": 0, "versions": {"torch": "2.13"}, "training": {"steps": 3, "K": [1, 2.5]}, "commit": None}


@fuzz.fuzz(fuzz.jsons(PROVENANCE), json.dumps(PROVENANCE).encode(), few=3, many=300)
def test_report_with_a_provenance(data, folder):
    (folder / "alpha.json").write_text(json.dumps(alpha_values(alpha_by_depth=[None] * 3, predicted=None)))
    (folder / "provenance.json").write_bytes(data)
    write_report(folder)


cells = st.text(st.sampled_from(list('0123456789.eE+-,"\n\r\0 nainfx\u0663'))) | fuzz.texts()
tables = st.lists(st.lists(cells, max_size=5), max_size=6)
rows_of_csv = st.one_of(
    fuzz.files(METRICS.encode()), tables.map(lambda rows: fuzz.utf8("\n".join(map(",".join, rows))))
)


@fuzz.fuzz(rows_of_csv, METRICS.encode(), refuses=False)
def test_metrics_csv(data, folder):
    (folder / "metrics.csv").write_bytes(data)
    points = read_metrics(folder / "metrics.csv")
    assert all(abs(x) < 1e30 and abs(y) < 1e30 for column in points.values() for x, y in column)
    last_accuracy(folder / "metrics.csv")


@fuzz.fuzz(rows_of_csv, METRICS.encode(), few=3, many=300, refuses=False)
def test_plot_of_a_metrics_csv(data, folder):
    (folder / "metrics.csv").write_bytes(data)
    plot_training(read_metrics(folder / "metrics.csv"), folder / "x.png")


# --- settings -------------------------------------------------------------------------------------------------


def settings() -> dict:
    values = OmegaConf.to_container(OmegaConf.structured(TrainConf))
    values["data"]["path"] = values["verifier"]["source"] = "x"
    return values


CONFIG = OmegaConf.to_yaml(OmegaConf.create(settings()))
YAML = (
    *("a: &x [1]\nb: [*x, *x]", "- 1", "{", "a: !!python/object/apply:os.system [id]", "? [1]\n: 2", "<<: {a: 1}"),
    *("a: 1\na: 2", "seed: ${seed}", "seed: ${oc.env:HOME}", "x: 2001-99-99", "\t", "verifier: {source: [1]}"),
    *("---\n---", "a: " + "[" * 3000, "seed: 0x" + "f" * 5000, "seed: 1_0", "name: \x85", "name: '${'"),
)
configs = st.one_of(
    fuzz.files(CONFIG.encode()),
    fuzz.changed(settings()).map(fuzz.written).map(str.encode),
    st.sampled_from(YAML).map(str.encode),
    st.sampled_from(YAML).map(lambda line: f"{CONFIG}\n{line}".encode()),
)


@fuzz.fuzz(configs, CONFIG.encode())
def test_config_yaml_of_a_run(data, folder):
    (folder / "config.yaml").write_bytes(data)
    cfg = resumed_config(folder, ["trainer.max_steps=3"])
    assert isinstance(cfg, TrainConf) and cfg.trainer.max_steps == 3
    write_config(cfg, folder)


WORDS = (
    *("seed", "=", "1", "verifier", ".", "source", "[", "]", "{", "}", ",", ":", "'", '"', "+", "~", "$", "${seed}"),
    *("(", ")", "@", "null", "trainer", "budget", "demo", "\\", " ", "\n", "\0", "hydra", "/", "run", "dir", "--"),
    *("-m", "range", "glob", "\u00e9", "\ud800"),
)
NAMES = st.sampled_from(
    ("seed", "name", "verifier.source", "trainer", "data.path", "budget", "minutes", "decode.depth")
)
overrides = st.lists(
    st.one_of(
        st.lists(st.sampled_from(WORDS), max_size=8).map("".join),
        st.tuples(NAMES, fuzz.texts()).map("=".join),
        st.tuples(NAMES, fuzz.anything().map(lambda value: fuzz.written(value)[:500])).map("=".join),
        fuzz.texts(),
    ),
    min_size=1,
    max_size=3,
)


@fuzz.fuzz(overrides, ["seed=3"])
def test_overrides(words, folder):
    assert isinstance(load("train", words), TrainConf)


# --- engines and servers --------------------------------------------------------------------------------------

PAGE = """# HELP vllm:spec_decode_num_drafts_total x
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 5.0
vllm:generation_tokens_total{model_name="m"} 25.0
vllm:request_success_total{finished_reason="length",model_name="m"} 2.0
sglang:spec_accept_length{model_name="m"} NaN
"""
values = st.sampled_from(("NaN", "+Inf", "-1", "1e400", "x", "", "1e18", "0x10", "1 2", "\u0663"))
names = st.sampled_from(
    ('position="9999999"', 'position="-1"', 'position="x"', "position=", 'model_name="m"', "", 'a="\\')
)
pages = st.one_of(
    fuzz.files(PAGE.encode()),
    st.tuples(names, values).map(
        lambda pair: (
            f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{pair[0]}}} {pair[1]}\n".encode() + PAGE.encode()
        )
    ),
    values.map(lambda value: PAGE.replace("12.0", value).replace("25.0", value).encode()),
)


@fuzz.fuzz(pages, PAGE.encode())
def test_metrics_of_a_server(data, folder):
    now = metrics.read(data.decode("utf-8", errors="replace"), "m")
    tally, _ = metrics.difference(metrics.read(PAGE, "m"), now)
    tally.to_dict(), metrics.depth_of(now)


JOB = Job("v", "h", "eagle3", 2, [[1, 2]], 8, [0])
RUN = {"engine": "toy 1", "texts": [[3, 4, 5]], "verify_calls": 1, "drafted": 2, "accepted": 1, "seconds": 1.5}
RUN |= {"accepted_by_position": [1, 0], "rounds": [[[1, [4, 7]]]]}


@fuzz.fuzz(fuzz.jsons(RUN), json.dumps(RUN).encode())
def test_record_of_an_engine(data, folder):
    (folder / "result.json").write_bytes(data)
    run = check_run(read_run(folder / "result.json"), JOB, 300, folder)
    assert isinstance(run, EngineRun)
    run.tau, run.by_position, run.tokens_per_second  # noqa: B018


MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 300}]}
COMPLETION = {
    "choices": [{"text": "a", "token_ids": [1, 2], "finish_reason": "stop"}],
    "usage": {"completion_tokens": 2},
}
TOKENS = {"tokens": [1, 2, 3], "count": 3}


@cache
def stand_in() -> tuple[Server, dict]:
    """A server whose every answer is what the dict holds: making a client takes longer than a case."""
    said, server = {}, Server("http://127.0.0.1:9", "m")
    transport = httpx.MockTransport(lambda request: httpx.Response(**said))
    server._http = httpx.Client(base_url=server.url, transport=transport)
    return server, said


def server_that_says(data: bytes, status: int = 200) -> Server:
    server, said = stand_in()
    said |= {"status_code": status, "content": data}
    server.model = "m"
    return server


@fuzz.fuzz(fuzz.jsons(MODELS), json.dumps(MODELS).encode())
def test_models_of_a_server(data, folder):
    server_that_says(data)._choose_model()


@fuzz.fuzz(fuzz.jsons(COMPLETION), json.dumps(COMPLETION).encode())
def test_completion_of_a_server(data, folder):
    found = server_that_says(data).complete([1, 2], 4, [0])
    assert isinstance(found.text, str) and found.tokens >= 0


@fuzz.fuzz(fuzz.jsons(TOKENS, {"usage": {"prompt_tokens": 5}}), json.dumps(TOKENS).encode(), refuses=False)
def test_chat_prompt_of_a_server(data, folder):
    ids, count, _ = server_that_says(data).chat_prompt([{"role": "user", "content": "x"}])
    assert ids is None or len(ids) == count


@fuzz.fuzz(fuzz.jsons({"error": {"message": "no"}}), b"{}", takes=False)
def test_refusal_of_a_server(data, folder):
    server_that_says(data, 400).complete([1], 4, [0])
