"""Rows of JSONL on their way to batches: how fast each stage is, and what memory it takes.

    PYTHONPATH=.:tests python tests/million.py ROWS FOLDER

Writes FOLDER/rows.jsonl of so many rows, then prints one JSON object. Peaks are of this process and without the pages
of mapped files, which the system takes back when it needs them; `resident` counts those too.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

from conf.schema import DataConf
from data.batches import PackedLoader, packed_rows
from data.prepare import prepare
from data.sources import read_dialogues, sources_of
from data.suites import read_suite
from data.tokens import draft_vocab
from models.verifier import Verifier

WORDS = (Path(__file__).parent.parent / "README.md").read_text().split()
BAD = ("{broken", '{"conversations": []}', '{"prompt": null}', "", '{"messages": [{"role": "user", "content": " "}]}')
TOKENS_PER_STEP, SEED = 4096, 0


def write_rows(path: Path, rows: int) -> Counter:
    """Two in a hundred are bad, one is there twice, one asks what evaluation asks; returns how many of each."""
    rng, kinds = np.random.default_rng(SEED), Counter()
    asked, last = read_suite("eyrie")[0]["messages"][-1]["content"], ""
    with path.open("w", encoding="utf-8") as stream:
        for number in range(rows):
            kind, length = int(rng.integers(100)), int(min(rng.lognormal(3.2, 0.8), 400)) + 3
            first, other = (int(start) for start in rng.integers(0, len(WORDS) - 500, 2))
            question = f"{number}: {' '.join(WORDS[other : other + 1 + length // 3])}?"
            answer = " ".join(WORDS[first : first + length])
            if kind == 3:
                question = asked
            name = {0: "bad", 1: "bad", 2: "twice", 3: "asked"}.get(kind, "good")
            if name == "twice" and not last:
                name = "good"
            kinds[name] += 1
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            line = last if name == "twice" else json.dumps({"id": str(number), "conversations": turns})
            stream.write((BAD[number % len(BAD)] if name == "bad" else line) + "\n")
            if name == "good":
                last = line
    return kinds


class Memory(threading.Thread):
    """Looks at this process a hundred times a second; `peak`: bytes, mapped files left out, since `peak` was set."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def run(self) -> None:
        while True:
            text = Path("/proc/self/status").read_text()
            self.peak = max(self.peak, 1024 * int(re.search(r"RssAnon:\s+(\d+)", text)[1]))
            time.sleep(0.01)


def main(rows: int, folder: Path) -> None:
    path, stages = folder / "rows.jsonl", {}
    kinds, memory = write_rows(path, rows), Memory()
    verifier = Verifier.load("smollm2", whole=False, aux_layers=[])
    os.environ["EYRIE_CACHE"] = str(folder / "cache")
    settings = DataConf(path=str(path), answers="given", max_length=512, exclude=["eyrie", "humaneval"])
    memory.start()

    @contextmanager
    def stage(name: str, things: int):
        memory.peak, begun, cpu = 0, time.monotonic(), time.process_time()
        yield
        time.sleep(0.05)
        seconds = time.monotonic() - begun - 0.05
        stages[name] = {"seconds": round(seconds, 2), "rate": round(things / seconds), "peak": memory.peak}
        stages[name]["cpu"] = round(time.process_time() - cpu, 2)

    counts: Counter[str] = Counter()
    with stage("read", rows):
        read = sum(1 for _ in read_dialogues(sources_of(str(path)), counts))
    with stage("tokenise", rows):
        prepared = prepare(settings, verifier)
    with stage("open again", rows):
        again = prepare(settings, verifier)
    train = again.train
    assert again.content_hash == prepared.content_hash
    with stage("vocabulary", len(train)):
        draft_vocab(train, verifier.vocab_size)
    with stage("pack", len(train)):
        loader = PackedLoader(type("Source", (), {"documents": train}), TOKENS_PER_STEP, SEED)
        plan = loader.plan(0)
    with stage("batches", TOKENS_PER_STEP * min(len(plan), 500)):
        for batch in islice(plan, 500):
            packed_rows([train[index] for index in batch])
    found = {
        "rows": rows, "kinds": kinds, "read": read, "bad": counts.total(), "counts": again.counts, "batches": len(plan),
        "stages": stages, "resident": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "bytes": {"rows": path.stat().st_size, "documents": sum(p.stat().st_size for p in again.folder.iterdir())},
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
