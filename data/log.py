"""An append-only JSONL file written in rounds: a killed run leaves whole rounds and continues after them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from conf.disk import writing
from conf.parse import json_of

log = logging.getLogger(__name__)

CLOSES = "round_closes"  # the key of a round's last row: {"used": n, "counts": {...}, "sha256": ..}
SEAL, END = 64, b'"}}\n'  # a round ends with its sha256 and this


class RoundLog:
    """Rows of `path`, in rounds. The last row of each carries under `CLOSES` what is to be known of the round.

    Its sha256 is that of the round's bytes before it, after the sha256 of the round before. On opening, everything
    after the last round that is whole (a half-written one, a flipped byte) is moved to `path`.cut, with a warning.

    Iterating reads the rows, one in memory at a time; len() is how many there are.
    used: the numbers 0 .. used - 1 (of prompts, of given dialogues) are dealt with.
    counts, seconds: sums over the rounds.   slots: of the cache, for all runs alike (data.memory); None: not known yet.
    """

    def __init__(self, path: Path):
        self.path = path
        self.used, self.seconds = 0, 0.0
        self.slots: int | None = None
        self.counts: Counter[str] = Counter()
        self._seal, self._rounds, self._count = "", 0, 0
        path.touch()
        with path.open("rb") as stream:
            good = self._read(stream)
            if rest := path.stat().st_size - good:
                log.warning(
                    f"{path}: {rest:,} bytes after {self._rounds} whole rounds ({len(self):,} rows) are unfinished "
                    f"or damaged; what they held is written again, they themselves are kept in {path.name}.cut"
                )
                stream.seek(good)
                with path.with_name(f"{path.name}.cut").open("wb") as copy:
                    shutil.copyfileobj(stream, copy)
                os.truncate(path, good)

    def _read(self, stream) -> int:
        """Takes in the rounds that are whole; returns where they end."""
        good, body, rows = 0, b"", []
        for line in stream:
            body += line
            try:
                rows.append(json_of(line))
            except ValueError:
                break
            if not isinstance(rows[-1], dict):
                break
            if CLOSES not in rows[-1]:
                continue
            end = len(body) - SEAL - len(END)
            if body[end : end + SEAL] != self._seal_of(body[:end]).encode():
                break
            self._closed(rows)
            good, body, rows = good + len(body), b"", []
        return good

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether anything was written."""
        return path.is_file() and path.stat().st_size > 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict]:
        with self.path.open("rb") as stream:
            yield from map(json.loads, islice(stream, self._count))

    @property
    def rows(self) -> list[dict]:
        """All of them in memory at once."""
        return list(self)

    def append(self, rows: list[dict], used: int, counts: Counter, seconds: float | None = None) -> None:
        """Write one round (not empty) and make it last. seconds: None leaves no trace of the time."""
        assert rows, "counts without a row are left to the next round"
        closes: dict = {"used": used, "counts": {name: count for name, count in counts.items() if count}}
        closes |= {} if seconds is None else {"seconds": round(seconds, 3)}
        closes |= {} if self.slots is None else {"slots": self.slots}
        rows[-1] = rows[-1] | {CLOSES: closes | {"sha256": ""}}
        body = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode().removesuffix(END)
        closes["sha256"] = self._seal_of(body)
        with writing(self.path), self.path.open("ab") as stream:
            stream.write(body + closes["sha256"].encode() + END)
            stream.flush()
            os.fsync(stream.fileno())
        rows[-1][CLOSES] = closes
        self._closed(rows)

    def _seal_of(self, body: bytes) -> str:
        return hashlib.sha256(self._seal.encode() + body).hexdigest()

    def _closed(self, rows: list[dict]) -> None:
        closes = rows[-1][CLOSES]
        self._count += len(rows)
        self._seal, self._rounds = closes["sha256"], self._rounds + 1
        self.used = closes["used"]
        self.slots = closes.get("slots")
        self.seconds += closes.get("seconds", 0.0)
        self.counts.update(closes["counts"])
