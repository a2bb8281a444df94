"""JSON and YAML that others may have written: within bounds, or an error that says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from conf.errors import UserError

MOST_BYTES = 1 << 28  # of a file that is read whole
DEEPEST = 64  # objects in objects; our own files have about six


def json_of(text: str | bytes) -> Any:
    """The value. ValueError for what is no JSON in UTF-8, is nested too deep, or has a number of too many digits."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def json_file(path: Path) -> dict:
    """The object in a file. UserError when it holds none, or what can't be written again; OSError when absent."""
    try:
        values = json_of(_bytes(path))
        _check(values)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); write it again") from error
    if not isinstance(values, dict):
        raise UserError(f"expected a JSON object in {path}, found {type(values).__name__}; write it again")
    return values


def yaml_file(path: Path) -> dict:
    """The settings in a file as plain values, references among them not followed. UserError when it holds none.

    An alias is refused: a few of them can stand for any number of values.
    """
    try:
        text = _bytes(path).decode()
        depth = 0
        for event in yaml.parse(text, Loader=yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > DEEPEST:
                raise ValueError("an alias" if depth <= DEEPEST else "nested too deep")
        values = OmegaConf.to_container(OmegaConf.create(text))
    except OSError:
        raise
    except Exception as error:  # what PyYAML and OmegaConf raise for foreign text has no common type
        raise UserError(f"{path} is damaged ({error}); write it again") from error
    if not isinstance(values, dict):
        raise UserError(f"expected settings in {path}, found {type(values).__name__}; write it again")
    return values


def _bytes(path: Path) -> bytes:
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{size:,} bytes, more than {MOST_BYTES:,}")
    return path.read_bytes()


def _check(values: Any) -> None:
    """ValueError for values nested too deep, a text with half a character in it, or a number of more than 64 bits."""
    level, depth = [values], 0
    while level:
        if depth > DEEPEST:
            raise ValueError("nested too deep")
        below = []
        for value in level:
            if isinstance(value, str):
                value.encode()
            elif isinstance(value, int) and abs(value) >= 2**63:
                raise ValueError(f"a number of {len(str(value))} digits")
            elif isinstance(value, dict):
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
        level, depth = below, depth + 1
