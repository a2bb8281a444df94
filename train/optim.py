"""AdamW, or Muon for the layer's matrices with AdamW for the rest, as one optimizer object."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from conf.errors import UserError
from conf.schema import OptimConf
from models.packed import native_bfloat16

MAPS = ("fc.", "lm_head.", "survival.")  # into the layer and out of it: Muon's authors leave those to AdamW
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the usual quintic: slope at zero as steep as it goes


def build_optimizer(head: nn.Module, cfg: OptimConf) -> torch.optim.Optimizer:
    """Over the head's parameters that are trained. Every group carries `initial_lr`, which the schedule scales."""
    adamw = {"betas": tuple(cfg.betas), "eps": cfg.eps, "weight_decay": cfg.weight_decay, "fused": True}
    named = {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
    if cfg.name == "adamw":
        optimizer = torch.optim.AdamW(named.values(), lr=cfg.lr, **adamw)
    elif cfg.name == "muon":
        inside = {name for name, p in named.items() if p.dim() == 2 and not name.startswith(MAPS)}
        matrices = [p for name, p in named.items() if name in inside]
        rest = [p for name, p in named.items() if name not in inside]
        optimizer = Together(
            Muon(matrices, lr=cfg.matrix_lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay),
            torch.optim.AdamW(rest, lr=cfg.lr, **adamw),
        )
    else:
        raise UserError(f"no optim.name '{cfg.name}'; there are: adamw, muon")
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (Jordan et al. 2024), for 2-D parameters.

    torch.optim.Muon multiplies in bfloat16 whatever the machine, which a CPU without it does hundreds of times
    slower than in float32; here the dtype is bfloat16 only where the hardware has it.
    """

    def __init__(self, parameters, lr: float, momentum: float = 0.95, weight_decay: float = 0.0, steps: int = 5):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        _run(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                average = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                ahead = parameter.grad.lerp(average, group["momentum"])  # Nesterov
                update = orthogonalised(ahead, group["steps"])
                rows, columns = parameter.shape
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def _run(closure: Callable | None) -> None:
    """Lightning passes a closure even where it does nothing."""
    if closure is not None:
        with torch.enable_grad():
            closure()


def orthogonalised(matrix: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz: the same singular vectors, singular values near 1 (about 0.7 to 1.2). Same dtype and shape."""
    a, b, c = NEWTON_SCHULZ
    fast = matrix.is_cuda or (matrix.dtype == torch.float32 and native_bfloat16())
    x = matrix.to(torch.bfloat16) if fast else matrix
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.T).to(matrix.dtype)


class Together(torch.optim.Optimizer):
    """Several optimizers, each with its own parameters, stepped, saved and restored as one."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        # The very dicts of the parts: a schedule that sets lr here sets it there.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        _run(closure)
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()
