"""Twenty float64 CPU steps of AdamW per head, held to 6 significant digits against tests/golden/*.txt.

A change of numerics must show why: `EYRIE_WRITE_GOLDEN=1 python -m pytest tests/test_golden.py` writes the files anew.
"""

import os
from pathlib import Path

import pytest
import torch

from toy_head import make_head, make_states, teacher, ttt_loss

GOLDEN = Path(__file__).parent / "golden"


def eagle3_losses():
    head = make_head()
    states = make_states([["ppABCDEuuFGHIu", "pABCDEFG"], ["pppABCDEFGHIJK", "--------"]])
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    for _ in range(20):
        loss_sum, weight_sum, _ = ttt_loss(head, states, 2 * teacher(states), 4)
        loss = loss_sum / weight_sum
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        yield float(loss.detach())


@pytest.mark.parametrize(("name", "losses"), [("eagle3", eagle3_losses)])
def test_losses_of_twenty_steps(name, losses):
    path, found = GOLDEN / f"{name}.txt", list(losses())
    if os.environ.get("EYRIE_WRITE_GOLDEN"):
        path.write_text("".join(f"{x:.9e}\n" for x in found))
    expected = [float(line) for line in path.read_text().split()]
    assert len(found) == len(expected) == 20 and found[-1] < found[0]
    assert found == pytest.approx(expected, rel=1e-6)
