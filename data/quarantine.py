"""Rows that could not be used, kept for people: where each stood, and why it was left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

SHOWN = 200  # characters of a row


class Quarantine:
    """A file of JSON lines {"place", "reason", "text"}, begun anew by whoever opens it; absent while nothing is bad.

    Each line is written at once and whole, so that a kill leaves what was known. One process writes it. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, 0
        self._stream: TextIO | None = None
        path.unlink(missing_ok=True)

    def add(self, place: str, reason: str, text: str = "") -> None:
        """One row. place: FILE:LINE; reason: as it is counted; text: of which the beginning is kept."""
        if self._stream is None:
            self._stream = self.path.open("a", buffering=1, encoding="ascii")
        self._stream.write(json.dumps({"place": place, "reason": reason, "text": text[:SHOWN]}) + "\n")
        self.rows += 1

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
