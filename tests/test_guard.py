"""What is no number changes no weight: the run stops with a file that shows it again, or skips the step and says so."""

import csv
import re
from dataclasses import replace

import pytest
import torch

from conf.errors import UserError
from data.batches import OnlineStates
from tiny import tiny_verifier
from toy_training import CPU, documents, make, parameters, two_ranks
from train.checkpoints import KeepCheckpoints, newest
from train.fit import MetricsFile, fit
from train.guard import IN_A_ROW, documents_before
from train.reproduce import read, replay


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier("llama", layers=5, hidden=16, vocab=300, seed=0, aux_layers=[1, 2, 4])


class Poisoned(OnlineStates):
    """States of which those of one document hold a NaN."""

    def __init__(self, verifier, document, name="aux_BTAD"):
        super().__init__(verifier, documents())
        self.document, self.name = document, name

    def states(self, indices):
        states = super().states(indices)
        if self.document in list(indices):
            bad = getattr(states, self.name).clone()
            bad.view(-1)[0] = torch.nan
            states = replace(states, **{self.name: bad})
        return states


def spoil(module, step, value=torch.nan, name="fc.weight"):
    """One number of a gradient is lost, in the step after `step`."""
    parameter = dict(module.head.named_parameters())[name]

    def hook(gradient):
        if module.global_step == step:
            gradient = gradient.clone()
            gradient.view(-1)[3] = value
        return gradient

    parameter.register_hook(hook)


def moments(module):
    return [value.clone() for state in module.optimizers().state.values() for value in state.values()]


def rows(folder):
    with (folder / "metrics.csv").open() as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_gradient_stops_before_any_weight_is_touched(verifier, tmp_path, value):
    module, seen = make(verifier, 6, reproducers=tmp_path / "nonfinite"), {}
    spoil(module, 3, value)
    module.on_train_batch_start = lambda *_: seen.update(weights=parameters(module), moments=moments(module))
    with pytest.raises(UserError) as caught:
        fit(module, CPU, [KeepCheckpoints(tmp_path, 100)])
    path = tmp_path / "nonfinite" / "step-00000004.pt"
    batch = documents_before(module.loader, read(path)["place"])
    named = ", ".join(f"{index} ({index})" for index in sorted(batch))
    assert str(caught.value) == (
        f"step 4: gradients of fc.weight not finite; documents {named}; see it again with "
        f"python -m train.reproduce file={path}; lower optim.lr (or optim.matrix_lr), or resume with "
        "trainer.nonfinite=skip"
    )
    assert module.global_step == 3
    for name, weight in parameters(module).items():
        assert torch.equal(weight, seen["weights"][name])
    assert all(torch.equal(a, b) for a, b in zip(moments(module), seen["moments"], strict=True))
    saved = newest(tmp_path)  # what was good before it is kept
    assert saved.step == 3 and torch.equal(saved.values["state_dict"]["head.fc.weight"], seen["weights"]["fc.weight"])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_skipped_step_changes_nothing_and_is_counted(verifier, tmp_path, caplog, name):
    module, seen = make(verifier, 6, name=name, accumulate=2, log_every=1, nonfinite="skip"), []
    spoil(module, 3)
    module.on_train_batch_end = lambda *_: seen.append((module.global_step, parameters(module), moments(module)))
    fit(module, CPU, [KeepCheckpoints(tmp_path, 4)], [MetricsFile(tmp_path)])
    assert module.global_step == 6 and module.skipped == 1
    before, after, later = ([s for s in seen if s[0] == step][0] for step in (3, 4, 5))
    for name, weight in before[1].items():
        assert torch.equal(weight, after[1][name])
    assert all(torch.equal(a, b) for a, b in zip(before[2], after[2], strict=True))
    assert not torch.equal(after[1]["fc.weight"], later[1]["fc.weight"])
    (line,) = [text for text in caplog.messages if "skipped" in text]
    assert re.fullmatch(r"step 4: gradients of fc.weight not finite; documents .*; the step is skipped", line)
    assert [(row["step"], row["train/skipped"], bool(row["train/loss"])) for row in rows(tmp_path)] == [
        ("1", "0", True), ("2", "0", True), ("3", "0", True), ("4", "1", False), ("5", "1", True), ("6", "1", True),
    ]  # fmt: skip
    assert "nan" not in (tmp_path / "metrics.csv").read_text()
    scales = [float(row["train/lr_scale"]) for row in rows(tmp_path) if row["train/lr_scale"]]
    assert scales == sorted(scales, reverse=True) and len(set(scales)) == 5  # the schedule went on


