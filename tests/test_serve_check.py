"""make serve-check: rows that pass and rows that don't, with engines that our own loop plays."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.errors import UserError
from eval.serving import check
from eval.serving.check import Engine
from eval.serving.engine import EngineRun, Job, run_engine
from eval.speculative.loop import decode_batch, plain_decode
from eval.speculative.processors import Sampling
from eval.speculative.scorers import drafter_for
from eval.speculative.shapes import FixedTree
from models import heads
from models.export.native import StoredHead, attach, save_head
from models.export.warm import read_any
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import tiny_model, tiny_tokenizer

TOKENS = 12


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A verifier, runs with a head of each kind, prompts, and an environment with two engines."""
    folder = tmp_path_factory.mktemp("check")
    tiny_model(layers=8, hidden=32).save_pretrained(folder / "verifier")
    tiny_tokenizer().save_pretrained(folder / "verifier")
    for kind in ("eagle3", "independent"):
        layers = heads.captured_layers(kind, None)
        verifier = Verifier.load(str(folder / "verifier"), dtype="float32", device="cpu", aux_layers=layers)
        ids = torch.arange(0, verifier.vocab_size, 2)
        config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, verifier.aux_layers, len(ids))
        head = heads.build(config, verifier, DraftVocab(ids, verifier.vocab_size))
        save_head(folder / kind / "head", StoredHead.of(head, verifier))
    texts = ["What is the capital?", "Add two numbers.", "How many apples are there?"]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    (folder / "engines" / "loop" / "bin").mkdir(parents=True)
    (folder / "engines" / "loop" / "bin" / "python").write_text("")
    return folder


def by_our_loop(command, worker, job, folder, **more):
    """What run_engine gives of an engine that is our own loop over the export in job.head."""
    layers = None if job.head else []
    verifier = Verifier.load(job.verifier, dtype=job.dtype, device="cpu", aux_layers=layers)
    if job.head is None:
        texts = [plain_decode(verifier, ids, max_new_tokens=job.max_new_tokens, sampling=Sampling()).tokens
                 for ids in job.prompts]  # fmt: skip
        return EngineRun("loop 1", texts, 0, 0, 0, None, None, 1.0)
    head = attach(read_any(job.head, verifier), verifier)
    drafter = drafter_for(head, FixedTree.chain(job.depth), Sampling())
    done = [decode_batch(verifier, drafter, [ids], max_new_tokens=job.max_new_tokens, sampling=Sampling())[0]
            for ids in job.prompts]  # fmt: skip
    rounds, hits = [], [0] * job.depth
    for text in done:
        emitted, calls = 1, []
        for call in text.rounds:
            calls.append((emitted, list(call.drafted)))
            emitted += len(call.emitted)
            for n in range(call.accepted):
                hits[n] += 1
        rounds.append(calls)
    calls = sum(map(len, rounds))
    return EngineRun("loop 1", [t.tokens for t in done], calls, calls * job.depth, sum(hits), hits, rounds, 1.0)


@pytest.fixture
def run(place, command, monkeypatch, tmp_path):
    """run(words, engine=...) -> (exit code, standard output, standard error, the folder written)."""
    monkeypatch.setitem(check.ENGINES, "loop", Engine("none.py", "bin/python", {"eagle3": "vllm"}))

    def call(*words, engine=by_our_loop):
        monkeypatch.setattr(check, "run_engine", engine)
        settings = [f"environments={place / 'engines'}", f"prompts={place / 'prompts.jsonl'}", f"out={tmp_path}"]
        settings += [
            "engines=[loop]",
            "depths=[2]",
            f"max_new_tokens={TOKENS}",
            "batch=2",
            f"runs=[{place / 'eagle3'}]",
        ]
        taken = {word.split("=")[0] for word in words}
        settings = [word for word in settings if word.split("=")[0] not in taken]
        return *command("serve_check", check.check.__wrapped__, *settings, *words), tmp_path

    return call


def test_a_faithful_engine_passes(run):
    code, out, err, folder = run("depths=[1,3]")
    assert code == 0, err
    rows = json.loads((folder / "serve_check.json").read_text())["rows"]
    assert out.splitlines()[-1] == str(folder / "serve_check.json")
    assert [row["depth"] for row in rows] == [1, 3] and all(row["passes"] for row in rows)
    for row in rows:
        assert row["same_text"] == row["same_as_ours"] == row["prompts"] == 3 and row["percent"] == 0
        assert row["by_position"] == row["our_by_position"] and row["apart"] == 0
        assert row["certificate"]["equal"] == row["certificate"]["compared"] > 10
    text = (folder / "serve_check.md").read_text()
    assert text.startswith("| engine | head | K |") and "| 3 | 3 of 3 | 3 of 3 |" in text


