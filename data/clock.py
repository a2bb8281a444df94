"""How long the verifier goes on writing, what goes into the log when, and what is said on the way."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass

from data.log import RoundLog

logger = logging.getLogger(__name__)

GROUP_ROWS, GROUP_SECONDS = 16, 20.0  # rows are written to the log when there are so many, or after so long


@dataclass(frozen=True)
class Limits:
    """When to stop: whichever comes first. max_tokens counts answer tokens; seconds includes earlier runs."""

    max_documents: int | None = None
    max_tokens: int | None = None
    seconds: float | None = None


class Clock:
    """How far a run has come against its limits, and the rows and counts that are not yet in the log.

    documents, tokens: dialogues and answer tokens, in the log or to be written; *_before: of earlier runs.
    """

    def __init__(self, log: RoundLog, limits: Limits):
        self.log, self.limits = log, limits
        self.start = self.began = time.monotonic()
        self.deadline = None if limits.seconds is None else self.began + limits.seconds - log.seconds
        self.rows: list[dict] = []
        self.counts: Counter[str] = Counter()
        self.documents, self.tokens = len(log), sum(answer_tokens(row) for row in log)
        self.documents_before, self.tokens_before = self.documents, self.tokens

    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline - 1

    def full(self) -> bool:
        """Whether there are as many dialogues or tokens as wanted."""
        documents = self.limits.max_documents is not None and self.documents >= self.limits.max_documents
        return documents or (self.limits.max_tokens is not None and self.tokens >= self.limits.max_tokens)

    def met(self) -> bool:
        return self.full() or self.late()

    def add(self, row: dict) -> None:
        self.rows.append(row)
        self.documents += 1
        self.tokens += answer_tokens(row)

    def due(self) -> bool:
        """Whether it is time to write to the log; without a clock that is at the end of a round."""
        if self.limits.seconds is None:
            return False
        return len(self.rows) >= GROUP_ROWS or time.monotonic() - self.began >= GROUP_SECONDS or self.full()

    def close(self, used: int) -> None:
        """Write what there is to the log. used: the number of the first thing not dealt with.

        Counts without a row wait for the next one. Seconds are written where a clock runs: without one, two runs of
        the same settings leave the same bytes.
        """
        if not self.rows:
            return
        before, self.began = self.began, time.monotonic()
        seconds = None if self.limits.seconds is None else self.began - before
        self.log.append(self.rows, used, self.counts, seconds)
        self.rows, self.counts = [], Counter()

    def finish(self, used: int) -> RoundLog:
        """Close for the last time; the counts that no row could carry are in the log's for this process alone."""
        self.close(used)
        self.log.counts.update(self.counts)
        self.log.seconds = self.log.seconds or time.monotonic() - self.start
        if self.tokens > self.tokens_before:
            rate = (self.tokens - self.tokens_before) / max(time.monotonic() - self.start, 1e-9)
            share = self.share_done()
            tail = "" if share is None else f", {share:.0%} of the limit"
            logger.info(f"dialogues: {self.documents:,}, {self.tokens:,} answer tokens, {rate:,.0f} tokens/s{tail}")
        return self.log

    def share_done(self) -> float | None:
        """Of the limit that is nearest; None without limits."""
        seconds = self.log.seconds + time.monotonic() - self.began
        pairs = [(self.documents, self.limits.max_documents), (self.tokens, self.limits.max_tokens)]
        pairs.append((seconds, self.limits.seconds))
        return max((min(1.0, done / limit) for done, limit in pairs if limit), default=None)


def answer_tokens(row: dict) -> int:
    return sum(end - start for start, end in row["spans"])
