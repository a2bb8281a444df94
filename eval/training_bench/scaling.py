"""How a step grows: time with tokens and with draft steps, peak memory with tokens and the draft vocabulary."""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median

from eval.rivals import in_turns
from eval.training_bench.rival import NAIVE, OURS, Process
from eval.training_bench.run import Bench, measure
from eval.training_bench.setting import Axes, Setting, write_setting

AXES = Axes([512, 1024, 2048, 4096], [0.4], [1, 3, 5, 7], [8192, 32000])
DOCUMENT = 512  # tokens of each


def scaling(bench: Bench, axes: Axes, dtype: str) -> dict:
    """by_tokens, by_steps and memory: the points. linear: seconds per token at most tokens over those at fewest.

    growth_with_steps: seconds of a further draft step, ours and naive, and their ratio (`share`).
    bytes_per_token_and_column: what of peak memory grows with T * R; each of the two alone is left out.
    """
    document, K = min(DOCUMENT, *axes.tokens), axes.steps[-1]
    fewest, most = min(axes.tokens), max(axes.tokens)
    small, large = min(axes.vocabularies), max(axes.vocabularies)

    def packed(tokens: int, steps: int, R: int) -> Setting:
        return Setting(tokens, axes.fractions[0], steps, R, tokens // document, dtype)

    by_tokens = _seconds(bench, [packed(T, K, small) for T in axes.tokens])
    middle = sorted(axes.tokens)[len(axes.tokens) // 2]
    by_steps = []
    for steps in axes.steps:
        ours, naive = measure(bench, packed(middle, steps, small), [[OURS, NAIVE]])
        by_steps.append([steps, ours["step_seconds"], naive.get("step_seconds")])
    memory = [_growth(bench, packed(T, K, R)) for T in (fewest, most) for R in (small, large)]
    per_token = {row["tokens"]: row["step_seconds"] / row["tokens"] for row in by_tokens}
    grown = [row["growth_bytes"] for row in memory]
    span = (most - fewest) * (large - small)
    return {
        "document": document,
        "by_tokens": by_tokens,
        "by_steps": by_steps,
        "memory": memory,
        "linear": per_token[most] / per_token[fewest],
        "growth_with_steps": _growth_with_steps(by_steps),
        "bytes_per_token_and_column": (grown[3] - grown[2] - grown[1] + grown[0]) / span if span else None,
    }


def _seconds(bench: Bench, settings: list[Setting]) -> list[dict]:
    """Of our step at each setting, all in turns."""
    with ExitStack() as stack:
        running = {}
        for number, setting in enumerate(settings):
            file = bench.folder / f"setting-{number}.safetensors"
            write_setting(file, setting, bench.geometry, bench.aux_layers)
            running[number] = stack.enter_context(
                Process(OURS, file, bench.threads, bench.folder / f"ours-{number}.txt")
            )
            file.unlink()
        asks = {number: lambda turn, process=process: process.ask(do="step") for number, process in running.items()}
        steps = in_turns(asks, bench.turns)
    return [
        {"tokens": setting.tokens, "documents": setting.documents, "steps": setting.steps,
         "draft_vocab": setting.draft_vocab, "step_seconds": median(step["seconds"] for step in steps[number])}
        for number, setting in enumerate(settings)
    ]  # fmt: skip


def _growth(bench: Bench, setting: Setting) -> dict:
    """The median over as many processes as there are turns: holes in the heap differ from one to the next."""
    file, found = bench.folder / "setting.safetensors", []
    write_setting(file, setting, bench.geometry, bench.aux_layers)
    for _ in range(bench.turns):
        with Process(OURS, file, bench.threads, bench.folder / "ours.txt") as process:
            found.append(process.ask(do="step")["growth"])
    file.unlink()
    return {"tokens": setting.tokens, "draft_vocab": setting.draft_vocab, "growth_bytes": median(found), "all": found}


def _growth_with_steps(points: list[list]) -> dict[str, float | None]:
    found = [(K, ours, naive) for K, ours, naive in points if naive is not None]
    if len(found) < 2:
        return dict.fromkeys(("ours", "naive", "share"))
    (low, *first), (high, *last) = found[0], found[-1]
    ours, naive = ((b - a) / (high - low) for a, b in zip(first, last, strict=True))
    return {"ours": ours, "naive": naive, "share": ours / naive}
