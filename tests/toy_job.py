"""The debug experiment on a verifier of a few thousand parameters, run in this process."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from models.export.native import read_head
from tiny import tiny_model, tiny_tokenizer
from train.checkpoints import newest
from train.main import train

PLAIN = ["evaluation.report=false", "evaluation.plots=false"]


def debug_words(folder: Path) -> list[str]:
    """The command line: verifier, prompts and outputs in `folder`."""
    tiny_model("llama", layers=8, hidden=32, vocab=300).save_pretrained(folder / "verifier")
    tiny_tokenizer(300).save_pretrained(folder / "verifier")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"What is {i} and {i * i}?"}) + "\n" for i in range(14)))
    return [
        "experiment=debug",
        f"verifier.source={folder / 'verifier'}",
        "data=jsonl",
        f"data.path={prompts}",
        "data.exclude=[]",
        f"evaluation.prompts={prompts}",
        f"output_dir={folder / 'out'}",
        "trainer.accelerator=cpu",
        "json=true",
    ]


def run(monkeypatch, capsys, words):
    """(exit code, the JSON object of the last line, standard error) of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["train", *words])
    code = 0
    try:
        train()
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]) if out.strip() else None, err


def steady(run):
    """What a run leaves, clocks left out: weights and moments, the head, metrics, acceptance."""
    run = Path(run)
    values = newest(run / "checkpoints").values
    with (run / "metrics.csv").open() as stream:
        rows = [{k: v for k, v in row.items() if "second" not in k} for row in csv.DictReader(stream)]
    alpha = json.loads((run / "alpha.json").read_text())
    return (
        {name: value.tolist() for name, value in values["state_dict"].items()},
        [value.tolist() for state in values["optimizer_states"][0]["state"].values() for value in state.values()],
        {name: value.tolist() for name, value in read_head(run).tensors.items()},
        rows,
        [alpha[name] for name in ("tau", "alpha_by_depth", "drafted", "accepted")],
    )
