"""Cost of a token by draft length N: rounds whose drafts pass with probability alpha, beside the formula."""

from __future__ import annotations

from functools import partial

import numpy as np

from conf.errors import UserError
from eval.plots import COLOURS, STAR, new_figure, save_figure
from eval.simulate.finding import Check, Finding, table
from eval.theory import Outlook, outlook


def runs_of_accepts(alpha: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """How many drafts in a row pass before the first that doesn't."""
    return np.floor(np.log1p(-rng.random(count)) / np.log(alpha)).astype(np.int64)


def simulate(cfg) -> Finding:
    """The same rounds at every N: a chain of N keeps the first N drafts of a run. Raises UserError."""
    if not 0 < cfg.alpha < 1 or not 2 <= cfg.max_n <= 1000:
        raise UserError(f"expected alpha between 0 and 1 and max_n from 2 to 1000, found {cfg.alpha} and {cfg.max_n}")
    rounds = cfg.rounds or 1_000_000
    exact = outlook([cfg.alpha] * cfg.max_n, cfg.c)
    run_R = runs_of_accepts(cfg.alpha, rounds, np.random.default_rng(cfg.seed))
    depths = np.arange(1, cfg.max_n + 1)
    kept = [np.minimum(run_R, n) for n in depths]
    emitted = np.array([1 + k.mean() for k in kept])
    errors = [float(k.std() / np.sqrt(rounds)) for k in kept]
    cost, exact_cost = (1 + depths * cfg.c) / emitted, 1 / np.array(exact.speedup_by_n)
    found, best = int(depths[cost.argmin()]), int(depths[exact_cost.argmin()])
    checks = [_cheapest(kept, exact, cfg.c, found, best)]
    checks += [
        Check(f"tokens per verify call at N={n}", emitted[n - 1], exact.expected_by_n[n - 1], errors[n - 1])
        for n in depths.tolist()
    ]
    values = {
        "alpha": cfg.alpha,
        "c": cfg.c,
        "rounds": rounds,
        "n_star": best,
        "n_star_simulated": found,
        "cost_by_n": {int(n): {"simulated": s, "exact": e} for n, s, e in zip(depths, cost, exact_cost, strict=True)},
    }
    shown = [n for n in depths if n <= 5 or n % 10 == 0 or abs(n - best) <= 2]
    rows = [
        (str(n), f"{emitted[n - 1]:.4f}", f"{exact.expected_by_n[n - 1]:.4f}", f"{cost[n - 1]:.5f}",
         f"{exact_cost[n - 1]:.5f}", f"{exact.speedup_by_n[n - 1]:.4f}")
        for n in shown
    ]  # fmt: skip
    heads = ("N", "E", "exact", "cost of a token", "exact", "speed-up")
    title = f"alpha = {cfg.alpha:g}, c = {cfg.c:g}, {rounds} rounds: the cheapest token at N = {found}"
    plot = partial(_plot, depths, cost, exact_cost, best)
    return Finding(values, checks, [table(title, heads, rows, bold=shown.index(best))], plot)


def _cheapest(kept: list[np.ndarray], exact: Outlook, c: float, found: int, best: int) -> Check:
    """With few rounds noise may name a neighbour of N*: of two depths the cheaper emits more in the other's time."""
    if found == best:
        return Check("N of the cheapest token", found, best)
    ahead_R = (1 + kept[found - 1]) * (1 + best * c) - (1 + kept[best - 1]) * (1 + found * c)
    ahead = exact.expected_by_n[found - 1] * (1 + best * c) - exact.expected_by_n[best - 1] * (1 + found * c)
    return Check(f"N={found} ahead of N*={best}", ahead_R.mean(), ahead, ahead_R.std() / np.sqrt(len(ahead_R)))


def _plot(depths, cost, exact_cost, best: int, path):
    figure, (axes,) = new_figure(1, size=(7, 3.6))
    axes.plot(depths, exact_cost, color=COLOURS[0], lw=2, label="exact")
    axes.plot(depths, cost, ".", color=COLOURS[3], label="simulated")
    axes.plot([best], [exact_cost[best - 1]], color=COLOURS[1], **STAR)
    axes.set(xlabel="drafts per verify call N", ylabel="verify calls' time a token", title=f"Cheapest at N = {best}")
    axes.legend(frameon=False)
    return save_figure(figure, path)