def test_skips_are_remembered_by_a_resumed_run(verifier, tmp_path):
    module = make(verifier, 6, nonfinite="skip", log_every=1)
    spoil(module, 1)
    module.on_train_batch_end = lambda *_: setattr(module, "stop_wanted", module.global_step >= 2)
    fit(module, CPU, [KeepCheckpoints(tmp_path, 0)])
    module = make(verifier, 6, nonfinite="skip", log_every=1)
    fit(module, CPU, [KeepCheckpoints(tmp_path, 0)], [MetricsFile(tmp_path)], newest(tmp_path).path)
    assert module.skipped == 1 and rows(tmp_path)[-1]["train/skipped"] == "1"


def test_many_in_a_row_stop_all_the_same(verifier, caplog):
    """Warned once for each occasion; a run that finds nothing finite any more does not go on until its end."""
    module, bad = make(verifier, 100, nonfinite="skip"), {1, 3, *range(5, 100)}
    parameter = module.head.fc.weight
    parameter.register_hook(lambda gradient: gradient * (torch.nan if module.global_step in bad else 1.0))
    with pytest.raises(UserError, match="step 16: gradients of fc.weight and 9 more|step 16: gradients of fc.weight"):
        fit(module, CPU, [])
    assert module.global_step == 5 + IN_A_ROW and module.skipped == 2 + IN_A_ROW
    assert [text.split(":")[0] for text in caplog.messages if "skipped" in text] == ["step 2", "step 4", "step 6"]


@pytest.mark.parametrize("name", ["aux_BTAD", "last_PD", "lse_P"])
def test_states_that_are_at_fault_are_named(verifier, name):
    """The document, not the learning rate."""
    module = make(verifier, 9, source=Poisoned(verifier, 2, name))
    with pytest.raises(UserError) as caught:
        fit(module, CPU, [])
    text = str(caught.value)
    assert f"the verifier's states ({name})" in text and "documents 2 (2); capture them again" in text
    assert "optim.lr" not in text


def test_weights_that_are_at_fault_are_named(verifier):
    module = make(verifier, 9)
    module.on_train_batch_end = lambda *_: module.global_step == 2 and module.head.norm.weight.data.fill_(torch.inf)
    with pytest.raises(
        UserError, match="^step 3: weights of norm.weight, loss nan, .*not finite.*an earlier checkpoint"
    ):
        fit(module, CPU, [])


@pytest.mark.parametrize("objective", [{"noise": 0.1}, {"tokens": "own"}])
def test_a_reproducer_shows_the_same_again(verifier, tmp_path, objective):
    """From the file and the verifier alone; and with sound weights in it, nothing is found."""
    module = make(verifier, 9, objective=objective, accumulate=2, reproducers=tmp_path)
    module.on_train_batch_end = lambda *_: (
        module.global_step == 2 and module.head.lm_head.weight.data.view(-1)[:5].fill_(torch.inf)
    )
    with pytest.raises(UserError, match="^step 3: .*file=.*step-00000003.pt"):
        fit(module, CPU, [])
    kept = read(tmp_path / "step-00000003.pt")
    found = replay(kept, verifier)
    assert len(kept["batches"]) == 2 and kept["step"] == 3 and "loss" in kept["what"]
    assert [line.split(" of ")[0] for line in found["losses"]] == [f"loss {batch['loss']}" for batch in kept["batches"]]
    assert "gradient of lm_head.weight" in found["gradients"]
    kept["weights"]["lm_head.weight"][kept["weights"]["lm_head.weight"].isinf()] = 0.1
    assert replay(kept, verifier) == {"losses": [], "gradients": []}


def test_files_that_show_nothing(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"no")
    torch.save({"format": 9}, tmp_path / "b.pt")
    for name, message in (("a.pt", "cannot be read"), ("b.pt", "another kind"), ("c.pt", "found none")):
        with pytest.raises(UserError, match=message):
            read(tmp_path / name)


def one_of_two(rank, out):
    """The states of one document, so one rank's loss, hold a NaN."""
    verifier = tiny_verifier("llama", layers=5, hidden=16, vocab=300, seed=0, aux_layers=[1, 2, 4])
    module = make(verifier, 20, rank=rank, world=2, source=Poisoned(verifier, 2), reproducers=out)
    try:
        fit(module, replace(CPU, devices=2, strategy="ddp"), [])
    except UserError as error:
        (out / f"{rank}.txt").write_text(f"{module.global_step} {error}")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")  # newer Pythons; nothing runs in them
def test_ranks_stop_together_and_the_one_at_fault_names_its_documents(tmp_path):
    with two_ranks(one_of_two, tmp_path):
        pass
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert said[0].split()[0] == said[1].split()[0]
    (guilty,) = [rank for rank in range(2) if "the verifier's states (aux_BTAD)" in said[rank]]
    assert "documents 2 (2)" in said[guilty] and f"loss not finite on rank {guilty}; " in said[1 - guilty]
    assert read(next(tmp_path.glob(f"step-*-rank{guilty}.pt")))["batches"]
