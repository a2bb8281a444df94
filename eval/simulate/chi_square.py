"""Does the rule emit the verifier's law? A chi-square test against the exact law, and schemes that must fail it.

Texts of three tokens, laws that depend on the token before, rejections at every depth and bonuses: all of it is in the
joint law. Each text begins with a round, so its first token is the first token of a round.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from scipy import stats

from conf.errors import UserError
from eval.plots import COLOURS, new_figure, save_figure
from eval.simulate.finding import SIGMAS, Check, Finding, table
from eval.simulate.rules import Laws, chain_rounds, hold_chains, texts

VOCAB, DEPTH, LENGTH, FIRST, LEVEL = 8, 2, 3, 0, 0.05
HELD = 1000
RULE, MISTAKEN, TWO_SAMPLES = "the rule", "sample taken for law", "two samples"
SCHEMES = {RULE: {}, "correction from p": {"from_p": True}, "all accepted": {"accept_all": True}}


def toy_laws(rng: np.random.Generator) -> Laws:
    """p and q after each token: related, so that about 7 of 10 drafts pass, and different."""
    logits_VV = rng.normal(size=(VOCAB, VOCAB))
    other_VV = logits_VV + 0.8 * rng.normal(size=(VOCAB, VOCAB))
    p_VV, q_VV = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (logits_VV, other_VV))
    return Laws(p_VV, q_VV)


def joint_law(laws: Laws) -> np.ndarray:
    """P(text), [V ** 3], the first token counting most."""
    p = laws.p_VV
    return (p[FIRST][:, None, None] * p[:, :, None] * p[None]).ravel()


def pooled(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cells that are expected fewer than 5 times become one."""
    rare = expected < 5
    if not rare.any():
        return counts, expected
    return np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())