def changed(**how):
    """The loop with a part of its answer changed, where it drafts."""

    def engine(command, worker, job, folder, **more):
        found = by_our_loop(command, worker, job, folder, **more)
        return replace(found, **{name: change(found) for name, change in how.items()}) if job.head else found

    return engine


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (changed(texts=lambda run: [run.texts[0][:-1] + [9], *run.texts[1:]]), "1 texts are other than without drafts"),
        (changed(accepted=lambda run: run.verify_calls // 2), "% from ours, and 1 % are allowed"),
        (changed(rounds=lambda run: [[(at, d[::-1]) for at, d in calls] for calls in run.rounds]), "drafts otherwise"),
        (changed(rounds=lambda run: [[] for _ in run.rounds]), "(shown: 0, 0)"),
        (changed(rounds=lambda run: [calls[1:] for calls in run.rounds]), "expected the drafts of"),
        (changed(rounds=lambda run: None), "expected loop to tell its drafts"),
        (
            changed(rounds=lambda run: [[(at, [9999] * len(d)) for at, d in c] for c in run.rounds]),
            "lie in their texts",
        ),
        (changed(texts=lambda run: run.texts[1:]), "expected texts of 3 prompts"),
        (changed(accepted=lambda run: -1), "expected counts from 0 up"),
    ],
)
def test_what_does_not_pass_is_said_after_all_is_written(run, engine, said):
    code, _, err, folder = run(engine=engine)
    assert code == 2 and said in err.splitlines()[-1], err
    if not said.startswith(("expected", "(shown", "lie in")):
        [row] = json.loads((folder / "serve_check.json").read_text())["rows"]
        assert not row["passes"] and "1 of 1 rows do not pass" in err


def test_an_export_whose_layers_are_read_one_late_is_found(run, place):
    """The whole way: the engine captures other layers, the certificate says which."""

    def late(command, worker, job, folder, **more):
        if job.head is None:
            return by_our_loop(command, worker, job, folder)
        config = Path(job.head) / "config.json"
        values = json.loads(config.read_text())
        del values["eyrie"]
        config.write_text(json.dumps(values | {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}))
        plain = Verifier.load
        try:
            Verifier.load = classmethod(lambda cls, source, **more: plain(source, **(more | {"aux_layers": [3, 5, 6]})))
            return by_our_loop(command, worker, job, folder)
        finally:
            Verifier.load = plain

    code, _, err, _ = run(engine=late)
    assert code == 2 and "the captured layers are one too late" in err


def test_another_dtype_is_warned_of(run):
    _, _, err, _ = run("dtype=bfloat16", "depths=[1]")
    assert "in bfloat16 honest engines differ at near ties" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runs=null"], "give the heads to check"),
        (["runs=[/nowhere]"], "is absent"),
        (["engines=[nothing]"], "no engine 'nothing'; there are: vllm"),
        (["engines=[openvino]"], "found no bin/python: make "),
        (["depths=[0]"], "depths must be 1 or more, found 0"),
    ],
)
def test_mistakes_are_one_line(run, words, said):
    code, _, err, _ = run(*words)
    assert code == 2 and said in err and len(err.splitlines()) == 1


def test_a_head_that_no_engine_loads(run, place):
    code, _, err, _ = run(f"runs=[{place / 'independent'}]")
    assert code == 2 and "none of the engines loop loads a head of kind independent" in err


def test_a_worker_is_run_and_its_end_is_told(tmp_path):
    job = Job("v", None, "eagle3", 2, [[1, 2]], 4, [0])
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, sys\n"
        "job = json.load(open(sys.argv[1]))\n"
        "if job['depth'] > 2: print('first'); sys.exit('no room for drafts')\n"
        "run = dict(engine='toy 1', texts=[job['prompts'][0] + [7]], verify_calls=2, drafted=4, accepted=1)\n"
        "run |= dict(accepted_by_position=[1, 0], rounds=None, seconds=0.5)\n"
        "json.dump(run, open(sys.argv[2], 'w'))\n"
    )
    command = ["python3"]
    found = run_engine(command, str(worker), job, tmp_path / "a")
    assert found.tau == 1.5 and found.by_position == [0.5, 0] and found.texts == [[1, 2, 7]]
    assert found.tokens_per_second == 6
    with pytest.raises(UserError, match=r"ended with 1: no room for drafts; see .*log.txt"):
        run_engine(command, str(worker), replace(job, depth=3), tmp_path / "a")
    assert not (tmp_path / "a" / "result.json").exists()
    text = worker.read_text()
    worker.write_text(text.replace("texts=[job['prompts'][0] + [7]], ", ""))
    with pytest.raises(UserError, match="another record than was expected"):
        run_engine(command, str(worker), job, tmp_path / "b")
