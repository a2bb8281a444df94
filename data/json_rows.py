"""JSON that others wrote, row by row: what is wrong with one is a Drop, and the next is read, in bounded memory."""

from __future__ import annotations

import json
import re
import zlib
from codecs import getincrementaldecoder
from collections.abc import Iterator
from typing import Any, BinaryIO

from conf.errors import UserError
from data.documents import Drop

LONGEST = 1 << 24  # bytes of a line, characters of a row in a list
BLOCK = 1 << 20  # characters read at a time
BROKEN = "malformed JSON: nothing after it was read"
TOO_LONG = f"row longer than {LONGEST >> 20} MiB"

_SPACE = re.compile(r"[ \t\r\n]*+")
_STRING = r'"(?:[^"\\]++|\\.)*+"'
_TOKEN = re.compile(rf'{_STRING}|["\[\]{{}}]', re.DOTALL)
_WORD = re.compile(rf'{_STRING}|[^\[\]{{}}",:\s]+', re.DOTALL)  # a value that holds no other
_BYTE = re.compile("[\ud800-\udfff]")  # what errors="surrogateescape" makes of a byte that is no UTF-8
_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse(text: str) -> Any:
    """The value. NaN and Infinity, which JSON doesn't have, are null. Raises Drop with what is wrong.

    text: decoded with errors="surrogateescape".
    """
    if not text.isascii() and _BYTE.search(text):
        raise Drop("not UTF-8")
    try:
        value = _DECODER.decode(text)
        if _ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise Drop("NUL bytes" if "\0" in text else "malformed JSON" if text.strip() else "empty line") from None
    except RecursionError:
        raise Drop("nested too deep") from None
    except UnicodeEncodeError:
        raise Drop("half of a surrogate pair") from None
    except ValueError:
        raise Drop("number of too many digits") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Drop("key given twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=lambda name: None)


def file_rows(stream: BinaryIO, name: str, keys: frozenset[str]) -> Iterator[tuple[Any, str]]:
    """(row or the Drop in its place, its text) of a file that is a list of rows, a row, or an object with one list.

    keys: those of rows; an object with one of them is a row. Raises UserError for a second list.
    """
    scan = _Scanner(stream)
    if scan.peek() == "[":
        yield from scan.items()
    elif scan.peek() == "{":
        yield from _members(scan, name, keys)
    elif scan.peek():
        yield Drop("malformed JSON"), scan.text[:BLOCK]
        return
    if scan.peek() and not scan.broken:
        yield Drop(BROKEN), scan.text[scan.at :]


def _members(scan: _Scanner, name: str, keys: frozenset[str]) -> Iterator[tuple[Any, str]]:
    row, listed, shown = {}, None, scan.text[:BLOCK]
    scan.at += 1
    try:
        while scan.peek() not in ("}", ""):
            key = parse(scan.word())
            if not isinstance(key, str) or key in row:
                raise Drop("key given twice" if isinstance(key, str) else BROKEN)
            scan.take(":")
            if scan.peek() != "[" or key in keys:
                row[key] = parse(scan.word())
            elif listed is None:
                listed, row[key] = key, None
                yield from scan.items()
            else:
                raise UserError(f"expected one list of rows in {name}, found {listed!r} and {key!r}: split the file")
            if scan.peek() != "}":
                scan.take(",")
        scan.take("}")
    except Drop as drop:
        scan.broken = True
        yield drop, shown
        return
    if listed is None:
        yield row, shown


class _Scanner:
    """Values of UTF-8, one after another; at most twice LONGEST of it in memory.

    broken: what follows can't be told apart any more.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.decoder = stream, getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.text, self.at, self.ended, self.broken = "", 0, False, False

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._more():
                return ""

    def take(self, character: str) -> None:
        if self.peek() != character:
            raise Drop(BROKEN)
        self.at += 1

    def word(self) -> str:
        """The text of the next value, of which brackets and quotes alone are looked at. Drop when it has no end."""
        self.peek()
        while (end := self._end()) is None:
            if len(self.text) - self.at > LONGEST:
                raise Drop(f"{TOO_LONG}: nothing after it was read")
            if not self._more():
                raise Drop(BROKEN)
        found, self.at = self.text[self.at : end], end
        return found

    def items(self) -> Iterator[tuple[Any, str]]:
        """Rows of the list that begins here."""
        self.take("[")
        text = ""
        try:
            while self.peek() != "]":
                text = ""
                text = self.word()
                try:
                    yield parse(text), text
                except Drop as drop:
                    yield drop, text
                if self.peek() != "]":
                    self.take(",")
            self.at += 1
        except Drop as drop:
            self.broken = True
            yield drop, text or self.text[self.at : self.at + BLOCK]

    def _end(self) -> int | None:
        """Where the value at `at` ends; None when that is not to be seen yet. Raises Drop where no value begins."""
        if self.text[self.at : self.at + 1] in ("[", "{"):
            depth = 0
            for token in _TOKEN.finditer(self.text, self.at):
                first = self.text[token.start()]
                if first == '"' and token.end() == token.start() + 1:
                    return None  # a string that goes on
                depth += (first in "[{") - (first in "]}")
                if not depth:
                    return token.end()
            return None
        found = _WORD.match(self.text, self.at)
        if found and found.end() < len(self.text):
            return found.end()
        if found or self.text[self.at : self.at + 1] in ('"', ""):
            return None
        raise Drop(BROKEN)

    def _more(self) -> bool:
        """Read as much again as waits here, so that what a value costs stays in proportion to its length."""
        wanted, read = max(BLOCK, len(self.text) - self.at), []
        while wanted > 0 and not self.ended:
            try:
                block = self.stream.read1(wanted)
            except (EOFError, OSError, zlib.error):
                if not read:
                    raise
                break  # what came before is looked at first
            self.ended, wanted = not block, wanted - len(block)
            read.append(self.decoder.decode(block, final=self.ended))
        self.text, self.at = self.text[self.at :] + "".join(read), 0
        return any(read) or not self.ended
