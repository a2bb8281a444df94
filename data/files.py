"""Small file habits of the caches: whole files or none, one writer at a time, readable settings."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from conf.disk import sync, writing
from conf.errors import UserError
from conf.parse import json_of

log = logging.getLogger(__name__)


def key_of(settings: dict) -> str:
    """Content key: sha256 hex of the settings, order of names aside."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """sha256 hex of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, nobody else's, that takes the place of `path` when the block is through.

    It is on the disk itself by then, so that not even a loss of power leaves a part of it under its name.
    Processes of other machines and containers may write there too, and have the same number. OSError naming `path`
    when the disk is full or refuses.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"expected a file or nothing at {path}, found a folder or a device: choose another place")
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with writing(path):
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Atomic: another process sees the old file or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> dict:
    """The object in `path`, {} when the file is absent or holds none (then it is written anew)."""
    try:
        found = json_of(path.read_text())
    except (FileNotFoundError, ValueError):  # bytes that are no text are ValueErrors too
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Wait until no other process writes in this cache folder; the lock goes when its process ends."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        log.info(f"waiting for another process that writes {folder}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
