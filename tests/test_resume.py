"""A run that is killed anywhere and continued ends bitwise where an undisturbed one does."""

import csv
import json
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from data.store import StateStore
from eval.measure import EvalSettings
from eval.prompts import document_prompts
from eval.speculative.shapes import FixedTree
from models.heads import captured_layers
from tiny import tiny_verifier
from toy_training import CPU, documents, make
from train.callbacks import Validate
from train.checkpoints import KeepCheckpoints, best, newest, restore_rng, rng_states
from train.fit import MetricsFile, fit

STEPS = 9
CLOCKS = ("train/seconds", "train/tokens_per_second")
CASES = {
    "eagle3, muon, noise": dict(name="muon", accumulate=2, objective={"noise": 0.1}),
    "eagle3, on policy": dict(objective={"tokens": "own"}),
    "eagle3, vat, survival": dict(accumulate=3, objective={"weights": "vat", "survival_weight": 0.1}),
    "eagle1, features": dict(kind="eagle1", objective={"noise": 0.1, "token_weight": 0.1, "feature_weight": 1.0}),
    "medusa": dict(kind="medusa", accumulate=2, objective={"steps": 2, "noise": 0.1}),
    "independent": dict(kind="independent", name="muon", objective={"steps": 1}),
}


class Killed(BaseException):
    """What no callback may save anything for."""


class KillAt(pl.Callback):
    """Dies before micro-batch `number` of this process has been used."""

    def __init__(self, number):
        self.left = number

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.left -= 1
        if self.left < 0:
            module.settled = False  # a process that is gone saves nothing
            raise Killed


@pytest.fixture(scope="module")
def verifiers():
    return {
        kind: tiny_verifier(
            "llama",
            layers=5,
            hidden=16,
            vocab=300,
            seed=0,
            aux_layers=captured_layers(kind, [1, 2, 4] if kind == "eagle3" else None),
        )
        for kind in ("eagle1", "eagle3", "medusa", "independent")
    }


def train(folder, module, *more):
    """As train.main does, from the newest checkpoint in `folder`."""
    saved = newest(folder)
    settings = EvalSettings(shape=FixedTree.chain(2), max_new_tokens=4, baseline=False)
    callbacks = [Validate(document_prompts(documents(1)), settings, 3), KeepCheckpoints(folder, 2, 2, 3)]
    loggers = [MetricsFile(folder, saved.step if saved else 0)]
    fit(module, CPU, [*callbacks, *more], loggers, saved and saved.path)


def contents(folder):
    """What a run leaves: the last checkpoint, clocks left out, the metrics, and what is said of every checkpoint."""
    values = newest(folder).values
    values["eyrie"].pop("elapsed")
    with (folder / "metrics.csv").open() as stream:
        rows = [[(k, v) for k, v in row.items() if k not in CLOCKS] for row in csv.DictReader(stream)]
    notes = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return values, rows, [(note["step"], note["metrics"]) for note in notes]


def same(one, other, place=""):
    """Bitwise, through nested dicts and lists."""
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            same(one[key], other[key], f"{place}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{place}/{index}")
    else:
        assert one == other, place


@pytest.mark.parametrize("case", CASES)
def test_killed_and_continued_equals_undisturbed(verifiers, tmp_path, case):
    """Killed four times, before the first checkpoint, within windows, right after a save, across epochs."""
    settings = {"kind": "eagle3", "log_every": 1} | CASES[case]
    verifier, per_step = verifiers[settings["kind"]], settings.get("accumulate", 1)
    train(tmp_path / "whole", make(verifier, STEPS, **settings))

    deaths = [1 * per_step, 3 * per_step + per_step // 2, 1 * per_step, 2 * per_step + per_step - 1]
    for number, death in enumerate(deaths):
        torch.manual_seed(number)  # a process that starts with other states of chance
        with pytest.raises(Killed):
            train(tmp_path / "parts", make(verifier, STEPS, **settings), KillAt(death))
    steps = [saved.step for saved in [newest(tmp_path / "parts")]]
    last = make(verifier, STEPS, **settings)
    train(tmp_path / "parts", last)
    assert last.global_step == STEPS > steps[0] > 0 and last.loader.epoch >= 1

    whole, parts = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    assert [dict(row)["step"] for row in parts[1]] == sorted(
        [*map(str, range(1, STEPS + 1)), "3", "6", "9"]  # every step once, and three validations
    )
    same(whole, parts)


def test_a_validation_that_is_cut_short_is_made_up_for(verifiers, tmp_path, monkeypatch):
    """A second Ctrl-C in the midst of it: the step is saved unjudged, and judged when the run goes on."""
    verifier = verifiers["eagle3"]
    train(tmp_path / "whole", make(verifier, 5))
    with monkeypatch.context() as patched, pytest.raises(SystemExit):  # how Lightning passes Ctrl-C on

        def cut(*_):
            raise KeyboardInterrupt

        patched.setattr("train.callbacks.free_running", cut)
        train(tmp_path / "parts", make(verifier, 5))
    assert best(tmp_path / "parts") is None and newest(tmp_path / "parts").step == 3
    train(tmp_path / "parts", make(verifier, 5))
    assert best(tmp_path / "parts")["step"] == 3
    same(contents(tmp_path / "whole"), contents(tmp_path / "parts"))


def test_states_from_the_disk_resume_as_those_of_the_verifier(verifiers, tmp_path):
    verifier = verifiers["eagle3"]
    store = StateStore.capture(verifier, documents(), tmp_path / "store")
    train(tmp_path / "whole", make(verifier, 4, source=store))
    with pytest.raises(Killed):
        train(tmp_path / "parts", make(verifier, 4, source=store), KillAt(3))
    train(tmp_path / "parts", make(verifier, 4, source=store))
    same(contents(tmp_path / "whole"), contents(tmp_path / "parts"))


def test_the_comparison_can_fail(verifiers, tmp_path):
    """Another seed of one noise, in one batch, is found."""
    for name, noise in (("one", 0.1), ("other", 0.1000001)):
        train(tmp_path / name, make(verifiers["eagle3"], 3, objective={"noise": noise}))
    with pytest.raises(AssertionError):
        same(contents(tmp_path / "one"), contents(tmp_path / "other"))


def test_a_finished_run_trains_no_further(verifiers, tmp_path):
    train(tmp_path, make(verifiers["eagle3"], 4))
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("step-*")}
    module = make(verifiers["eagle3"], 4)
    module.labels = None  # a step would call it
    train(tmp_path, module)
    assert module.global_step == 4 and {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("step-*")} == before
    for name, value in newest(tmp_path).values["state_dict"].items():
        assert torch.equal(value, module.state_dict()[name])


def test_every_state_of_chance_comes_back():
    def draws():
        return random.random(), np.random.rand(), torch.rand(2).tolist(), random.gauss(0, 1), np.random.randn()

    random.gauss(0, 1), np.random.randn()  # each keeps the other half of a pair
    kept = rng_states()
    first = draws()
    assert first != draws()
    restore_rng(kept)
    assert first == draws()
