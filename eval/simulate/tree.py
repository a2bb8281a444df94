"""A tree against chains: the same rows of a verify call, or the same number of draft steps.

Siblings are drawn without replacement and tested one after the other, as our loop does. Laws are context-free, so each
level is hit with the same probability beta, each rank of child passes with a probability of its own, and a leaf is
reached with the product of its path's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np

from conf.errors import UserError
from eval.plots import COLOURS, LINE, new_figure, save_figure
from eval.simulate.finding import Check, Finding, table
from eval.simulate.rules import Laws, chain_rounds, hold_trees, random_law, tree_rounds
from eval.theory import expected_tokens

VOCAB, HELD = 8, 300
MIXES = (0.1, 0.3, 0.5, 0.7, 0.9)  # how much of the draft's law is noise
SHOWN_MIX = 0.5  # whose leaves are listed


def rank_acceptance(p_V: np.ndarray, q_V: np.ndarray, children: int) -> list[float]:
    """P(the k-th child is the one accepted), k = 1..children, exactly: over every order in which they may be drawn."""
    if children == 0:
        return []
    here, later = 0.0, np.zeros(children - 1)
    left_V = np.clip(p_V - q_V, 0, None)
    left_V = left_V / left_V.sum() if left_V.sum() > 0 else p_V
    for token in np.flatnonzero(q_V):
        passes = min(1.0, p_V[token] / q_V[token])
        here += q_V[token] * passes
        rest_V = q_V.copy()
        rest_V[token] = 0
        if passes < 1 and rest_V.sum() > 0:
            later += q_V[token] * (1 - passes) * np.array(rank_acceptance(left_V, rest_V / rest_V.sum(), children - 1))
    return [here, *later.tolist()]


def simulate(cfg) -> Finding:
    """cfg.shape: children a level. Raises UserError."""
    shape = list(cfg.shape)
    nodes = int(np.cumprod(shape).sum()) if shape else 0
    if not shape or min(shape) < 1 or max(shape) > 3 or nodes > 64:
        raise UserError(
            f"expected shape=[2,2,2], a tree of 1 to 3 children a level and 64 nodes at most, found {shape}"
        )
    rounds, rng = cfg.rounds or 20_000, np.random.default_rng(cfg.seed)
    p_V, noise_V = random_law(rng, VOCAB, 0.5), random_law(rng, VOCAB, 0.5)
    found, checks, leaves = [], [], []
    for mix in MIXES:
        q_V = (1 - mix) * p_V + mix * noise_V
        row, one = _against_chains(p_V, q_V, shape, nodes, rounds, rng)
        found.append({"noise": mix, **row})
        checks += one
        if mix == SHOWN_MIX:
            leaves, rest = _leaves(p_V, q_V, shape, rounds, rng)
            checks += rest
    for row in found:
        row["speedup"] = {
            "tree": row["tree"] / (1 + len(shape) * cfg.c),
            "chain_same_steps": row["chain_same_steps"] / (1 + len(shape) * cfg.c),
            "chain_same_rows": row["chain_same_rows"] / (1 + nodes * cfg.c),
        }
    values = {"shape": shape, "nodes": nodes, "rows": nodes + 1, "c": cfg.c, "rounds": rounds, "by_draft": found,
              "leaves": leaves}  # fmt: skip
    return Finding(values, checks, _tables(values), partial(_plot, values))


def _against_chains(p_V, q_V, shape: Sequence[int], nodes: int, rounds: int, rng) -> tuple[dict, list[Check]]:
    """Exact expectations, and checks of the simulated ones."""
    ranks = {children: rank_acceptance(p_V, q_V, children) for children in set(shape)}
    hits = [sum(ranks[children]) for children in shape]
    laws = Laws.free(p_V, q_V)
    alpha = float(laws.alpha_V[0])
    uniform_RU = rng.random((rounds, 2 * nodes + 1))
    tree_R = 1 + tree_rounds(p_V, q_V, shape, uniform_RU).accepted_R
    chain_R = chain_rounds(laws, np.zeros(rounds, int), rng.random((rounds, 2 * nodes + 1))).accepted_R
    exact = {
        "tree": expected_tokens(hits),
        "chain_same_steps": expected_tokens([alpha] * len(shape)),
        "chain_same_rows": expected_tokens([alpha] * nodes),
    }
    simulated = {
        "tree": tree_R,
        "chain_same_steps": 1 + np.minimum(chain_R, len(shape)),
        "chain_same_rows": 1 + chain_R,
    }
    names = {"tree": "tree", "chain_same_steps": f"chain of {len(shape)}", "chain_same_rows": f"chain of {nodes}"}
    checks = [
        Check(f"alpha {alpha:.2f}: tokens per verify, {names[key]}", float(values_R.mean()), exact[key],
              float(values_R.std() / np.sqrt(rounds)))
        for key, values_R in simulated.items()
    ]  # fmt: skip
    return {"alpha": alpha, "hit": hits[0], "hits": hits, **exact}, checks


def _leaves(p_V, q_V, shape, rounds: int, rng) -> tuple[list[dict], list[Check]]:
    """How often each path from the root is accepted whole; and our own code on some of the rounds."""
    nodes = int(np.cumprod(shape).sum())
    ranks = {children: rank_acceptance(p_V, q_V, children) for children in set(shape)}
    uniform_RU = rng.random((rounds, 2 * nodes + 1))
    seen = tree_rounds(p_V, q_V, shape, uniform_RU)
    leaves, checks = [], []
    for path in product(*(range(children) for children in shape)):
        exact = float(np.prod([ranks[children][rank] for children, rank in zip(shape, path, strict=True)]))
        share = float((seen.rank_RL == path).all(1).mean())
        name = ".".join(str(rank + 1) for rank in path)
        leaves.append({"leaf": name, "exact": exact, "simulated": share})
        checks.append(Check(f"leaf {name} reached", share, exact, float(np.sqrt(exact * (1 - exact) / rounds))))
    few = tree_rounds(p_V, q_V, shape, uniform_RU[:HELD])
    same = hold_trees(p_V, q_V, shape, uniform_RU[:HELD], few)
    checks.append(Check("trees that our loop grows and decides alike", same, min(HELD, rounds)))
    return leaves, checks


def _tables(values: dict) -> list:
    nodes, levels = values["nodes"], len(values["shape"])
    drafts = ("tree", f"chain {levels}", f"chain {nodes}")
    heads = ("alpha", "level hit", *(f"E {name}" for name in drafts), *(f"S {name}" for name in drafts))
    rows = [
        (f"{row['alpha']:.3f}", f"{row['hit']:.3f}", f"{row['tree']:.3f}", f"{row['chain_same_steps']:.3f}",
         f"{row['chain_same_rows']:.3f}", *(f"{speed:.2f}" for speed in row["speedup"].values()))
        for row in values["by_draft"]
    ]  # fmt: skip
    shape = "[" + ",".join(map(str, values["shape"])) + "]"
    title = f"tree {shape}, {values['rows']} rows: E tokens per verify call, S speed-up at c = {values['c']:g}"
    leaves = [(leaf["leaf"], f"{leaf['simulated']:.4f}", f"{leaf['exact']:.4f}") for leaf in values["leaves"]]
    alpha = next(row["alpha"] for row in values["by_draft"] if row["noise"] == SHOWN_MIX)
    return [
        table(title, heads, rows),
        table(f"leaves at alpha = {alpha:.3f}", ("child at each level", "accepted whole", "exact"), leaves),
    ]


def _plot(values: dict, path):
    figure, axes = new_figure(2)
    alphas = [row["alpha"] for row in values["by_draft"]]
    labels = {
        "tree": "tree",
        "chain_same_steps": f"chain of {len(values['shape'])}",
        "chain_same_rows": f"chain of {values['nodes']}",
    }
    for colour, (key, label) in zip(COLOURS, labels.items(), strict=False):
        axes[0].plot(alphas, [row[key] for row in values["by_draft"]], color=colour, label=label, **LINE)
        axes[1].plot(alphas, [row["speedup"][key] for row in values["by_draft"]], color=colour, **LINE)
    axes[0].set(xlabel="alpha of a single draft", ylabel="tau", title="Tokens per verify call")
    axes[1].set(xlabel="alpha of a single draft", title=f"Speed-up at c = {values['c']:g}")
    axes[0].legend(frameon=False)
    return save_figure(figure, path)
