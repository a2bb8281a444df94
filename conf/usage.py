"""The help page of a command: its groups, and every setting with its default and its meaning, as the schema has it."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf.explain import CONF, groups, options
from conf.schema import COMMANDS

NAMES = 30  # width of the left column
FIELD = re.compile(r"(\w+): .*?(?:  # (.*))?$")
GROUPS = "Groups, as group=option (files of conf/GROUP; one marked * is taken where none is named)"
SETTINGS = "Settings, as name=value, with what holds where none is given"


def usage(command: str, values: Any) -> str:
    """The page as text.

    values: the command's settings without overrides, an OmegaConf node: they may be missing, and no value is resolved.
    """
    text = (CONF / f"{command}.yaml").read_text()
    opening = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    lines = [*opening, ""]
    taken = {group: (option, note) for group, option, note in re.findall(r"^  - (\w+): (\w+)(?: # (.*))?", text, re.M)}
    if found := groups(command):
        lines += [GROUPS, ""]
    for group in found:
        default, note = taken[group]
        for option in options(group):
            lines += _row(f"{group}={option}{' *' if option == default else ''}", _purpose(group, option))
        if default == "null" and note:
            lines += _row(f"{group}=null *", note.removeprefix("null: "))
        lines.append("")
    lines += [SETTINGS, ""]
    section = ""
    for name, meaning in meanings(COMMANDS[command]):
        if section != (section := name.rpartition(".")[0]):
            lines.append("")
        lines += _row(f"{name}={_value(values, name)}", meaning)
    return "\n".join(lines)


def meanings(schema: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, meaning) of every setting: its own comment in the schema, "" where it has none. Sections last."""
    comments = _comments(schema)
    sections = []
    for item in fields(schema):
        default = item.default_factory() if callable(item.default_factory) else item.default
        if is_dataclass(default):
            sections.append((type(default), f"{prefix}{item.name}."))
        else:
            yield prefix + item.name, comments.get(item.name, "")
    for section in sections:
        yield from meanings(*section)


def _comments(schema: type) -> dict[str, str]:
    """Of each field: the comment lines above it and behind it, of the class and those it inherits from."""
    found: dict[str, str] = {}
    for kind in reversed([kind for kind in schema.__mro__ if is_dataclass(kind)]):
        above: list[str] = []
        for line in map(str.strip, inspect.getsource(kind).splitlines()):
            if line.startswith("#"):
                above.append(line.removeprefix("# "))
            else:
                if match := FIELD.match(line):
                    found[match[1]] = " ".join([*above, *filter(None, [match[2]])])
                above = []
    return found


def _purpose(group: str, option: str) -> str:
    """The first sentence of the option's file, without the command behind it."""
    lines = Path(CONF / group / f"{option}.yaml").read_text().splitlines()
    return next(line for line in lines if not line.startswith("# @"))[2:].split("   ")[0]


def _value(values: Any, name: str) -> str:
    """As it could be typed; "???" is for the user to give."""
    value = OmegaConf.to_container(values, resolve=False)
    for part in name.split("."):
        value = value[part]
    return _typed(value)


def _typed(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_typed(item)}" for key, item in value.items()) + "}"
    return str(value)


def _row(name: str, meaning: str) -> list[str]:
    """`name` in the left column, `meaning` wrapped to the terminal beside it, below it where the name is too long."""
    width = max(60, min(120, shutil.get_terminal_size((110, 24)).columns))
    body = textwrap.wrap(meaning, width - NAMES - 4, break_long_words=False)
    if not body:
        return [f"  {name}"]
    first = [f"  {name:<{NAMES}}  {body.pop(0)}"] if len(name) <= NAMES else [f"  {name}"]
    return [*first, *(" " * (NAMES + 4) + line for line in body)]
