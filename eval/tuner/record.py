"""An answer as one JSON object, tuner.json, and the arithmetic of its choice written out."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from eval.serving.metrics import COUNTERS
from eval.theory.model import expected_tokens
from eval.tuner.choices import Choice
from eval.tuner.costs import GIB
from eval.tuner.engines import FAMILIES, READ, flags
from eval.tuner.families import Option, in_the_loop, profile_of
from eval.tuner.published import WIDER, WIDER_SOURCE
from eval.tuner.rules import Answer
from eval.tuner.swept import Row


def record(answer: Answer) -> dict:
    """Plain values alone, the same keys for every answer; None for what isn't known or, when refused, isn't given."""
    case, option, picked = answer.case, answer.option, answer.picked
    return {
        "refused": answer.refused,
        "refusals": [asdict(refusal) for refusal in answer.refusals],
        "recommendation": _recommendation(answer) if answer.choice else None,
        "workload": asdict(case.load) | {"tasks": case.load.mix},
        "n": {
            "n_star": answer.n_star,
            "candidates": [_chain(answer, choice) for choice in answer.candidates],
        },
        "tree": _choice(answer.tree),
        "verify": _verify(answer) if picked else None,
        "memory": asdict(answer.memory) if answer.memory else None,
        "temperature": _temperature(answer),
        "rollback": {"how": case.engine.rollback or "not verified", "source": case.engine.rollback_source or None},
        "latency": _latency(answer) if picked else None,
        "batches": [_tier(tier) for tier in answer.tiers],
        "families": [_family(one) for one in answer.options],
        "telemetry": _telemetry(answer),
        "notes": answer.notes,
        "numbers": _numbers(answer) if option else [],
    }


def _recommendation(answer: Answer) -> dict:
    choice, option, engine = answer.choice, answer.option, answer.case.engine
    support, is_tree = engine.families[option.family], choice.shape == "tree"
    return {
        "family": option.family,
        "name": FAMILIES[option.family],
        "why": option.why,
        "shape": choice.shape,
        "n": choice.depth,
        "nodes": choice.nodes,
        "branch": choice.branch,
        "engine": engine.name,
        "engine_version": answer.case.load.engine_version or engine.version,
        "flags": flags(support, choice.depth, choice.nodes if is_tree else None, choice.branch),
        "tokens_per_verify": choice.expected,
        "speedup": choice.speedup,
        "speedup_low": choice.low,
        "speedup_high": choice.high,
    }


def _temperature(answer: Answer) -> dict:
    """origin: of the acceptance at up_to. measured: temperatures at which there are measurements."""
    case, up_to, family = answer.case, answer.warmest, answer.option.family if answer.option else None
    return {
        "workload": case.load.temperature,
        "up_to": up_to,
        "origin": None if up_to is None else profile_of(case, family, up_to).origin,
        "measured": sorted(profile.temperature for profile in case.evidence.profiles(family)),
        "pays_from": answer.picked.pays_from if answer.picked else None,
    }


def _choice(choice: Choice | None) -> dict | None:
    if choice is None:
        return None
    values = asdict(choice) | {"rows": choice.rows, "pays_from": choice.pays_from, "round_ms": choice.seconds * 1000}
    del values["seconds"]
    return values


def _chain(answer: Answer, choice: Choice) -> dict:
    seen = in_the_loop(answer.case, answer.option.family)
    return _choice(choice) | {"work": work(answer.option, choice), "measured": _measured(seen.get(choice.depth))}


def _measured(row: Row | None) -> dict | None:
    """A speed-up of the sweep."""
    return row and {"n": row.depth, "speedup": row.speedup, "interval": row.speedup_interval}


def work(option: Option, choice: Choice) -> str:
    """E and S of a chain with the numbers in: E = 1 + a_1 + a_1 a_2 + ..., S = E t_decode / (round)."""
    n, point, times = choice.depth, option.profile.point[: choice.depth], option.costs.times
    if len(set(point)) == 1:
        a = f"{point[0]:.3f}"
        tokens = f"(1 - {a}^{n + 1}) / (1 - {a})" if point[0] < 1 else f"{n} + 1"
    else:
        tokens = " + ".join(["1", *(f"{share:.3f}" for share in np.cumprod(point))])
    decode, verify, first, later, other = (
        f"{1000 * seconds:.2f}"
        for seconds in (times.decode, times.verify(choice.rows), times.draft_first, times.draft, times.other)
    )
    drafts = f"{first} + {n - 1} x {later}" if n > 1 else first
    return (
        f"E = {tokens} = {choice.expected:.3f}; S = {choice.expected:.3f} x {decode} / ({verify} + {drafts} + {other}) "
        f"= {choice.speedup:.3f}"
    )


def _verify(answer: Answer) -> dict:
    batch, picked, memory = answer.case.load.batch, answer.picked, answer.memory
    return {
        "rows_a_sequence": picked.rows,
        "rows": batch * picked.rows,
        "kv_bytes_a_row": memory.bytes_a_row if memory else None,
        "kv_bytes": memory.scratch(picked.rows, batch) * GIB if memory else None,
    }


def _latency(answer: Answer) -> dict:
    load, picked = answer.case.load, answer.picked
    token, round_ms = picked.seconds / picked.expected * 1000, picked.seconds * 1000
    return {
        "token_ms": token,
        "round_ms": round_ms,
        "plain_ms": answer.option.costs.times.decode * 1000,
        "p50_ms": load.p50_ms,
        "p50_met": None if load.p50_ms is None else token <= load.p50_ms,
        "p99_ms": load.p99_ms,
        "p99_met": None if load.p99_ms is None else round_ms <= load.p99_ms,
    }


def _tier(tier) -> dict:
    best = tier.best
    return {
        "batch": tier.batch,
        "fits": tier.fits,
        "shape": best.shape if tier.pays else "none",
        "chain_n": tier.chain.depth,
        "chain_speedup": tier.chain.speedup,
        "tree_levels": tier.tree.depth if tier.tree else None,
        "tree_nodes": tier.tree.nodes if tier.tree else None,
        "tree_speedup": tier.tree.speedup if tier.tree else None,
        "rows": tier.batch * best.rows,
        "times": tier.times,
        "measured": _measured(tier.measured),
    }


def _family(option: Option) -> dict:
    choice, profile = option.choice, option.profile
    return {
        "family": option.family,
        "at_hand": option.at_hand,
        "in_engine": option.in_engine,
        "why": option.why,
        "alpha": profile.point[0],
        "origin": profile.origin,
        "source": profile.source,
        "n": choice.depth if choice else None,
        "nodes": choice.nodes if choice else None,
        "speedup": choice.speedup if choice else None,
        "speedup_low": choice.low if choice else None,
        "speedup_high": choice.high if choice else None,
    }


def _telemetry(answer: Answer) -> dict:
    engine, picked, alarms = answer.case.engine, answer.picked, []
    if picked:
        low = expected_tokens(answer.option.profile.low[: picked.depth])
        alarms.append(
            {"when": f"tau < {picked.even_tau:.2f}", "do": "drafts cost more than they give: switch them off"}
        )
        if low > picked.even_tau:
            alarms.append(
                {"when": f"tau < {low:.2f}", "do": "below what is expected: traffic or head changed, tune again"}
            )
        if off := next((tier.batch for tier in answer.tiers if not tier.pays), None):
            alarms.append({"when": f"batch >= {off}", "do": "plain decoding is expected to be faster"})
    return {
        "engine": engine.name,
        "enable": engine.metrics_how,
        "metrics": list(engine.metrics),
        "tau": engine.tau,
        "alarms": alarms,
        "again": _again(answer),
    }


def _again(answer: Answer) -> str:
    load, family = answer.case.load, answer.option.family if answer.option else "FAMILY"
    if load.engine in COUNTERS:
        return f"python -m eval.tuner metrics=[BEFORE,AFTER] family={family} workload={load.name or 'NAME'}"
    return f"python -m eval run=DIR temperature={load.temperature:g} && python -m eval.tuner run=DIR"


def _numbers(answer: Answer) -> list[dict]:
    """Every number that the choice rests on, where it is from, and its source."""
    profile, costs, times = answer.option.profile, answer.option.costs, answer.option.costs.times
    depth = len(profile.point) if len(set(profile.point)) > 1 else 1
    seconds = (times.decode, times.draft_first, times.draft, times.other)
    spread = [list(profile.low[:depth]), list(profile.high[:depth])]
    rows = [
        _number("n-alpha", list(profile.point[:depth]), profile.origin, profile.source, spread),
        _number(
            "t_decode, t_draft_first, t_draft, t_other, ms", [1000 * t for t in seconds], costs.origin, costs.source
        ),
        _number(
            "c, draft step / verify", times.draft / times.verify(answer.picked.rows), costs.origin, "of these times"
        ),
    ]
    if answer.picked.rows > times.widest:
        source = f"a verify of {answer.picked.rows} rows is reckoned along the line of those up to {times.widest}"
        rows.append(_number("t_verify, ms", 1000 * times.verify(answer.picked.rows), "assumption", source))
    if answer.tree and answer.tree.origin == "assumption":
        hit = 1 - (1 - profile.point[0]) * (answer.tree.nodes / answer.tree.depth) ** -WIDER
        rows.append(_number("hit rate of the tree's first level", hit, "assumption", WIDER_SOURCE))
    elif answer.tree:
        measured = answer.case.evidence.tree[0]
        rows.append(_number("hit rates of the tree's levels", list(measured.point), "measured", measured.source))
    if answer.case.evidence.swept:
        rows += _swept(answer)
    source = f"{answer.option.why}; read on {READ}"
    return [*rows, _number("what the engine has", answer.case.engine.name, "published", source)]


def _swept(answer: Answer) -> list[dict]:
    """What is the sweep's."""
    case, family = answer.case, answer.option.family
    profiles, file = case.evidence.profiles(family), case.evidence.swept.file
    first = f"n-alpha of the first draft; T={case.evidence.profile.temperature:g}: the run's"
    found = {
        "n-alpha by T": ({f"{one.temperature:g}": one.point[0] for one in profiles}, first),
        "speed-up by N": ({str(n): row.speedup for n, row in sorted(in_the_loop(case, family).items())}, "in the loop"),
        "speed-up by sequences": (
            {str(tier.batch): tier.measured.speedup for tier in answer.tiers if tier.measured},
            "in the loop; N nearest to the chain's",
        ),
    }
    return [_number(name, value, "measured", f"{file}: {said}") for name, (value, said) in found.items() if value]


def _number(name: str, value, origin: str, source: str, interval: list | None = None) -> dict:
    return {"name": name, "value": value, "interval": interval, "origin": origin, "source": source}
