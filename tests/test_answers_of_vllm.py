"""A real vLLM server on this CPU writes SmolLM2's answers: make serve-check runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from data.answers import Sampling
from data.clock import Limits
from data.fleet import served_model
from data.log import RoundLog
from data.regenerate import regenerate
from data.rows import Dialogue
from data.server_answers import ServerAnswers
from eval.serving.engine import Job
from eval.serving.server import vllm_server
from models import embedded
from models.verifier import Verifier
from tiny_writer import content, turns

PYTHON = Path(".engines/vllm/bin/python").absolute()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.exists(), reason="make .engines/vllm/.done")]
ROOT = Path(__file__).parent.parent
TOPICS = ("the sea", "bread", "a bicycle", "snow", "chess", "the moon", "a piano", "tea", "maps", "glass")
ASKED = [f"Tell me about {topic}." for topic in TOPICS] + [f"Write a line of Python about {topic}." for topic in TOPICS]
GREEDY = Sampling(max_new_tokens=32, max_length=256, batch_size=4)
TIE = 1e-3  # logits


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    room = [[0] * (GREEDY.max_length - GREEDY.max_new_tokens)]
    job = Job(str(embedded.folder()), None, "", 0, room, GREEDY.max_new_tokens, [], batch=8)
    with vllm_server(PYTHON, job, tmp_path_factory.mktemp("vllm")) as url:
        yield url


@pytest.fixture(scope="module")
def verifier():
    return Verifier.load("smollm2", dtype="float32")


def asked():
    return [Dialogue(str(n), "s", turns(text, "old", "Say it again, shorter.")) for n, text in enumerate(ASKED)]


def same_or_tie(verifier, one: list[int], other: list[int]) -> str:
    """ "same", or "tie" where the first difference is between logits as good as equal."""
    if one == other:
        return "same"
    place = next(n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    ids_BT = torch.tensor([one[:place]])
    with torch.no_grad():
        last_BTD = verifier.capture(ids_BT, torch.zeros_like(ids_BT), torch.arange(place)[None]).last_BTD
        logits_V = verifier.logits(last_BTD[0, -1])
    assert abs(float(logits_V[one[place]] - logits_V[other[place]])) < TIE, (place, one, other)
    return "tie"


def test_the_server_writes_what_is_written_here(url, verifier, tmp_path, capsys):
    began = time.perf_counter()
    here = regenerate(verifier, asked(), tmp_path / "here.jsonl", GREEDY, Limits())
    middle = time.perf_counter()
    with ServerAnswers([url], verifier, served_model([url], None), concurrency=8, longest=256) as write:
        there = regenerate(verifier, asked(), tmp_path / "there.jsonl", GREEDY, Limits(), write)
    end = time.perf_counter()
    seen = Counter()
    for one, other in zip(here.rows, there.rows, strict=True):
        assert one["id"] == other["id"]
        seen[same_or_tie(verifier, one["input_ids"], other["input_ids"])] += 1
        if one["input_ids"] == other["input_ids"]:
            assert content([one]) == content([other])
        for start, stop in other["spans"]:
            assert verifier.tokenizer.decode(other["input_ids"][:start]).endswith("<|im_start|>assistant\n")
            assert other["input_ids"][stop - 1] in verifier.eos_ids or stop - start == GREEDY.max_new_tokens
    assert here.counts == there.counts or seen["tie"]
    tokens = [sum(b - a for row in log.rows for a, b in row["spans"]) for log in (here, there)]
    with capsys.disabled():
        print(
            f"\nvLLM: {len(here)} dialogues, {dict(seen)}; here {tokens[0] / (middle - began):.0f} answer tokens/s, "
            f"there {tokens[1] / (end - middle):.0f}"
        )


def test_a_client_that_is_killed_goes_on_without_doubles(url, tmp_path, capsys):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ASKED))
    words = ["task=regenerate", f"data.path={prompts}", f"data.server={url}", f"data.max_documents={len(ASKED)}"]
    words += ["data.max_new_tokens=32", "data.max_length=256", "data.batch_size=2", "data.concurrency=2"]
    words += ["verifier.dtype=float32"]
    command = [sys.executable, "-m", "data", *words]

    def run(cache: str, kill: bool) -> list[dict]:
        settings = {"env": os.environ | {"EYRIE_CACHE": str(tmp_path / cache)}, "cwd": ROOT}
        (tmp_path / cache).mkdir()
        (tmp_path / cache / "verifiers").symlink_to(embedded.folder().parent)
        if kill:
            with subprocess.Popen(command, **settings) as client:
                while not (found := list((tmp_path / cache).glob("dialogues/*/dialogues.jsonl"))) or not len(
                    found[0].read_bytes()
                ):
                    assert client.poll() is None
                    time.sleep(0.05)
                client.send_signal(signal.SIGKILL)
            assert 0 < len(RoundLog(found[0])) < len(ASKED)
        subprocess.run([*command, f"out={out}"], check=True, **settings)
        return content(RoundLog(out).rows)

    whole, resumed = run("whole", False), run("killed", True)
    assert len(resumed) == len({row["id"] for row in resumed}) == len(ASKED)
    assert [row["conversations"][0] for row in resumed] == [{"role": "user", "content": text} for text in ASKED]
    same = sum(one == other for one, other in zip(whole, resumed, strict=True))
    with capsys.disabled():
        print(f"\nvLLM: a client killed after its first round: {len(resumed)} rows, {same} as without")
    assert same >= len(ASKED) - 2, "but for ties that what shares the server's batch may turn"
