"""What a disk refuses: full, read-only, forbidden. One line that names the place, whoever was writing there."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
WRONG = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)  # something else lies there
REFUSED = (*FULL, *FORBIDDEN, *WRONG)


def disk_error(error: BaseException) -> OSError | None:
    """The refusal behind an error, None when it is another. torch and safetensors hide it: torch's zip writer raises a
    RuntimeError while the OSError is on its way, safetensors has the number in its words."""
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__
    elif not isinstance(error, OSError) and (number := re.search(r"\(os error (\d+)\)", str(error))):
        error = OSError(int(number[1]), os.strerror(int(number[1])))
    if not isinstance(error, OSError) or error.errno not in REFUSED:
        return None
    return error if error.filename or error.errno in FULL else None  # without a place a permission is something else's


@contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """What the disk refuses inside is an OSError that names `path`. needed: about how many bytes it takes."""
    try:
        yield
    except Exception as error:
        if (found := disk_error(error)) is None:
            raise
        if found.filename and (found.filename == str(path) or Path(found.filename).parent != path.parent):
            raise  # it says so already, or is of another file
        named = OSError(found.errno, os.strerror(found.errno), str(path))
        if needed is not None and found.errno in FULL:
            named.add_note(f"about {size(needed)} are needed")
        raise named from error


def advice(error: OSError) -> str:
    """One line: what could not be done where, and what to do."""
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    if error.errno in WRONG:
        return f"cannot use {error.filename} ({error.strerror}): choose another place{notes}"
    if error.errno not in FULL:
        return f"no permission for {error.filename} ({error.strerror}): permit it, or choose another place{notes}"
    free = f", {size(room)} are free there" if (room := _room(error.filename)) is not None else ""
    place = f" at {error.filename}" if error.filename else ""
    return f"the disk is full{place} ({error.strerror}{free}): make room, then go on{notes}"


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk itself, where a loss of power does not reach it."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def size(count: float) -> str:
    """`3.2 MB` of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _room(path: str | None) -> int | None:
    """Free bytes where `path` was to lie; None when nothing is known."""
    for place in (Path(path), *Path(path).parents) if path else ():
        if place.exists():
            return shutil.disk_usage(place).free
    return None
