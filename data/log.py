"""An append-only JSONL file written in groups of rows: a killed run leaves whole groups and continues after them."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

CLOSES = "round_closes"  # the key of a group's last row: {"used": n, "counts": {...}, "seconds": s}


class RoundLog:
    """Rows of `path`, in groups. The last row of each group carries the group's counts and seconds under `CLOSES`.

    On opening, everything after the last closed group (a half-written line, a half-written group) is cut off.

    rows: what is in the file.   used: the numbers 0 .. used - 1 (of prompts, of given dialogues) are dealt with.
    counts, seconds: sums over the closed groups.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict] = []
        self.used, self.seconds = 0, 0.0
        self.counts: Counter[str] = Counter()
        path.touch()
        good, offset, pending = 0, 0, []
        with path.open("rb") as stream:
            for line in stream:
                offset += len(line)
                try:
                    row = json.loads(line)
                except ValueError:
                    break
                if not line.endswith(b"\n"):
                    break
                pending.append(row)
                if CLOSES in row:
                    good = offset
                    self._closed(pending)
                    pending = []
        os.truncate(path, good)

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether anything was written."""
        return path.is_file() and path.stat().st_size > 0

    def append(self, rows: list[dict], used: int, counts: Counter, seconds: float) -> None:
        """Write one group (not empty) and make it last."""
        assert rows, "counts without a row are left to the next group"
        counts = {name: count for name, count in counts.items() if count}
        rows[-1] = rows[-1] | {CLOSES: {"used": used, "counts": counts, "seconds": round(seconds, 3)}}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            stream.flush()
            os.fsync(stream.fileno())
        self._closed(rows)

    def _closed(self, rows: list[dict]) -> None:
        closes = rows[-1][CLOSES]
        self.rows += rows
        self.used = closes["used"]
        self.seconds += closes["seconds"]
        self.counts.update(closes["counts"])
