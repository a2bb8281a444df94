"""Twenty float64 CPU steps of AdamW per head, held to 6 significant digits against tests/golden/*.txt.

A change of numerics must show why: `EYRIE_WRITE_GOLDEN=1 python -m pytest tests/test_golden.py` writes the files anew.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from toy_head import make_head, make_other, make_states, teacher, ttt_loss

GOLDEN = Path(__file__).parent / "golden"


# kind of head, draft steps, switches of the objective
CASES = {
    "eagle3": ("eagle3", 4, {}),
    "eagle3_lk": ("eagle3", 4, {"token": "lk"}),
    "eagle3_vat": ("eagle3", 4, {"weights": "vat", "survival_weight": 0.1}),
    "eagle3_hass": ("eagle3", 4, {"top_k_weight": 1.0, "top_k": 3}),
    "eagle1": ("eagle1", 1, {"feature_weight": 1.0, "token_weight": 0.1}),
    "medusa": ("medusa", 4, {}),
    "independent": ("independent", 1, {}),
}


def losses(kind, steps, switches):
    head = make_head(survival="survival_weight" in switches) if kind == "eagle3" else make_other(kind)
    states = make_states([["ppABCDEuuFGHIu", "pABCDEFG"], ["pppABCDEFGHIJK", "--------"]])
    if kind in ("eagle1", "medusa"):  # they read one state
        states = replace(states, aux_BTAD=states.aux_BTAD[:, :, :1])
    columns = len(head.vocab)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    for _ in range(20):
        loss_sum, weight_sum, _ = ttt_loss(head, states, 2 * teacher(states, columns), steps, **switches)
        loss = loss_sum / weight_sum
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        yield float(loss.detach())


@pytest.mark.parametrize("name", CASES)
def test_losses_of_twenty_steps(name):
    path, found = GOLDEN / f"{name}.txt", list(losses(*CASES[name]))
    if os.environ.get("EYRIE_WRITE_GOLDEN"):
        path.write_text("".join(f"{x:.9e}\n" for x in found))
    expected = [float(line) for line in path.read_text().split()]
    assert len(found) == len(expected) == 20 and found[-1] < found[0]
    assert found == pytest.approx(expected, rel=1e-6)
