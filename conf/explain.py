"""Turns Hydra's and OmegaConf's errors into one line that says what to type instead."""

from __future__ import annotations

import difflib
from dataclasses import fields, is_dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from conf.schema import COMMANDS

CONF = Path(__file__).parent


def settings(command: str) -> list[str]:
    """Every dotted name that the command knows, sections included."""

    def walk(schema: type, prefix: str) -> list[str]:
        names = []
        for item in fields(schema):
            names.append(prefix + item.name)
            default = item.default_factory() if callable(item.default_factory) else item.default
            if is_dataclass(default):
                names += walk(type(default), f"{prefix}{item.name}.")
        return names

    return walk(COMMANDS[command], "")


def options(group: str) -> list[str]:
    """The files of a group, e.g. options("budget") -> ["demo", "full", ...]."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def groups(command: str) -> list[str]:
    """The groups that the command's own file lists."""
    text = (CONF / f"{command}.yaml").read_text()
    return [path.name for path in sorted(CONF.iterdir()) if f"- {path.name}:" in text and options(path.name)]


def mistake(command: str, overrides: list[str]) -> str | None:
    """One line for the first override that names no setting, group or file of a group; None if all do.

    Overrides with a sweep (a,b) are looked at value by value. Also catches `+name=value`, which Hydra lets in.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        text = _one_line(error).removeprefix("LexerNoViableAltException: ")
        return (
            f"cannot read the overrides: {text}; a value with spaces, brackets, =, ~ or letters beyond ASCII wants "
            "quotes of its own: \"data.path='my file.jsonl'\""
        )
    for item in parsed:
        name = item.key_or_group
        if name in groups(command):
            values = list(item.sweep_string_iterator()) if item.is_sweep_override() else [item.value()]
            for value in values:
                if isinstance(value, str) and value not in options(name):
                    return f"no {name} '{value}'{_near(value, options(name))}; there are: {', '.join(options(name))}"
        elif name.split(".")[0] != "hydra" and not name.startswith("hydra/") and name not in settings(command):
            known = settings(command) + groups(command)
            return f"{command} has no setting '{name}'{_near(name, known)} (--help lists them all)"
    return None


def explain(error: BaseException) -> str:
    """One line for an error of Hydra or OmegaConf, with the setting's name in front."""
    passed: list[BaseException] = []
    while error.__cause__ is not None and error not in passed:  # Hydra wraps what names the value; OmegaConf in circles
        passed.append(error)
        error = error.__cause__
    return _one_line(error)


def _near(name: str, known: list[str]) -> str:
    """'; did you mean a or b?' by spelling, of the whole name or of its last part."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    leaf = name.rsplit(".", 1)[-1]
    close = [item for item in known if item.rsplit(".", 1)[-1] == leaf] + close
    return f"; did you mean {' or '.join(list(dict.fromkeys(close))[:3])}?" if close else ""


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    noise = ("full_key:", "object_type=", "reference_type=", "See https")
    text = " ".join(line for line in lines if not line.startswith(noise))
    place = getattr(error, "full_key", None) or ""
    return f"{place}: {text}" if place not in text else text
