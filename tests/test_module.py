"""The LightningModule: what is saved, exact resumption, one division of gradients, two ranks, signals."""

import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from conf.errors import UserError
from conf.schema import OptimConf, TrainerConf
from eval.measure import EvalSettings
from eval.prompts import document_prompts
from eval.speculative.shapes import FixedTree
from tiny import tiny_verifier
from toy_head import make_head, ttt_loss
from toy_training import CPU, documents, make, parameters, two_ranks
from train.callbacks import Bar, Validate, free_running, graceful, summary, time_left
from train.checkpoints import KeepCheckpoints, newest
from train.fit import MetricsFile, fit, strategy
from train.module import batch_seed, check_same
from train.optim import build_optimizer


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier("llama", layers=8, hidden=32, vocab=300, seed=0)


def test_every_micro_batch_of_every_rank_has_noise_of_its_own(verifier):
    place = make(verifier, 1).loader.state_dict()
    places = [place | {"epoch": epoch, "step": step} for epoch in (0, 1) for step in (0, 1)]
    places.append(place | {"seed": -1})
    seeds = {batch_seed(place, rank) for place in places for rank in (0, 1)}
    assert len(seeds) == 10 and seeds == {batch_seed(place, rank) for place in places for rank in (0, 1)}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_frozen_lm_head_stays_as_it_starts(verifier, name):
    module = make(verifier, steps=4, name=name)
    module.head.lm_head.requires_grad_(False)
    before = parameters(module)
    fit(module, CPU, [])
    changed = {key for key, value in parameters(module).items() if not torch.equal(value, before[key])}
    assert changed == set(before) - {"lm_head.weight"}


def test_muon_leaves_the_maps_into_and_out_of_the_layer_to_adamw():
    head = make_head(survival=True)
    groups = build_optimizer(head, OptimConf(name="muon")).param_groups
    names = {id(parameter): name for name, parameter in head.named_parameters()}
    muon, adamw = ({names[id(p)] for p in group["params"]} for group in groups)
    assert {"fc.weight", "lm_head.weight", "survival.weight", "survival.bias"} < adamw
    assert muon and all("_proj." in name for name in muon)


def test_checkpoint_holds_the_head_and_nothing_else(verifier, tmp_path):
    module = make(verifier, 2)
    fit(module, CPU, [KeepCheckpoints(tmp_path, 1)])
    checkpoint = newest(tmp_path).values
    assert checkpoint["state_dict"].keys() == {f"head.{name}" for name in module.head.state_dict()}
    optimised = {id(p) for group in module.optimizers().param_groups for p in group["params"]}
    assert optimised == {id(p) for p in module.head.parameters()}
    assert not any(p.requires_grad for p in verifier.model.parameters())


def test_windows_change_no_gradient(verifier, tmp_path):
    """One window of several micro-batches takes the step that their sum of losses over their sum of weights asks."""
    module = make(verifier, 1, accumulate=3)
    reference = make(verifier, 1)
    batches = iter(reference.loader)
    total, weights = 0.0, 0.0
    for _ in range(3):
        states = next(batches)
        teacher_PR = verifier.logits(states.last_PD, reference.head.vocab.ids_R)
        loss, weight, _ = ttt_loss(reference.head, states, teacher_PR, 3, 0.8)
        total, weights = total + loss, weights + weight
    (total / weights).backward()
    seen = {}

    def keep(optimizer):
        seen.update({name: p.grad.clone() for name, p in module.head.named_parameters()})

    module.on_before_optimizer_step = keep
    fit(module, CPU, [])
    torch.nn.utils.clip_grad_norm_(reference.head.parameters(), OptimConf().clip)
    for name, p in reference.head.named_parameters():
        torch.testing.assert_close(seen[name], p.grad, rtol=1e-4, atol=1e-7)


def test_backward_is_not_under_autocast(verifier):
    """On CUDA, autocast to bfloat16 may have it multiply in float16 (pytorch #105682)."""
    module, seen = make(verifier, 1, accumulate=2), []
    for p in module.head.parameters():
        p.register_hook(lambda grad: seen.append(torch.is_autocast_enabled("cpu")))
    forward, inside = module.labels, []
    module.labels = lambda states: (inside.append(torch.is_autocast_enabled("cpu")), forward(states))[1]
    fit(module, replace(CPU, precision="bf16-mixed"), [])
    assert inside == [True, True] and len(seen) >= 2 * len(list(module.head.parameters())) and not any(seen)