def statistic(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom."""
    counts, expected = pooled(counts, expected)
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


def statistics(text_RT: np.ndarray, laws: Laws) -> dict[str, tuple[float, int]]:
    """Of the first tokens and of whole texts, against the exact law."""
    code_R = text_RT @ (VOCAB ** np.arange(LENGTH)[::-1])
    first, whole = np.bincount(text_RT[:, 0], minlength=VOCAB), np.bincount(code_R, minlength=VOCAB**LENGTH)
    count = len(text_RT)
    return {
        "first token": statistic(first, laws.p_VV[FIRST] * count),
        "three tokens": statistic(whole, joint_law(laws) * count),
    }


def against_a_sample(laws: Laws, count: int, rng: np.random.Generator) -> tuple[float, float]:
    """Two samples of the first token's law: the second mistaken for the expectation, and the two-sample statistic."""
    ours, other = (rng.multinomial(count, laws.p_VV[FIRST]) for _ in range(2))
    squared = (ours - other) ** 2
    return float((squared / other).sum()), float((squared / (ours + other)).sum())


def simulate(cfg) -> Finding:
    """cfg: conf.schema.SimulateCommandConf. Raises UserError."""
    rounds = cfg.rounds or 50_000
    if cfg.seeds < 1 or rounds < 1000:
        raise UserError(f"expected 1 seed or more and 1000 rounds or more, found {cfg.seeds} and {rounds}")
    laws = toy_laws(np.random.default_rng(cfg.seed))
    found, freedom = gather(laws, rounds, cfg.seed, cfg.seeds)
    critical = {law: float(stats.chi2.ppf(1 - LEVEL, cells)) for law, cells in freedom.items()}
    # Twice the spread: the sum of squares over another sample's counts is twice a chi-square.
    false_alarms = float(stats.chi2.sf(critical["first token"] / 2, freedom["first token"]))
    below = dict.fromkeys(SCHEMES, 0.0) | {RULE: 1 - LEVEL, MISTAKEN: 1 - false_alarms, TWO_SAMPLES: 1 - LEVEL}
    tests = [_row(scheme, law, values, critical[law], below[scheme]) for (scheme, law), values in found.items()]
    checks = [_check(row) for row in tests] + [_held(laws, cfg.seed)]
    values = {"rounds": rounds, "seeds": cfg.seeds, "degrees": freedom, "false_alarms": false_alarms, "tests": tests}
    rows = [
        (row["scheme"], row["law"], f"{row['median']:.1f}", f"{row['critical']:.1f}",
         f"{row['passed']} of {row['seeds']}", f"{100 * row['expected']:.0f} %")
        for row in tests
    ]  # fmt: skip
    heads = ("scheme", "law of", "median", "critical", "below it", "expected")
    title = f"chi-square, {rounds} texts a seed, drafts of {DEPTH}, {VOCAB} tokens"
    plot = partial(_plot, {name: found[name, "three tokens"] for name in SCHEMES}, critical["three tokens"])
    return Finding(values, checks, [table(title, heads, rows)], plot)


def gather(laws: Laws, rounds: int, seed: int, seeds: int) -> tuple[dict[tuple[str, str], list[float]], dict[str, int]]:
    """Statistics of each (scheme, law) over the seeds, and each law's degrees of freedom."""
    found: dict[tuple[str, str], list[float]] = {}
    freedom: dict[str, int] = {}
    for number in range(seeds):
        rng = np.random.default_rng([seed, number])
        for scheme, fault in SCHEMES.items():
            if fault and number >= 10:
                continue  # a scheme that fails ten times of ten needs no more
            text_RT = texts(laws, FIRST, DEPTH, LENGTH, rounds, rng, **fault)
            for law, (value, cells) in statistics(text_RT, laws).items():
                found.setdefault((scheme, law), []).append(value)
                freedom[law] = cells
        for scheme, value in zip((MISTAKEN, TWO_SAMPLES), against_a_sample(laws, rounds, rng), strict=True):
            found.setdefault((scheme, "first token"), []).append(value)
    return found, freedom


def _row(scheme: str, law: str, values: list[float], critical: float, expected: float) -> dict:
    return {
        "scheme": scheme,
        "law": law,
        "seeds": len(values),
        "critical": critical,
        "median": float(np.median(values)),
        "passed": int((np.array(values) < critical).sum()),
        "expected": expected,
    }


def _check(row: dict) -> Check:
    """Seeds are coins: counts outside the binomial law's SIGMAS contradict it, however few seeds there are."""
    expected, seeds = row["expected"], row["seeds"]
    tail = stats.norm.sf(SIGMAS)
    low, high = (stats.binom.ppf(share, seeds, expected) / seeds for share in (tail, 1 - tail))
    what = f"{row['scheme']}, {row['law']}: share below {row['critical']:.1f}"
    return Check(what, row["passed"] / seeds, expected, max(expected - low, high - expected) / SIGMAS)


def _held(laws: Laws, seed: int) -> Check:
    rng = np.random.default_rng([seed, 1])
    last_R, uniform_RU = rng.integers(VOCAB, size=HELD), rng.random((HELD, 2 * DEPTH + 1))
    same = hold_chains(laws, last_R, uniform_RU, chain_rounds(laws, last_R, uniform_RU))
    return Check("rounds that acceptance.py decides alike", same, HELD)


def _plot(by_scheme: dict[str, list[float]], critical: float, path):
    figure, (axes,) = new_figure(1, size=(7, 3.6))
    for colour, (name, values) in zip(COLOURS, by_scheme.items(), strict=False):
        axes.plot(sorted(values), (np.arange(len(values)) + 0.5) / len(values), ".", color=colour, label=name)
    axes.axvline(critical, color="#999999", ls="--", lw=1, label="95 % critical value")
    axes.set(xscale="log", xlabel="chi-square of the joint law of three tokens", ylabel="share of seeds below")
    axes.legend(frameon=False, fontsize=8)
    return save_figure(figure, path)
