"""`python -m eval serve=URL`: a stub server that decodes with our own loop, honest and with each fault."""

import json
import threading
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from conf.errors import UserError
from eval.command import evaluate_run
from eval.serving import client
from eval.serving.metrics import Tally, depth_of, difference, pooled, read, tally_of
from eval.serving.online import traffic
from eval.serving.verdict import Evidence, Template, TextDifference, judge, likely_causes, remarks
from eval.speculative.loop import Decoded, Round, decode_batch
from eval.speculative.processors import Sampling
from eval.speculative.scorers import ModelScorer, TreeDrafter
from eval.speculative.shapes import FixedTree
from models import heads
from models.chat import render
from models.draft_model import DraftModel
from models.export.native import StoredHead, save_head
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import tiny_model, tiny_tokenizer

TOKENS = 16


def noisy(model, seed: int, amount: float):
    """The same model a little off: it drafts rightly now and then."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += amount * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders: a verifier, a draft for it, one that knows nothing of it; and prompts."""
    folder = tmp_path_factory.mktemp("serve")
    for name, model in {
        "verifier": tiny_model(layers=3, hidden=32),
        "draft": noisy(tiny_model(layers=3, hidden=32), 1, 0.05),
        "stranger": tiny_model(layers=3, hidden=32, seed=5),
    }.items():
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    texts = ["What is the capital?", "Add two numbers.", "How many apples are there?", "Write a fox."]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return folder


@lru_cache
def loaded(folder: Path) -> Verifier:
    return Verifier.load(str(folder), dtype="float32", device="cpu", aux_layers=[])


