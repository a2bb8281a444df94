"""How long the verifier goes on writing, and what it says on the way."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass

from data.log import RoundLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """When to stop: whichever comes first. max_tokens counts answer tokens; seconds includes earlier runs."""

    max_documents: int | None = None
    max_tokens: int | None = None
    seconds: float | None = None


class Clock:
    """How far a run has come against its limits."""

    def __init__(self, log: RoundLog, limits: Limits):
        self.log, self.limits = log, limits
        self.began, self.last_lap = time.monotonic(), 0.0
        self.deadline = None if limits.seconds is None else self.began + limits.seconds - log.seconds

    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline - 1

    def share(self, part: float) -> float | None:
        """The time at which `part` of what is left has gone."""
        now = time.monotonic()
        return None if self.deadline is None else now + part * (self.deadline - now)

    def affordable(self, round_size: int) -> int:
        """Prompts for the next round: fewer when the last round took longer than the time that is left."""
        if self.deadline is None or not self.last_lap:
            return round_size
        return min(round_size, max(8, int(round_size * (self.deadline - time.monotonic()) / self.last_lap)))

    def tokens(self) -> int:
        """Answer tokens so far."""
        return sum(_answer_tokens(row) for row in self.log.rows)

    def met(self) -> bool:
        documents = self.limits.max_documents is not None and len(self.log.rows) >= self.limits.max_documents
        tokens = self.limits.max_tokens is not None and self.tokens() >= self.limits.max_tokens
        return documents or tokens or self.late()

    def fitting(self, rows: list[dict]) -> list[dict]:
        """Rows up to the one that meets max_tokens."""
        if self.limits.max_tokens is None:
            return rows
        total, kept = self.tokens(), []
        for row in rows:
            if total >= self.limits.max_tokens:
                break
            kept.append(row)
            total += _answer_tokens(row)
        return kept

    def close_round(self, rows: list[dict], index: int, counts: Counter) -> None:
        """Write the round to the log, with its seconds, and say how far the run has come."""
        before, self.began = self.began, time.monotonic()
        self.last_lap = self.began - before
        self.log.append(rows, index, counts, self.last_lap)
        rate = sum(_answer_tokens(row) for row in rows) / max(self.last_lap, 1e-9)
        done = f"dialogues: {len(self.log.rows):,}, {self.tokens():,} answer tokens, {rate:,.0f} tokens/s"
        share = self._share_done()
        logger.info(done if share is None else f"{done}, {share:.0%} of the limit")

    def _share_done(self) -> float | None:
        """Of the limit that is nearest; None without limits."""
        pairs = [(len(self.log.rows), self.limits.max_documents), (self.tokens(), self.limits.max_tokens)]
        pairs.append((self.log.seconds, self.limits.seconds))
        return max((min(1.0, done / limit) for done, limit in pairs if limit), default=None)


def _answer_tokens(row: dict) -> int:
    return sum(end - start for start, end in row["spans"])
