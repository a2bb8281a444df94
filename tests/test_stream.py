"""`python -m eval.stream`: the text as it comes is the text that plain decoding gives, and its rounds add up."""

import io
import json
import sys

import pytest

from eval.speculative.loop import Round, plain_decode
from eval.speculative.processors import Sampling
from eval.stream import as_kept, pieces, stream
from models.chat import render
from models.verifier import Verifier
from tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifier")
    tiny_model(layers=2, hidden=32, seed=0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def answer(command, monkeypatch, folder):
    def call(*words: str, typed: str = ""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        return command("stream", stream, f"verifier_source={folder}", *words)

    return call


@pytest.mark.parametrize("drafter", ["prompt_lookup", "lookahead", "none"])
def test_what_streams_is_the_verifiers_text(answer, folder, drafter):
    code, out, _ = answer(f"draft={drafter}", "decode.max_new_tokens=20", "json=true", "prompt=one two one two")
    assert code == 0
    values = json.loads(out.splitlines()[-1])
    verifier = Verifier.load(str(folder), dtype="float32", device="cpu", aux_layers=[])
    ids = render(verifier.tokenizer, [{"role": "user", "content": "one two one two"}], add_generation_prompt=True)
    plain = plain_decode(verifier, ids, max_new_tokens=20, sampling=Sampling())
    assert values["tokens"] == plain.tokens
    rounds = values["rounds"]
    assert rounds[0]["prefill"] and not any(r["prefill"] for r in rounds[1:])
    emitted = [token for r in rounds for token in r["emitted"]]
    assert emitted[: len(plain.tokens)] == plain.tokens and all(r["accepted"] <= len(r["drafted"]) for r in rounds)
    tested = rounds[1:]
    assert values["tau"] == pytest.approx(1 + sum(r["accepted"] for r in tested) / len(tested))


def test_the_prompt_may_come_on_standard_input(answer):
    words = ("draft=none", "decode.max_new_tokens=8")
    code, typed, _ = answer(*words, typed="Hello, you = (me)\n")
    assert code == 0 and "7 verify calls" in typed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["draft=none", "prompt=a", "decode.batch=2"], "expected decode.batch=1, found 2"),
        (["prompt=a"], "give the run to evaluate"),
        (["draft=none", "prompt=a", "decode.max_new_tokens=100000"], "needs 100012 positions, found 512"),
    ],
)
def test_a_mistake_is_one_line(answer, words, message):
    code, _, err = answer(*words)
    assert code == 2 and message in err and err.count("\n") == 0


def test_an_empty_prompt_is_refused_before_anything_is_loaded(answer, monkeypatch):
    monkeypatch.setattr("eval.stream.load_candidate", None)
    code, _, err = answer("draft=none", typed="  \n")
    assert code == 2 and "expected a prompt, found none" in err


def test_a_text_ends_where_it_was_cut():
    calls = [Round((), 0, 0, (5,), prefill=True), Round((6, 7), 2, 2, (6, 7, 8), 2), Round((1,), 1, 0, (9,), 1)]
    assert [kept for _, kept in as_kept(calls, (7,), 10)] == [[5], [6, 7]]
    assert [kept for _, kept in as_kept(calls, (99,), 3)] == [[5], [6, 7]]
    assert [kept for _, kept in as_kept(calls, (99,), 10)] == [[5], [6, 7, 8], [9]]


def test_a_character_of_several_tokens_comes_with_its_last():
    class Bytes:
        """A tokenizer of bytes."""

        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    ids = list("aé!".encode())
    said = list(pieces(Bytes(), ids[:1], ids[1:], drafted=2))
    assert said == [("", True), ("é", True), ("!", False)]
