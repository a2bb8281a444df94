"""The whole training step against eval.training_bench.naive: equal in float64, and no rougher in bfloat16."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from eval.training_bench.naive import naive_losses, naive_teacher
from eval.training_bench.setting import Setting, read_setting, write_setting
from models.losses import head_loss
from models.objectives import Labels, Objective
from tiny import tiny_verifier

K = 4
OBJECTIVE = Objective(steps=K)


def ours(loaded):
    """One mean over all counted pairs."""
    lm_RD = loaded.lm_VD[loaded.head.vocab.ids_R]
    labels = Labels.given(loaded.states, lambda hidden: F.linear(hidden, lm_RD).to(loaded.states.lse_P.dtype), K)
    loss, weight, _ = head_loss(loaded.head, loaded.states, labels, OBJECTIVE)
    return loss / weight


def naive(loaded):
    teacher = naive_teacher(loaded.head, loaded.last_TD, loaded.lm_VD)
    parts = [
        (OBJECTIVE.step_decay**k, *part) for k, part in enumerate(naive_losses(loaded.head, loaded.states, teacher, K))
    ]
    return sum(weight * loss for weight, loss, _ in parts) / sum(weight * float(count) for weight, _, count in parts)


def gradient(step, loaded, autocast=False):
    """(loss, all gradients as one vector)"""
    loaded.head.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = step(loaded)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in loaded.head.parameters()])


def loaded_of(tmp_path, seed=0):
    verifier = tiny_verifier(layers=7, hidden=64, vocab=600)
    setting = Setting(tokens=240, fraction=0.5, steps=K, draft_vocab=512, documents=3)
    write_setting(tmp_path / "s.safetensors", setting, verifier.head_geometry, verifier.aux_layers, seed)
    return read_setting(tmp_path / "s.safetensors")


@pytest.mark.parametrize("attention", ["dense", "flash"])
def test_compaction_packing_chunks_and_merged_attention_change_nothing_in_float64(tmp_path, monkeypatch, attention):
    monkeypatch.setattr("models.token_loss.BLOCK_LOGITS", 40 * K * 512)  # several blocks, each in several parts
    monkeypatch.setattr("models.token_loss.CACHE_LOGITS", 7 * K * 512)
    rough = loaded_of(tmp_path)
    wide = {name: x.double() for name, x in vars(rough.states).items() if getattr(x, "is_floating_point", bool)()}
    exact = replace(
        rough, states=replace(rough.states, **wide), lm_VD=rough.lm_VD.double(), last_TD=rough.last_TD.double()
    )
    exact.head.double().attention = attention
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the naive teacher's
    (loss, grad), (expected, reference) = gradient(ours, exact), gradient(naive, exact)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(grad, reference, rtol=1e-8, atol=1e-12)


def test_bfloat16_is_no_rougher_than_naive_autocast(tmp_path):
    loaded = loaded_of(tmp_path)
    _, exact = gradient(naive, loaded)
    mine, plain = ((gradient(step, loaded, autocast=True)[1] - exact).norm() / exact.norm() for step in (ours, naive))
    assert 1e-3 < mine < plain + 0.01 < 0.05
