"""What pages are made of. Every word of others comes through `words` or `escape`: text stays text."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

from conf.errors import printable
from conf.terminal import KEPT
from data.files import replacing

CARDS = Sequence[tuple[str, str, str, str]]  # name, value, remark, class of the value


@cache
def asset(name: str) -> str:
    """page.css or tokens.js."""
    return files("eval.report").joinpath(name).read_text(encoding="utf-8")


def words(text: str) -> str:
    """Text of a model or a file as HTML: nothing in it is markup, and nothing turns the line's direction."""
    return escape(printable(str(text), KEPT))


def html_page(path: Path, title: str, parts: Iterable[str], script: bool = False) -> Path:
    """Writes the page whole or not at all. script: with tokens.js, the one script that the page may run."""
    code = asset("tokens.js") if script else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'" if script else "script-src 'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; {allowed}"
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{words(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{asset("page.css")}</style>'
        f"{f'<script>{code}</script>' if script else ''}</head><body>{''.join(parts)}</body></html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(page, encoding="utf-8")
    return path


def html_header(over: str, title: str, how: str, sections: Sequence[tuple[str, str]] = ()) -> str:
    """over: a few words above the title. sections: (id, name) of what can be jumped to."""
    links = "".join(f'<a href="#{name}">{escape(text)}</a>' for name, text in sections)
    nav = f'<nav aria-label="Sections">{links}</nav>' if links else ""
    head = f'<div class="over">{escape(over)}</div><h1>{words(title)}</h1><p class="soft">{words(how)}</p>'
    return f"<header>{head}{nav}</header>"


def html_section(name: str, title: str, *parts: str) -> str:
    """A titled part of the page; nothing where it would be empty. name: its id."""
    body = "".join(parts)
    return f'<section id="{name}"><h2>{words(title)}</h2>{body}</section>' if body else ""


def html_cards(cards: CARDS) -> str:
    body = "".join(
        f'<div class="card"><span class="name">{escape(name)}</span><b class="{kind}">{escape(value)}</b>'
        f"<span>{escape(remark)}</span></div>"
        for name, value, remark, kind in cards
    )
    return f'<div class="cards">{body}</div>'


def html_table(head: Sequence[str], rows: Iterable[Sequence], wrap_last: bool = False) -> str:
    top = "".join(f'<th scope="col">{words(h)}</th>' for h in head) if any(head) else ""
    lines = []
    for row in rows:
        cells = [f"<td>{words(cell)}</td>" for cell in row]
        if wrap_last:
            cells[-1] = cells[-1].replace("<td>", '<td class="wrap">', 1)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    top = f"<tr>{top}</tr>" if top else ""
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="table"><table>{top}{"".join(lines)}</table></div>'
    )


def html_folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def html_picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{escape(path.stem)}" src="data:image/png;base64,{data}"></figure>'


def html_bars(bars: Sequence[tuple[str, Sequence[float]]], keys: Sequence[tuple[str, str]], unit: str) -> str:
    """Bars of one scale, each (name, parts). keys: (name, CSS colour) of each part. unit: behind every number."""
    longest = max((sum(parts) for _, parts in bars), default=0)
    if not longest:
        return ""
    lines = []
    for name, parts in bars:
        pieces = "".join(
            f'<i style="--k:{colour};width:{100 * part / longest:.3f}%" title="{words(key)}: {part:.3g} {unit}"></i>'
            for part, (key, colour) in zip(parts, keys, strict=True)
            if part > 0
        )
        told = ", ".join(f"{key} {part:.3g}" for part, (key, _) in zip(parts, keys, strict=True) if part > 0)
        label = words(f"{name}: {sum(parts):.3g} {unit}")
        lines.append(f'<span>{label}</span><div class="bar" role="img" aria-label="{words(told)}">{pieces}</div>')
    shown = [key for n, key in enumerate(keys) if any(parts[n] > 0 for _, parts in bars)]
    dots = "".join(f'<li><span class="dot" style="--k:{colour}"></span>{words(key)}</li>' for key, colour in shown)
    return f'<ul class="keys">{dots}</ul><div class="bars">{"".join(lines)}</div>'


def flattened(values: dict, prefix: str = "") -> list[tuple[str, str]]:
    """(dotted name, value) of everything in a nested object."""
    rows = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        rows += flattened(value, name + ".") if isinstance(value, dict) else [(name, str(value))]
    return rows
