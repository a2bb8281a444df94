"""What every client of a running server needs: its address, how to reach it, the models that it lists."""

from __future__ import annotations

from typing import Any

import httpx

from conf.errors import UserError
from conf.parse import json_of

CONNECT = 5.0  # seconds to reach a server
HERE = {"localhost", "127.0.0.1", "::1"}


def address(url: object, setting: str) -> str:
    """`url` without /v1 and a last slash. Raises UserError, naming the setting, for what is no address."""
    bare = str(url).rstrip("/").removesuffix("/v1")
    try:
        found = httpx.URL(bare)
        if found.scheme not in ("http", "https") or not found.host:
            raise httpx.InvalidURL("no host")
        if found.port is not None and not 0 < found.port < 1 << 16:
            raise httpx.InvalidURL("no port of one")
    except httpx.InvalidURL as error:
        raise UserError(f"expected {setting}=http://HOST:PORT, found {url}") from error
    return bare


def client_options(url: str, answer_seconds: float) -> dict[str, Any]:
    """For httpx's clients. answer_seconds: how long a server may be silent."""
    return {
        "base_url": url,
        "timeout": httpx.Timeout(answer_seconds, connect=CONNECT),
        "limits": httpx.Limits(max_connections=None),
        "trust_env": httpx.URL(url).host not in HERE,  # a proxy knows another localhost
    }


def said(error: BaseException) -> str:
    """The first line of what an error says."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def values_of(answer: httpx.Response) -> Any:
    """The JSON of an answer. ValueError where it is none, or nested too deep."""
    return json_of(answer.content)


def words_of(answer: httpx.Response) -> str:
    """What a server says is wrong, in one line."""
    try:
        error = values_of(answer)
        error = error.get("error", error)
        words = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        words = answer.text
    return str(words).strip().split("\n")[0][:200] or "nothing more was said"


def models_of(listed: object, url: str) -> dict[str, int | None]:
    """Name -> positions of a text (None: the server doesn't say), from /v1/models' answer. Raises UserError."""
    try:
        served = {row["id"]: row.get("max_model_len") for row in listed["data"]}
        if not served or not all(isinstance(name, str) for name in served):
            raise ValueError("no model with a name")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"expected an OpenAI-compatible server at {url}, found one whose /v1/models lists none"
        ) from error
    return {name: longest if type(longest) is int else None for name, longest in served.items()}


def chosen(served: dict[str, int | None], name: str | None, url: str, setting: str) -> str:
    """The model of that name, or the only one. Raises UserError, naming the setting, where there is no telling."""
    if name is None and len(served) == 1:
        return next(iter(served))
    if name is None:
        raise UserError(f"expected one model at {url}, found {', '.join(served)}: name one, {setting}=NAME")
    if name not in served:
        raise UserError(f"expected {setting} among {', '.join(served)} at {url}, found {name}")
    return name