class Stub(ThreadingHTTPServer):
    """Plays vLLM (or llama.cpp, SGLang): texts and counters from our loop, with the faults of its attributes."""

    def __init__(self, folder: Path, engine: str = "vllm", depth: int = 3, drafts: str = "draft", **faults):
        super().__init__(("127.0.0.1", 0), Handler)
        self.verifier = loaded(folder / "verifier")
        self.draft = DraftModel(loaded(folder / drafts), self.verifier)
        self.engine, self.depth, self.lock = engine, depth, threading.Lock()
        self.counts = dict.fromkeys(("drafts", "drafted", "accepted", "generated", "requests"), 0)
        self.places = [0] * depth
        self.models, self.temperature, self.others, self.asked, self.busy = ["tiny"], 0.0, 0, 0, 0
        self.template, self.ids, self.metrics, self.plain = None, True, True, False
        self.__dict__.update(faults)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def complete(self, body: dict) -> dict:
        with self.lock:
            assert body["temperature"] == 0 and body["stop_token_ids"] == list(self.verifier.eos_ids)
            self.asked += 1
            sampling, shape = Sampling(self.temperature), FixedTree.chain(self.depth)
            drafter = TreeDrafter(ModelScorer(self.draft, self.verifier.device), shape, sampling, False)
            options = {"max_new_tokens": body["max_tokens"], "sampling": sampling, "seed": self.asked}
            [text] = decode_batch(self.verifier, drafter, [body["prompt"]], **options)
            for _ in range(1 + self.others):  # others: requests of somebody else for each of ours
                self.count(text, body["max_tokens"])
            tokenizer = self.verifier.tokenizer
            choice = {"text": tokenizer.decode(text.tokens, skip_special_tokens=True), "finish_reason": text.finish}
            if self.ids:
                choice["token_ids"] = text.tokens
            return {"choices": [choice], "usage": {"completion_tokens": len(text.tokens)}}

    def count(self, text: Decoded, longest: int) -> None:
        emitted = 1
        for call in text.rounds:
            drafted, accepted = self.depth, call.accepted
            if self.engine == "llamacpp":
                drafted = min(self.depth, longest - emitted - 1)
                if len(text.tokens) - emitted < drafted:  # an end-of-turn token that isn't the last draft
                    accepted = min(accepted, len(text.tokens) - emitted - 1)
            emitted += len(call.emitted)
            self.counts["drafts"] += drafted > 0
            self.counts["drafted"] += drafted
            for k in range(min(drafted, accepted)):
                self.counts["accepted"] += 1
                self.places[k] += 1
        self.counts["generated"] += len(text.tokens)
        self.counts["requests"] += 1

    def page(self) -> str:
        counts = {} if self.plain else self.counts
        if self.engine == "sglang":
            names = {"drafts": "spec_verify_calls", "generated": "generation_tokens", "requests": "num_requests"}
            label = '{model_name="tiny",tp_rank="0"}'
        else:
            names = {
                "drafts": "spec_decode_num_drafts",
                "drafted": "spec_decode_num_draft_tokens",
                "accepted": "spec_decode_num_accepted_tokens",
                "generated": "generation_tokens" if self.engine == "vllm" else "tokens_predicted",
            }
            label = '{engine="0",model_name="tiny"}' if self.engine == "vllm" else ""
        lines = [f"# TYPE {self.engine}:up gauge", f"{self.engine}:up 1"]
        for key, name in names.items():
            if key in counts:
                name = f"{self.engine}:{name}_total"
                lines += [f"# HELP {name} Of a stub.", f"# TYPE {name} counter", f"{name}{label} {counts[key]}"]
        if self.engine == "sglang":
            lines += [f"{self.engine}:spec_num_steps{label} {self.depth}.0"]
        elif not self.plain:
            inner = label.strip("{}") + "," if label else ""
            name = f"{self.engine}:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f"# TYPE {name} counter"]
            lines += [f'{name}{{{inner}position="{k}"}} {hits}' for k, hits in enumerate(self.places)]
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/v1/models":
            rows = [{"id": name, "max_model_len": 512} for name in self.server.models]
            return self.say(200, {"data": rows} if rows else "<html>a router</html>")
        if self.path == "/metrics" and self.server.metrics:
            return self.say(200, self.server.page())
        return self.say(404, {"error": {"message": "not found"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.busy:
            self.server.busy -= 1
            return self.say(503, {"error": {"message": "overloaded"}})
        if self.path == "/v1/completions":
            return self.say(200, self.server.complete(body))
        if self.path in ("/tokenize", "/v1/chat/completions"):
            tokenizer = tiny_tokenizer(template=self.server.template) if self.server.template else tiny_tokenizer()
            ids = render(tokenizer, body["messages"], add_generation_prompt=True)
            if self.path == "/tokenize" and self.server.engine == "vllm":
                return self.say(200, {"count": len(ids), "tokens": ids})
            if self.path == "/v1/chat/completions":
                return self.say(200, {"usage": {"prompt_tokens": len(ids)}})
        return self.say(404, {"error": {"message": "not found"}})

    def say(self, status: int, answer) -> None:
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def compare(models, tmp_path, command, monkeypatch):
    """compare(*words, **faults) -> (exit code, serve.json or {}, what was printed)."""
    monkeypatch.setattr(client, "SETTLED", 0.01)
    monkeypatch.setattr(client, "PAUSE", 0.01)
    monkeypatch.setattr(client, "PATIENCE", 0.2)
    stubs = []

    def call(*words: str, **faults):
        stub = Stub(models, **faults)
        stubs.append(stub)
        threading.Thread(target=stub.serve_forever, args=(0.01,), daemon=True).start()
        code, out, err = command(
            "eval", evaluate_run, f"serve={stub.url}", f"draft={models}/draft", f"verifier_source={models}/verifier",
            f"prompts={models}/prompts.jsonl", f"decode.max_new_tokens={TOKENS}", "decode.depth=3", f"out={tmp_path}/x",
            *words,
        )  # fmt: skip
        file = tmp_path / "x" / "serve.json"
        return code, json.loads(file.read_text()) if file.is_file() else {}, " ".join((out + "\n" + err).split())

    yield call
    for stub in stubs:
        stub.shutdown()
        stub.server_close()


@pytest.mark.parametrize("words", [["serve_batch=3", "decode.batch=2"], ["replay=true"]])
def test_an_honest_server_gets_what_was_measured(compare, tmp_path, words):
    code, record, out = compare(*words)
    assert code == 0, out
    assert record["verdict"] == {"same": True, "by": "1 %", "line": record["verdict"]["line"]}
    assert record["server_counts"] == record["our_counts"]  # count for count, not only within 1 %
    assert (
        1.5 < record["our_counts"]["tau"] < 3.5
        and record["our_counts"]["drafted"] == record["our_counts"]["drafts"] * 3
    )
    assert record["identical_texts"] == 4 and record["remarks"] == [] and record["template"]["same"] is True
    assert record["tokens_per_second"]["server"] > 0
    assert (record["tokens_per_second"]["ours"] is None) == ("replay=true" in words)
    assert (
        f"{tmp_path}/x/serve.json" in out
        and "the server gets the acceptance that was measured" in out
        and "draft 3 accepted" in out
    )


@pytest.mark.parametrize("engine, ids", [("llamacpp", False), ("sglang", False)])
def test_engines_that_count_otherwise_are_counted_alike(compare, engine, ids):
    code, record, out = compare(engine=engine, ids=ids)
    assert code == 0, out
    assert record["verdict"]["same"] and record["verdict"]["by"] == "1 %" and record["identical_texts"] == 4
    for name in ("drafts", "accepted", "drafted", "by_position"):
        assert record["server_counts"][name] == record["our_counts"][name], name
    assert (record["our_counts"]["by_position"] is None) == (engine == "sglang")
    assert record["template"]["same"] is True and record["template"]["said"].startswith("/v1/chat/completions")


def test_the_loop_follows_the_servers_draft_length(compare):
    code, record, out = compare(depth=2)
    assert code == 0 and record["verdict"]["same"] and record["depth"] == 2 and record["decode_depth"] == 3
    assert "the server drafts 2 tokens, decode.depth is 3" in out


def test_a_head_that_drafts_fewer_than_the_server(compare, models, tmp_path):
    verifier = loaded(models / "verifier").capturing([3])
    V = verifier.vocab_size
    config = heads.kind_of("medusa")[0].from_verifier(verifier.head_geometry, (3,), V, heads=2)
    head = heads.build(config, verifier, DraftVocab(torch.arange(V), V))
    save_head(tmp_path / "head", StoredHead.of(head, verifier))
    code, _, err = compare(f"run={tmp_path}", "draft=null", "verifier_source=null")
    assert code == 2 and "expected a head that drafts 3 tokens as the server does, found 2 at the most" in err


def test_a_server_that_samples(compare):
    code, record, out = compare(temperature=1.0)
    assert code == 0 and record["identical_texts"] < 4
    assert any(line.startswith("temperature: the same request") for line in record["causes"] + record["remarks"])
    assert {"prompt", "token", "ours", "theirs", "gap"} == set(record["differences"][0])


def test_traffic_of_others_is_seen(compare):
    code, record, out = compare(others=1)
    assert code == 0
    [first, *_] = record["remarks"] or record["causes"]
    assert "not those of these requests alone" in first and "the server counts" in first and first in out


def test_another_template_is_named(compare):
    other = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant:"
    code, record, out = compare(template=other)
    assert code == 0 and record["verdict"]["same"] and record["template"]["same"] is False
    assert record["remarks"][0].startswith("chat template") and "but chat template" in out
    assert "for '<|im_start|>" in record["template"]["said"]


def test_drafts_at_chance_are_the_layers_or_the_map(compare):
    code, record, out = compare(drafts="stranger")
    assert code == 0 and not record["verdict"]["same"] and "the server gets less than was measured" in out
    [cause] = record["causes"]
    assert cause.startswith("captured layers one off, or the vocabulary map") and f"1. {cause}" in out


def test_busy_servers_are_asked_again_and_that_is_said(compare):
    code, record, out = compare(busy=2)
    assert code == 0 and record["verdict"]["same"], out
    code, _, err = compare(busy=100)
    assert code == 2 and "503" in err and "overloaded" in err


@pytest.mark.parametrize(
    "faults, words, said",
    [
        ({"models": ["a", "b"]}, [], "serves 2 models: name one, serve_model=a|b"),
        ({}, ["serve_model=c"], "expected serve_model among tiny, found c"),
        ({"models": []}, [], "expected an OpenAI-compatible server"),
        ({"metrics": False}, [], "has no /metrics (status 404)"),
        ({"plain": True}, [], "without speculative decoding: vLLM counts no drafts"),
        ({"plain": True, "engine": "llamacpp"}, [], "without speculative decoding: llama.cpp counts no drafts"),
        ({"engine": "other"}, [], "expected metrics of vLLM, SGLang or llama.cpp"),
        ({}, ["temperature=0.5"], "compares greedy chains"),
        ({}, ["decode=tree"], "compares greedy chains"),
        ({}, ["serve_batch=0"], "serve_batch must be 1 or more"),
        ({}, ["decode.max_new_tokens=600"], "expected a prompt of at most"),
        ({}, ["serve=http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        ({}, ["serve=localhost"], "expected serve=http://HOST:PORT"),
    ],
)
def test_what_cant_be_compared_is_one_line(compare, faults, words, said):
    code, record, out = compare(*words, **faults)
    assert code == 2 and said in out and record == {}


VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {0}
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 10.0
vllm:spec_decode_num_drafts_total{{engine="0",model_name="other"}} 1000.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.79e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {1}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {2}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {3}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {4}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {5}
# TYPE vllm:request_success_total counter
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {6}
vllm:request_success_total{{engine="0",finished_reason="length",model_name="m"}} 1.0
"""
SGLANG = """# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{{model_name="m",tp_rank="0"}} {0}
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{is_streaming="false",model_name="m"}} {1}
sglang:generation_tokens_total{{is_streaming="true",model_name="m"}} 7.0
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{{is_streaming="false",model_name="m"}} {2}
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{model_name="m",tp_rank="0"}} 2.25
# TYPE sglang:spec_num_steps gauge
sglang:spec_num_steps{{model_name="m",tp_rank="0"}} 4.0
"""
LLAMA = """# HELP llamacpp:spec_decode_num_drafts_total Speculative: Total speculative decoding verification steps
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total {0}
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total {1}
# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter
llamacpp:spec_decode_num_accepted_tokens_total {2}
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 99
"""
LLAMA_PLACES = (
    LLAMA
    + """# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 4
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} 1
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="2"}} 0
"""
)


def test_the_text_of_vllm():
    before, after = read(VLLM.format(5, 10, 2, 2, 0, 40, 3), "m"), read(VLLM.format(15, 30, 12, 8, 4, 64, 5), "m")
    assert before.drafts == 15  # engines together, another model's apart
    tally, generated = difference(before, after)
    assert tally == Tally(10, 20, 10, (6, 4)) and generated == 24 and after.requests - before.requests == 2
    assert (tally.tau, tally.rates, tally.alpha) == (2.0, [0.6, 0.4], 10 / 16) and depth_of(after) == 2
    assert read(VLLM.format(0, 0, 0, 0, 0, 0, 0), "m").speculates is True
    assert read("# TYPE vllm:up gauge\nvllm:up 1\n").speculates is False
    with pytest.raises(UserError, match="drafts by 10"):
        difference(after, before)


def test_the_text_of_sglang():
    """3 requests and 30 tokens in 12 calls: 3 of the prefill, 12 of the calls, 15 accepted."""
    before, after = read(SGLANG.format(2, 4, 1)), read(SGLANG.format(14, 34, 4))
    tally, generated = difference(before, after)
    assert (tally.drafts, tally.accepted, tally.by_position, generated) == (12, 15, None, 30)
    assert tally.tau == 2.25 and tally.alpha is None and depth_of(after) == 4
    gauge = "# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length 1.75\n"
    assert difference(read(gauge), read(gauge))[0].tau == 1.75  # older ones have nothing else


def test_the_text_of_llama_cpp():
    """Positions are there after the first draft only, and drafts may be shorter than K."""
    before, after = read(LLAMA.format(0, 0, 0)), read(LLAMA_PLACES.format(6, 16, 5))
    assert before.speculates is None and after.speculates is True
    tally, _ = difference(before, after)
    assert tally == Tally(6, 16, 5, (4, 1, 0)) and tally.alpha is None and depth_of(after) == 3
    assert depth_of(read(LLAMA.format(6, 16, 5))) == 3  # 16 / 6, rounded up


@pytest.mark.parametrize("text", ["<html></html>", "", "# TYPE node_load1 gauge\nnode_load1 2\n"])
def test_other_pages_are_refused(text):
    with pytest.raises(UserError, match="metrics"):
        read(text)


POSITION = '_per_pos_total{position="%s"} 1'


@pytest.mark.parametrize("line", ["_total NaN", "_total +Inf", "_total -1", POSITION % "x", POSITION % "9999999"])
def test_counters_that_count_nothing_are_refused(line):
    name = "vllm:spec_decode_num_accepted_tokens"
    with pytest.raises(UserError, match=f"expected .*{name}.*, found"):
        read(f"# TYPE {name} counter\n{name}{line}\n" if "per_pos" not in line else f"{name}{line}\n")


def one_text(accepted: list[int], kept: int, depth: int = 3) -> Decoded:
    """A text of whole rounds that accepted so many, cut to `kept` tokens."""
    rounds = [Round((7,) * depth, depth, n, (7,) * (n + 1), min(n + 1, depth)) for n in accepted]
    return Decoded([7] * kept, "length", 0.0, 0.0, rounds)


def test_rounds_are_counted_by_each_engines_rule():
    """Five tokens asked for. Prefill 1, then calls of 2 + 1 and 3 + 1 tokens: 8, of which 5 are handed out.

    vLLM counts both calls whole, OpenVINO's worker what is handed out. llama.cpp may draft 5 - 1 - 1 = 3 in the first
    and 5 - 4 - 1 = 0 in the second, which is then no draft. SGLang hands out 4 tokens in 2 calls.
    """
    text = one_text([2, 3], kept=5)
    assert tally_of(text, "whole", 3, 5) == Tally(2, 6, 5, (2, 2, 1))
    assert tally_of(text, "room", 3, 5) == Tally(1, 3, 2, (1, 1, 0))
    assert tally_of(text, "handed", 3, 5) == Tally(2, accepted=2)
    assert tally_of(text, "room", 3, 6) == Tally(2, 4, 3, (2, 1, 0))  # one more token: one draft in the second call
    stopped = one_text([3], kept=2)  # an end-of-turn token inside the first call
    assert tally_of(stopped, "whole", 3, 64) == Tally(1, 3, 3, (1, 1, 1))
    assert tally_of(stopped, "room", 3, 64) == Tally(1, 3, 0, (0, 0, 0))  # sampling ended at that token
    assert tally_of(one_text([3], kept=4), "room", 3, 64) == Tally(1, 3, 3, (1, 1, 1))  # unless it is the last draft
    assert tally_of(text, "cut", 3, 5) == Tally(2, 6, 2, (1, 1, 0))
    assert tally_of(stopped, "cut", 3, 64) == Tally(1, 3, 0, (0, 0, 0))
    assert tally_of(stopped, "handed", 3, 64) == Tally(1, accepted=0)
    assert pooled([Tally(2, 6, 5, (2, 2, 1)), Tally(1, 3, 0, (0, 0, 0))]) == Tally(3, 9, 5, (2, 2, 1))
    assert tally_of(one_text([], kept=1), "whole", 3, 5) == Tally(0, 0, 0, (0, 0, 0))


def texts_of(*tokens: int) -> list[client.Completion]:
    return [client.Completion("", None, count, "length") for count in tokens]


@pytest.mark.parametrize(
    "tally, generated, options, said",
    [
        (Tally(8, 24, 4, (3, 1, 0)), 14, {}, ""),
        (Tally(8, 24, 10, (5, 3, 2)), 14, {}, ""),  # 18 of 12: each last call may reach 3 past its end
        (Tally(8, 24, 11, (5, 3, 3)), 14, {}, "make 19, these answers 12"),
        (Tally(8, 24, 4, (3, 1, 0)), 20, {}, "the server counts 20 tokens, these answers have 14"),
        (Tally(4, 12, 2, (1, 1, 0)), 7, {}, "another replica"),
        (Tally(8, 24, 4, (3, 1, 0)), 14, {"quiet": False}, "kept moving"),
        (Tally(8, 24, 4, (3, 1, 0)), 14, {"retried": 2}, "2 requests were sent more than once"),
    ],
)
def test_counters_of_others(tally, generated, options, said):
    found = traffic(tally, generated, texts_of(7, 7), 3, **{"quiet": True, "retried": 0} | options)
    assert (said in found) if said else found == ""


def evidence(server, ours=(300, 200, 150), drafts=1000, **more) -> Evidence:
    """Of 20 prompts with equal shares of our counts."""
    mine = Tally(drafts, 3 * drafts, sum(ours), tuple(ours))
    each = [Tally(drafts // 20, accepted=sum(ours) // 20 + 10 * (n % 3 - 1)) for n in range(20)]
    theirs = Tally(drafts, more.pop("drafted", 3 * drafts), sum(server), tuple(server))
    return Evidence(theirs, mine, each, "float32", **more)


FAR = TextDifference("p1", 12, "a", "b", 4.0)
CLOSE_CALL = TextDifference("p1", 12, "a", "b", 0.05)
TIED = TextDifference("p1", 12, "a", "b", 1e-5)


@pytest.mark.parametrize(
    "server, more, same, by",
    [
        ((300, 200, 150), {}, True, "1 %"),
        ((295, 196, 146), {}, True, "1 %"),
        ((300, 200, 130), {}, False, "difference"),  # tau within 1.3 %, the last depth 0.02 lower
        ((330, 170, 150), {}, False, "difference"),  # the same tau by other positions
        ((290, 190, 140), {"drafts": 400, "ours": (300, 200, 150)}, False, "difference"),  # few, but the same texts
        ((290, 190, 134), {"drafts": 900, "texts": [TIED]}, True, "95 % interval"),
        ((150, 100, 75), {"drafts": 900, "texts": [TIED]}, False, "difference"),
    ],
)
def test_verdicts(server, more, same, by):
    verdict = judge(evidence(server, **more))
    assert (verdict.same, verdict.by) == (same, by), verdict.line


@pytest.mark.parametrize(
    "server, more, beginning",
    [
        ((10, 0, 0), {}, "captured layers one off, or the vocabulary map"),
        ((300, 60, 10), {}, "positions of later drafts"),
        ((270, 175, 128), {}, "dtype of verifier or head"),
        ((120, 80, 60), {}, "the head's inputs"),
        ((420, 300, 220), {}, "another head or other prompts"),
        ((100, 60, 40), {"traffic": "so"}, "the counters are not those of these requests alone: so"),
        ((100, 60, 40), {"texts": [FAR]}, "other verifier weights"),
        ((100, 60, 40), {"texts": [CLOSE_CALL]}, "dtype: 1 of 20 texts"),
        ((100, 60, 40), {"texts": [FAR], "wavers": True}, "temperature"),
        ((280, 90, 20), {"drafted": 2000}, "K: the server drafts 2.00 tokens"),
        ((280, 90, 20), {"trees": True}, "the server drafts trees"),
        ((10, 0, 0), {"faults": ["the captured layers are one too late"]}, "the captured layers are one too late"),
    ],
)
def test_the_likeliest_cause_comes_first(server, more, beginning):
    found = evidence(server, template=Template(False, "other ids"), **more)
    causes = likely_causes(found)
    assert causes[0].startswith(beginning), causes
    assert "other ids" in causes[-1] and "other ids" in remarks(found)[-1]


def test_nothing_is_made_up_where_nothing_shows():
    assert likely_causes(evidence((300, 200, 150))) == [
        "none that the counts show; python -m eval.serving.check runs the engine itself and compares each draft"
    ]
    assert judge(Evidence(Tally(0), Tally(0), [], "float32")).by == "none"
