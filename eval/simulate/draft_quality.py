"""From a worse draft to fewer tokens: q = p + noise, the alpha that is measured, 1 - TV, and tokens per verify call."""

from __future__ import annotations

from functools import partial

import numpy as np

from eval.plots import COLOURS, LINE, new_figure, save_figure
from eval.simulate.finding import Check, Finding, table
from eval.simulate.rules import Laws, chain_rounds, hold_chains, random_law
from eval.theory import expected_tokens

VOCAB, DEEPEST, HELD = 32, 8, 200
NOISES = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)  # epsilon
DEPTHS = (1, 2, 3, 5, 8)  # of the table


def simulate(cfg) -> Finding:
    """q = (p + epsilon noise) / (1 + epsilon), noise a law of its own: TV(p, q) = epsilon / (1 + epsilon) TV(p, noise).

    Laws are the same after every token, so drafts pass independently and the formulas hold exactly.
    """
    rounds, rng = cfg.rounds or 20_000, np.random.default_rng(cfg.seed)
    p_V, noise_V = random_law(rng, VOCAB, 0.3), random_law(rng, VOCAB, 0.3)
    apart = 0.5 * np.abs(p_V - noise_V).sum()
    rows, checks = [], []
    for epsilon in NOISES:
        laws = Laws.free(p_V, (p_V + epsilon * noise_V) / (1 + epsilon))
        alpha = float(1 - epsilon / (1 + epsilon) * apart)
        start_R, uniform_RU = np.zeros(rounds, int), rng.random((rounds, 2 * DEEPEST + 1))
        seen = chain_rounds(laws, start_R, uniform_RU)
        tested = int(np.minimum(seen.accepted_R + 1, DEEPEST).sum())
        measured = float(seen.accepted_R.sum() / tested)
        error = np.sqrt(alpha * (1 - alpha) / tested)
        checks.append(Check(f"epsilon {epsilon:g}: alpha", measured, alpha, error))
        by_n = {}
        for n in range(1, DEEPEST + 1):
            kept_R = np.minimum(seen.accepted_R, n)
            by_n[n] = {"simulated": 1 + float(kept_R.mean()), "exact": expected_tokens([alpha] * n)}
            error = float(kept_R.std() / np.sqrt(rounds))
            if error:  # at epsilon 0 every draft passes
                checks.append(Check(f"epsilon {epsilon:g}: tokens per verify at N={n}", *by_n[n].values(), error))
        rows.append({"epsilon": epsilon, "alpha": alpha, "measured_alpha": measured, "tokens_by_n": by_n})
    same = hold_chains(laws, start_R[:HELD], uniform_RU[:HELD], chain_rounds(laws, start_R[:HELD], uniform_RU[:HELD]))
    checks.append(Check("rounds that acceptance.py decides alike", same, min(HELD, rounds)))
    values = {"rounds": rounds, "vocab": VOCAB, "by_noise": rows}
    return Finding(values, checks, [_table(values)], partial(_plot, values))


def _table(values: dict):
    heads = ("epsilon", "1 - TV", "alpha", *(f"N={n}" for n in DEPTHS))
    rows = [
        (f"{row['epsilon']:g}", f"{row['alpha']:.4f}", f"{row['measured_alpha']:.4f}",
         *("{simulated:.3f}\n{exact:.3f}".format(**row["tokens_by_n"][n]) for n in DEPTHS))
        for row in values["by_noise"]
    ]  # fmt: skip
    return table(
        f"q = p + epsilon noise, {values['rounds']} rounds: tokens per verify call, simulated and exact", heads, rows
    )


def _plot(values: dict, path):
    figure, axes = new_figure(2)
    rows = values["by_noise"]
    axes[0].plot([0, 1], [0, 1], color="#999999", lw=1, ls="--")
    axes[0].plot([r["alpha"] for r in rows], [r["measured_alpha"] for r in rows], "o", color=COLOURS[0])
    axes[0].set(xlabel="1 - TV(p, q)", ylabel="measured alpha", title="Acceptance is overlap", xlim=(0, 1), ylim=(0, 1))
    for colour, row in zip(COLOURS, rows, strict=False):
        depths = list(row["tokens_by_n"])
        exact, simulated = ([row["tokens_by_n"][n][key] for n in depths] for key in ("exact", "simulated"))
        axes[1].plot(depths, simulated, color=colour, label=f"{row['alpha']:.2f}", **(LINE | {"ls": ""}))
        axes[1].plot(depths, exact, color=colour, lw=1)
    axes[1].set(xlabel="drafts per verify call N", ylabel="tau", title="Tokens per verify call, by alpha")
    axes[1].legend(frameon=False, ncols=2, fontsize=8)
    return save_figure(figure, path)
