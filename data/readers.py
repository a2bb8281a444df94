"""Files of rows: JSONL, JSON and plain text, gzipped or not. Tables are data/tables.py's."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from conf.errors import UserError
from data.documents import Drop
from data.json_rows import LONGEST, TOO_LONG, file_rows, parse
from data.rows import KEYS

CUT = "compressed file cut short or damaged: nothing after it was read"
Row = tuple[
    int, Any, str | None
]  # its number, from 1; the row, or the Drop in its place; its text, None: the row's own


def read_file(path: Path) -> Iterator[Row]:
    """Numbered rows of a file: lines of JSONL and text, rows of JSON. Raises UserError when it can't be read."""
    read = READERS[suffix(path)]
    number = 0
    try:
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as stream:
            for number, row, text in read(stream, path):
                yield number, row, text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        if isinstance(error, gzip.BadGzipFile) and not number:
            raise UserError(f"expected gzip data in {path}, found something else; rename or recompress it") from None
        yield number + 1, Drop(CUT), ""
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def suffix(path: Path) -> str:
    """`.jsonl` of a.jsonl and of a.jsonl.gz, in small letters."""
    return path.with_suffix("").suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _lines(stream: BinaryIO, path: Path) -> Iterator[tuple[int, str | None]]:
    """(number, line); None for a line that is too long. Bytes that are no UTF-8 are escaped as surrogates."""
    for number in count(1):
        line = stream.readline(LONGEST + 1)
        if not line:
            return
        if len(line) > LONGEST:
            while line and not line.endswith(b"\n"):
                line = stream.readline(LONGEST)
            yield number, None
        else:
            yield number, (line if number > 1 else _unmarked(line, path)).decode("utf-8", "surrogateescape")


def _unmarked(start: bytes, path: Path) -> bytes:
    """The beginning of a file without its byte order mark."""
    for name in ("UTF32", "UTF16"):  # in this order: the one's mark begins with the other's
        if start.startswith(tuple(getattr(codecs, f"BOM_{name}_{end}") for end in ("LE", "BE"))):
            name = name.replace("F", "F-")
            raise UserError(f"expected UTF-8 in {path}, found {name}; convert it: iconv -f {name} -t UTF-8")
    return start.removeprefix(codecs.BOM_UTF8)


def _jsonl(stream: BinaryIO, path: Path) -> Iterator[Row]:
    for number, line in _lines(stream, path):
        try:
            if line is None:
                raise Drop(TOO_LONG)
            yield number, parse(line), line
        except Drop as drop:
            yield number, drop, line or ""


def _text(stream: BinaryIO, path: Path) -> Iterator[Row]:
    """One prompt a line, without the white space around it; empty lines part them, and are no rows."""
    for number, line in _lines(stream, path):
        if line is None:
            yield number, Drop(TOO_LONG), ""
        elif line.isascii() or not any("\ud800" <= character <= "\udfff" for character in line):
            if line.strip():
                yield number, {"prompt": line.strip()}, line
        else:
            yield number, Drop("not UTF-8"), line


def _json(stream: BinaryIO, path: Path) -> Iterator[Row]:
    """A list of rows, a row, an object with one list of rows; or a row a line, as many files of this name have it."""
    head = [b"", b""]
    with suppress(EOFError, zlib.error):  # which are met again
        head = [_unmarked(stream.readline(LONGEST), path), stream.readline(LONGEST)]
    stream.seek(0)
    if all(line.lstrip().startswith(b"{") for line in head) and any(map(_is_object, head)):
        yield from _jsonl(stream, path)
        return
    for number, (row, shown) in enumerate(file_rows(stream, str(path), KEYS), 1):
        yield number, row, shown


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse(line.decode("utf-8", "surrogateescape")), dict)
    except Drop:
        return False


READERS: dict[str, Callable[[BinaryIO, Path], Iterator[Row]]] = {".jsonl": _jsonl, ".json": _json, ".txt": _text}
