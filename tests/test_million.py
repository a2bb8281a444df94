"""A million rows are read, tokenised, split and packed in bounded memory, and every one of them is accounted for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
BOUND = 1.0e9  # bytes, of which torch, transformers and the verifier's embeddings take 0.7 GB before anything is read
PER_ROW = 250  # bytes that a further row may take: lengths, labels, hashes and the plan


def measured(rows: int, folder: Path) -> dict:
    folder.mkdir()
    command = [sys.executable, str(ROOT / "tests" / "million.py"), str(rows), str(folder)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def peak(found: dict) -> int:
    return max(stage["peak"] for stage in found["stages"].values())


def test_a_million_rows(tmp_path, capsys):
    few, many = measured(250_000, tmp_path / "few"), measured(1_000_000, tmp_path / "many")
    with capsys.disabled():
        for name, stage in many["stages"].items():
            print(
                f"\n{name}: {stage['rate']:,} a second, {stage['seconds']} s, peak {stage['peak'] / 1e9:.3f} GB", end=""
            )
    for found in (few, many):
        kinds, counts = found["kinds"], found["counts"]
        assert sum(kinds.values()) == found["rows"] and found["bad"] == kinds["bad"]
        assert found["read"] == found["rows"] - kinds["bad"]
        assert counts["train"]["documents"] + counts["validation"]["documents"] == kinds["good"]
        assert counts["dropped"]["duplicate document"] == kinds["twice"]
        assert counts["dropped"]["evaluation prompt"] == kinds["asked"]
        assert found["batches"] < 1.01 * counts["train"]["tokens"] / 4096 + 64, "rows are full"
        assert peak(found) < BOUND
    assert peak(many) - peak(few) < PER_ROW * (many["rows"] - few["rows"])