def test_validation_leaves_the_head_training_and_changes_nothing(verifier, tmp_path):
    prompts = document_prompts(documents(2))
    settings = EvalSettings(shape=FixedTree.chain(2), max_new_tokens=6, baseline=False)
    plain, watched = make(verifier, 4), make(verifier, 4)
    fit(plain, CPU, [])
    fit(watched, CPU, [Validate(prompts, settings, every=2)], [MetricsFile(tmp_path)])
    assert watched.head.training
    assert 1 <= watched.metrics["val/tau"] <= 3
    assert "val/tau" in (tmp_path / "metrics.csv").read_text()
    for name, value in parameters(plain).items():
        assert torch.equal(value, parameters(watched)[name])
    free_running(watched, prompts, settings)
    assert watched.head.training


def test_tau_stays_in_sight_after_later_steps(verifier):
    settings = EvalSettings(shape=FixedTree.chain(2), max_new_tokens=6, baseline=False)
    module, seen = make(verifier, 3, log_every=1), []
    check = Validate(document_prompts(documents(1)), settings, every=1)
    module.on_train_batch_end = lambda *_: (seen.append(module.metrics.get("val/tau")), setattr(check, "every", 0))
    fit(module, CPU, [check])
    assert None not in seen and len(set(seen)) == 1  # measured after step 1, shown at all three
    assert "tau" in summary(module.metrics) and module.metrics["train/tokens"] > 0


def test_answers_that_end_before_a_draft_say_nothing_of_tau(verifier, tmp_path, monkeypatch):
    settings = EvalSettings(shape=FixedTree.chain(2), max_new_tokens=6, baseline=False)
    module = make(verifier, 4, log_every=1)
    silent = SimpleNamespace(tau=None, alpha_by_depth=[None, None])
    monkeypatch.setattr("train.callbacks.evaluate", lambda *_, **__: silent)
    check = Validate(document_prompts(documents(2)), settings, every=1)
    fit(module, CPU, [check, Bar(), KeepCheckpoints(tmp_path, 1, 2)])
    assert "val/tau" not in module.metrics and newest(tmp_path).step == 4


def test_bar_shows_loss_accuracy_tau_and_rate(verifier, monkeypatch, capsys):
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    module = make(verifier, 4)
    module.metrics["val/tau"] = 1.25
    fit(module, CPU, [Bar()])
    text = capsys.readouterr().err
    assert "100%" in text and "step 4 loss" in text and "tau 1.25" in text
    assert summary({"val/tau": 1.25}) == "tau 1.25"
    metrics = {"train/loss": 2.5, "train/accuracy_0": 0.5, "train/accuracy_1": 0.25, "train/tokens_per_second": 1234.0}
    assert time_left(0.25, 42.0) == ", 2:06 left" and time_left(0.0, 1.0) == ""
    assert summary(metrics | {"val/tau": 1.25}) == "loss 2.500, acc 0.50 0.25, tau 1.25, 1,234 tokens/s"


def test_a_clock_ends_the_run(verifier):
    module = make(verifier, seconds=1.0)
    fit(module, CPU, [])
    assert module.global_step > 0 and 1.0 <= module.elapsed < 20


def test_a_bad_loss_stops_with_advice_and_keeps_the_last_good_checkpoint(verifier, tmp_path):
    module = make(verifier, 8, log_every=1)
    keep = KeepCheckpoints(tmp_path, 2)

    def spoil(*_):
        if module.global_step == 3:
            with torch.no_grad():
                module.head.lm_head.weight.fill_(float("nan"))

    module.on_train_batch_end = spoil
    with pytest.raises(UserError, match="lower optim.lr"):
        fit(module, CPU, [keep])
    assert newest(tmp_path).step == 2


def test_a_signal_ends_the_run_after_the_step(verifier, tmp_path):
    module = make(verifier, 50)
    module.on_train_batch_end = lambda *_: module.global_step == 2 and os.kill(os.getpid(), 2)
    with graceful(module):
        fit(module, CPU, [KeepCheckpoints(tmp_path, 0)])
    assert module.stop_wanted and module.global_step == 3
    assert newest(tmp_path).step == 3


def test_a_bar_without_a_terminal_says_a_line_now_and_then(verifier, caplog):
    caplog.set_level("INFO")
    bar = Bar()
    bar.EVERY = 0.0
    module = make(verifier, 4)
    module.metrics["val/tau"] = 1.25
    fit(module, CPU, [bar])
    line = [text for text in caplog.messages if "training" in text][1]
    for part in ("training 50%: step 2 loss ", "acc 0.", "tau 1.25", " tokens/s, 0:0", " left"):
        assert part in line


