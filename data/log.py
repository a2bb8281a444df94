"""An append-only JSONL file written in rounds: a killed run leaves whole rounds and continues after them."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

CLOSES = "round_closes"  # the key of a round's last row: {"counts": {...}, "seconds": s}


class RoundLog:
    """Rows of `path`, in rounds. The last row of each round carries the round's counts and seconds under `CLOSES`.

    On opening, everything after the last closed round (a half-written line, a half-written round) is cut off.

    rows:    what is in the file.   rounds: how many rounds were closed, also those that wrote nothing.
    counts, seconds: sums over the closed rounds.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict] = []
        self.rounds, self.seconds = 0, 0.0
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

    def append(self, rows: list[dict], round_index: int, counts: Counter, seconds: float) -> None:
        """Write one round (not empty) and make it last."""
        assert rows, "a round that wrote nothing is left to the next one's counts"
        counts = {name: count for name, count in counts.items() if count}
        rows[-1] = rows[-1] | {CLOSES: {"round": round_index, "counts": counts, "seconds": round(seconds, 3)}}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            stream.flush()
            os.fsync(stream.fileno())
        self._closed(rows)

    def _closed(self, rows: list[dict]) -> None:
        closes = rows[-1][CLOSES]
        self.rows += rows
        self.rounds = closes["round"] + 1
        self.seconds += closes["seconds"]
        self.counts.update(closes["counts"])
