"""The token view: texts coloured by who wrote each token, to be walked round by round (tokens.js)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from conf.errors import printable
from conf.terminal import KEPT
from eval.report.page import words
from eval.rounds import RoundText, TextRounds
from eval.tables import number

SHADES = 5  # depths of a colour of their own
KINDS = {
    "correction": "correction: the verifier's token where it refused a draft",
    "bonus": "bonus: its token behind a draft that passed whole",
    "first": "first token, of the prompt",
}


def token_view(texts: Sequence[TextRounds], how_to_get: str, names: Sequence[str] | None = None) -> str:
    """names: what to call each text, by default its id. how_to_get: the command that records rounds."""
    if not texts:
        return f"<p>No rounds were recorded for this run. To get them: <code>{words(how_to_get)}</code></p>"
    names = list(names or (text.id or f"text {n}" for n, text in enumerate(texts, 1)))
    whole = all(text.whole for text in texts)
    missing = (
        ""
        if whole
        else "<p>This run keeps what was accepted alone. To see the refused drafts and the times as well: "
        f"<code>{words(how_to_get)}</code></p>"
    )
    buttons = "".join(
        f'<button type="button" aria-pressed="{"false" if n else "true"}" data-pick="{n}">{words(name)}</button>'
        for n, name in enumerate(names)
    )
    pick = f'<div class="pick js-only" role="group" aria-label="Texts">{buttons}</div>' if len(texts) > 1 else ""
    samples = "".join(_text(n, name, text) for n, (name, text) in enumerate(zip(names, texts, strict=True)))
    return f'{_legend(texts)}{missing}<div class="texts">{pick}{samples}</div>'


def _legend(texts: Sequence[TextRounds]) -> str:
    deepest = max((len(one.path) for text in texts for one in text.rounds), default=1)
    drafts = "".join(f'<span class="t d{n}">{n}</span>' for n in range(1, min(max(deepest, 1), SHADES) + 1))
    more = f" (deeper than {SHADES} alike)" if deepest > SHADES else ""
    kinds = {one.kind for text in texts for one in text.rounds}
    lines = [f'<li><span aria-hidden="true">{drafts}</span> accepted drafts, by depth{more}</li>']
    whole = all(text.whole for text in texts)
    told = KINDS if whole else KINDS | {"correction": "the verifier's own token"}
    lines += [f'<li><span class="t {kind}">word</span> {escape(told[kind])}</li>' for kind in KINDS if kind in kinds]
    if whole:
        lines += [
            '<li class="js-only"><span class="chip no">word</span> refused draft</li>',
            '<li class="js-only"><span class="chip untried">word</span> not taken</li>',
        ]
    return f'<ul class="legend">{"".join(lines)}</ul>'


def _text(n: int, name: str, text: TextRounds) -> str:
    tokens = "".join(
        _token(written, who, depth, turn) for turn, one in enumerate(text.rounds) for written, who, depth in one.words()
    )
    last, kept = len(text.rounds) - 1, sum(one.kept for one in text.rounds)
    passed = sum(len(one.path) for one in text.rounds)
    tau = number(1 + passed / last, 2) if last > 0 else "-"
    about = f"{text.category}: " if text.category else ""
    about += f"{kept} tokens in {last} verify calls, \u03c4 {tau}"
    if text.left_out:
        about += f"; {text.left_out} more calls are not shown"
    levels = max((max(_depths(one), default=0) for one in text.rounds), default=0)
    tall = f"--tall:{min(18.0, 2.3 * (levels + 2)):.1f}rem"
    label = f"Text of {words(name)}: arrow keys go from token to token, Enter to its round"
    return (
        f'<article class="sample{" more" if n else ""}"><div class="wide"><h3>{words(name)}</h3>'
        f'<p class="soft">{words(about)}</p>'
        f"<details><summary>Prompt</summary><pre>{words(text.prompt)}</pre></details></div>"
        f'<div class="side js-only"><div class="walk">'
        '<button type="button" data-go="-1" aria-label="Previous round">\u2190</button>'
        f'<input type="range" min="0" max="{last}" value="{last}" aria-label="Round">'
        '<button type="button" data-go="1" aria-label="Next round">\u2192</button>'
        '<button type="button" data-play>Play</button><output></output></div>'
        f'<div class="rows" style="{tall}" tabindex="0" role="group" aria-label="Drafts of this round"></div></div>'
        f'<div class="said"><p class="text" tabindex="0" role="group" aria-label="{label}">{tokens}</p>'
        '<p class="hint js-only" role="status"></p></div>'
        f'<script type="application/json">{_data(text)}</script></article>'
    )


def _token(written: str, who: str, depth: int, turn: int) -> str:
    kind = f"d{min(depth, SHADES)}" if who == "draft" else who
    line = " nl" if written.startswith("\n") else ""
    return f'<span class="t {kind}{line}" data-r="{turn}" data-d="{depth}">{words(written)}</span>'


def _depths(one: RoundText) -> list[int]:
    """Of each candidate."""
    depths: list[int] = []
    for parent in one.parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return depths


def _data(text: TextRounds) -> str:
    """The rounds as JSON that no HTML can stand in."""
    rows = [
        {
            "drafts": [printable(draft, KEPT) for draft in one.drafts],
            "parents": one.parents,
            "depths": _depths(one),
            "path": one.path,
            "own": printable(one.own, KEPT),
            "kind": one.kind,
            "kept": one.kept,
            "ms": None if one.seconds is None else [round(1e3 * s, 2) for s in _parts(one)],
        }
        for one in text.rounds
    ]
    return json.dumps({"whole": text.whole, "rounds": rows}).replace("<", "\\u003c")


def _parts(one: RoundText) -> tuple[float, float, float]:
    """Seconds of drafting, of the verify call, and all."""
    return (one.draft_seconds or 0.0, one.verify_seconds or 0.0, one.seconds or 0.0)
