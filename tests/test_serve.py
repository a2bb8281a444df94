"""`python -m eval serve=URL`: a stub server that decodes with our own loop, honest and with each fault."""

import json
import threading
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from eval.command import evaluate_run
from eval.serving import client
from eval.speculative.loop import Decoded, decode_batch
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
        ({"models": ["a", "b"]}, [], "found a, b: name one, serve_model=NAME"),
        ({}, ["serve_model=c"], "expected serve_model among tiny at http"),
        ({"models": []}, [], "expected an OpenAI-compatible server"),
        ({"metrics": False}, [], "has no /metrics (status 404)"),
        ({"plain": True}, [], "without speculative decoding: vLLM counts no drafts"),
        ({"plain": True, "engine": "llamacpp"}, [], "without speculative decoding: llama.cpp counts no drafts"),
        ({"engine": "other"}, [], "expected metrics of vLLM, SGLang or llama.cpp"),
        ({}, ["temperature=0.5"], "compares greedy chains"),
        ({}, ["decode=tree"], "compares greedy chains"),
        ({}, ["serve_batch=0"], "serve_batch must be 1 or more"),
        ({}, ["decode.max_new_tokens=600"], "an answer of decode.max_new_tokens=600 with drafts of depth"),
        ({}, ["serve=http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        ({}, ["serve=localhost"], "expected serve=http://HOST:PORT"),
    ],
)
def test_what_cant_be_compared_is_one_line(compare, faults, words, said):
    code, record, out = compare(*words, **faults)
    assert code == 2 and said in out and record == {}