def test_several_devices_are_ddp_without_buffers():
    for conf in (TrainerConf(devices=2), TrainerConf(devices=[0, 1]), TrainerConf(num_nodes=2)):
        assert isinstance(strategy(conf), DDPStrategy)
        assert strategy(conf)._ddp_kwargs == {"broadcast_buffers": False, "gradient_as_bucket_view": True}
    assert strategy(TrainerConf()) == strategy(TrainerConf(devices="auto", accelerator="cpu")) == "auto"
    assert strategy(TrainerConf(devices=2, strategy="fsdp")) == "fsdp"


def test_ranks_with_other_data_or_vocabulary_are_named():
    check_same([[10, 7], [10, 7]])
    with pytest.raises(UserError, match="same training documents.*rank 0 a, rank 1 b"):
        check_same([[10, 7], [11, 7]])
    with pytest.raises(UserError, match="same draft vocabulary.*EYRIE_CACHE"):
        check_same([[10, 7], [10, 8]])


def test_a_checkpoint_of_another_verifier_is_refused(verifier, tmp_path):
    fit(make(verifier, 1), CPU, [KeepCheckpoints(tmp_path, 1)])
    other = tiny_verifier("llama", layers=8, hidden=32, vocab=300, seed=1)
    with pytest.raises(UserError, match=f"{verifier.weights_hash[:12]}.*{other.weights_hash[:12]}"):
        fit(make(other, 2), CPU, [], checkpoint=newest(tmp_path).path)


def test_ranks_must_agree_with_lightning(verifier):
    with pytest.raises(UserError, match="rank 0 of 1"):
        fit(make(verifier, 1, rank=1, world=2), CPU, [])


def one_of_two(rank, out):
    """Twenty steps of one batch each."""
    verifier = tiny_verifier("llama", layers=8, hidden=32, vocab=300, seed=0)
    module = make(verifier, 20, rank=rank, world=2, count=100)
    fit(module, replace(CPU, devices=2, strategy="ddp"), [KeepCheckpoints(out, 2)])
    if rank == 0:
        torch.save(parameters(module), out / "two.pt")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")  # newer Pythons; nothing runs in them
def test_two_ranks_step_as_two_accumulated_batches(verifier, tmp_path):
    """The weights of two processes after 20 steps are those of one, whose windows hold what both were dealt."""
    with two_ranks(one_of_two, tmp_path):
        alone = make(verifier, 20, accumulate=2, count=100)
        steps = zip(
            *(make(verifier, 20, rank=rank, world=2, count=100).loader.plan(0) for rank in range(2)), strict=True
        )
        alone.loader._plan = (0, [batch for step in steps for batch in step])
        assert len(alone.loader.plan(0)) >= 40  # 20 steps are within an epoch
        fit(alone, CPU, [])
        assert alone.global_step == 20 and alone.loader.epoch == 0
    assert newest(tmp_path).step == 20
    together = torch.load(tmp_path / "two.pt")
    started = parameters(make(verifier, 20))
    for name, value in parameters(alone).items():
        torch.testing.assert_close(together[name], value, rtol=1e-4, atol=1e-6)
        assert (value - started[name]).abs().max() > 2e-3, "twenty steps move every weight far beyond the tolerance"


def stopped_by_a_signal(rank, out):
    """SIGTERM reaches both ranks, at different places in a step, as Slurm and torchrun send it."""
    verifier = tiny_verifier("llama", layers=8, hidden=32, vocab=300, seed=0)
    module = make(verifier, 2000, rank=rank, world=2, count=100)
    module.on_train_batch_start = lambda *_: (out / f"started-{rank}").touch() if module.global_step == 2 else None
    with graceful(module) as stop:
        fit(module, replace(CPU, devices=2, strategy="ddp"), [KeepCheckpoints(out, 0), stop])
    (out / f"{rank}.txt").write_text(f"{module.global_step} {module.stop_wanted} {stop.error.__name__}")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("told", [(0, 1), (1,)], ids=["both", "one"])
def test_sigterm_stops_all_ranks_after_the_same_step(tmp_path, told):
    with two_ranks(stopped_by_a_signal, tmp_path) as ranks:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("started-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        for rank in told:
            os.kill(ranks[rank].pid, signal.SIGTERM)
            time.sleep(0.02)
    said = [(tmp_path / f"{rank}.txt").read_text().split() for rank in range(2)]
    assert said[0][0] == said[1][0] and 2 < int(said[0][0]) < 2000 and newest(tmp_path).step == int(said[0][0])
    assert [words[1] for words in said] == ["True", "True"] and said[1][2] == "Terminated"
