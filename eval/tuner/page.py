"""tuner.json as one page of Markdown."""

from __future__ import annotations

from itertools import compress

from eval.tables import markdown_table, number
from eval.tuner.engines import FAMILIES

MIB = 2**20


def page(values: dict) -> str:
    """values: eval.tuner.record.record. The first line says what to do, or that it is refused."""
    parts = [
        _title(values),
        _refusals(values) if values["refused"] else _recommended(values),
        _work(values),
        _batches(values),
        _families(values),
        _telemetry(values),
        _numbers(values),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(values: dict) -> str:
    load = values["workload"]
    what = f"{load['verifier'] or 'the verifier'} on {load['accelerator'] or 'this machine'}"
    if values["refused"]:
        return f"# REFUSED ({', '.join(one['rule'] for one in values['refusals'])}): no drafts for {what}"
    given = values["recommendation"]
    shape = f"N = {given['n']}" if given["shape"] == "chain" else f"a tree of {given['nodes']}, {given['n']} levels"
    return f"# {given['name']}, {shape}, for {what}"


def _refusals(values: dict) -> str:
    rows = [(one["rule"], one["reason"], one["do"]) for one in values["refusals"]]
    table = markdown_table(("refused", "because", "what mends it"), rows)
    return "\n\n".join(part for part in (table, "What follows is the work, not advice.", _notes(values)) if part)


def _recommended(values: dict) -> str:
    given, load = values["recommendation"], values["workload"]
    tasks = ", ".join(f"{name} {share:g}" for name, share in load["tasks"].items())
    opening = (
        f"**Expected {given['speedup']:.2f}x ({given['speedup_low']:.2f} to {given['speedup_high']:.2f})**, "
        f"{given['tokens_per_verify']:.2f} tokens a verify call; {_sequences(load['batch'])} at once, "
        f"T={load['temperature']:g}, {tasks}."
    )
    rows = [
        ("draft", f"{given['name']}: {given['why']}"),
        (given["engine"], f"`{given['flags']}`"),
        ("N", f"{values['n']['n_star']} is the best chain; taken is the {given['shape']} of {given['n']}"),
        ("tree", _tree(values["tree"])),
        ("verify", _verify(values["verify"])),
        ("memory, GiB", _memory(values["memory"])),
        ("temperature gate", _gate(values["temperature"])),
        ("rollback", values["rollback"]["how"]),
        ("latency, ms", _latency(values["latency"])),
    ]
    return "\n\n".join(part for part in (opening, markdown_table(("", ""), rows), _notes(values)) if part)


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"


def _tree(tree: dict | None) -> str:
    if tree is None:
        return "none for this family in this engine, or none within the limits"
    shape = f"{tree['depth']} levels, {tree['nodes']} nodes, {tree['branch']} children a node"
    return f"{shape}: {tree['speedup']:.2f}x ({tree['low']:.2f} to {tree['high']:.2f}; {tree['origin']})"


def _verify(verify: dict) -> str:
    kv = "" if verify["kv_bytes"] is None else f"; keys and values of these {verify['kv_bytes'] / MIB:.1f} MiB"
    return f"{verify['rows']} rows a call, {verify['rows_a_sequence']} a sequence{kv}"


def _memory(memory: dict | None) -> str:
    if memory is None:
        return "not known without the verifier's shape"
    budget = "no budget given" if memory["budget"] is None else f"of {memory['budget']:g}"
    return f"weights {memory['weights']:.1f}, draft {memory['draft']:.2f}, caches {memory['caches']:.2f}; {budget}"


def _gate(heat: dict) -> str:
    up_to = (
        "not known at this temperature" if heat["up_to"] is None else f"up to T={heat['up_to']:g} ({heat['origin']})"
    )
    if heat["measured"]:
        up_to += f", measured at T={', '.join(f'{t:g}' for t in heat['measured'])}"
    return f"{up_to}; beyond, only where n-alpha is measured at {number(heat['pays_from'], 2)} or more"


def _latency(late: dict) -> str:
    def target(name: str) -> str:
        asked = late[f"{name}_ms"]
        return "" if asked is None else f" ({name} {asked:g}: {'met' if late[f'{name}_met'] else 'MISSED'})"

    token = f"a token {late['token_ms']:.2f}{target('p50')}"
    return f"{token}, a round {late['round_ms']:.1f}{target('p99')}; plain {late['plain_ms']:.2f}"


def _notes(values: dict) -> str:
    return "\n".join(f"- {note}" for note in values["notes"])


def _work(values: dict) -> str:
    rows = [
        (str(one["depth"]), one["work"], f"{one['low']:.2f} to {one['high']:.2f}", _loop(one["measured"]),
         number(one["pays_from"], 2))
        for one in values["n"]["candidates"]
    ]  # fmt: skip
    best = values["n"]["n_star"] or "none pays"
    return _section(f"N (best: {best}), times in ms", ("N", "work", "range", "measured", "pays from"), rows)


def _loop(seen: dict | None, n: bool = False) -> str:
    """A speed-up that was measured in the loop. n: with its N."""
    if seen is None:
        return "-"
    span = seen["interval"]
    sure = f" ({span[0]:.2f} to {span[1]:.2f})" if span else " (few turns)"
    return (f"N={seen['n']}: " if n else "") + f"{seen['speedup']:.2f}x{sure}"


def _batches(values: dict) -> str:
    rows = []
    for one in values["batches"]:
        chain = f"N={one['chain_n']}: {one['chain_speedup']:.2f}x"
        tree = f"{one['tree_nodes']} in {one['tree_levels']}: {one['tree_speedup']:.2f}x" if one["tree_nodes"] else "-"
        fits = {True: "yes", False: "NO", None: "?"}[one["fits"]]
        seen = _loop(one["measured"], n=True)
        rows.append((str(one["batch"]), chain, seen, tree, one["shape"], str(one["rows"]), fits))
    head = ("sequences", "chain", "measured", "tree (nodes in levels)", "take", "rows", "fits")
    return _section("Batch tiers", head, rows)


def _families(values: dict) -> str:
    rows = []
    for one in values["families"]:
        there = "yes" if one["at_hand"] else "no", "yes" if one["in_engine"] else "no"
        alpha = f"{one['alpha']:.2f} {one['origin']}"
        rows.append((FAMILIES[one["family"]], *there, alpha, number(one["speedup"], 2), one["why"]))
    return _section("Families", ("family", "at hand", "engine", "n-alpha", "speed-up", "why"), rows)


def _telemetry(values: dict) -> str:
    plan = values["telemetry"]
    lines = [
        f"- on: {plan['enable']}",
        f"- read: {', '.join(f'`{name}`' for name in plan['metrics']) or 'not verified'}",
        f"- tau = {plan['tau']}",
        *(f"- when {alarm['when']}: {alarm['do']}" for alarm in plan["alarms"]),
        f"- again: `{plan['again']}`",
    ]
    return f"## Acceptance telemetry in {plan['engine']}\n\n" + "\n".join(lines)


def _numbers(values: dict) -> str:
    rows = [(one["name"], _shown(one["value"]), one["origin"], one["source"]) for one in values["numbers"]]
    return _section("Where the numbers are from", ("number", "value", "", "source"), rows)


def _section(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Columns without anything in them are left out."""
    full = [any(row[column] != "-" for row in rows) for column in range(len(head))]
    table = markdown_table(tuple(compress(head, full)), [tuple(compress(row, full)) for row in rows])
    return f"## {title}\n\n{table}" if rows else ""


def _shown(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(one)}" for name, one in value.items())
    if isinstance(value, list):
        return " ".join(_shown(one) for one in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)
