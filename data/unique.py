"""What must not be trained on a second time, or at all: duplicates, and what the evaluation asks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from data.documents import Document

# Words in a row that make a row a copy: the longest run that GPT-3 used to find its benchmarks in its training data,
# with case and punctuation left out (Brown et al. 2020, appendix C).
RUN = 13
LOOSE = 1 << 16  # keys, at least, that a Seen keeps before it sorts them in
ASKED, SHARED = "evaluation prompt", f"{RUN} words in a row of an evaluation prompt"


def normalised(text: str) -> str:
    """Case folded, white space as single blanks."""
    return " ".join(text.casefold().split())


def document_key(document: Document) -> int:
    """64 bits of its content hash."""
    return int(document.content_hash[:16], 16)


def question_key(question: str) -> int:
    """64 bits of a normalised question, not 0."""
    digest = hashlib.blake2b(normalised(question).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1


class Seen:
    """A set of 64-bit keys in eight bytes each. Of a million keys two agree by chance once in 30 million times."""

    def __init__(self) -> None:
        self._sorted_N, self._loose = np.zeros(0, np.uint64), set()

    def __contains__(self, key: int) -> bool:
        if key in self._loose:
            return True
        place = int(np.searchsorted(self._sorted_N, np.uint64(key)))
        return place < len(self._sorted_N) and int(self._sorted_N[place]) == key

    def add(self, key: int) -> None:
        self._loose.add(key)
        if len(self._loose) >= max(LOOSE, len(self._sorted_N) // 16):
            self.update(np.fromiter(self._loose, np.uint64, len(self._loose)))
            self._loose.clear()

    def update(self, keys_N: np.ndarray) -> None:
        """uint64 [N]."""
        self._sorted_N = np.union1d(self._sorted_N, keys_N)


class Exclusion:
    """Questions that no training row may ask: not as a whole, and not `RUN` words of one in a row."""

    def __init__(self, questions: Iterable[str]):
        questions = list(questions)
        self.whole = {normalised(question) for question in questions}
        self.runs = {run for question in questions for run in _runs(question)}

    @property
    def hash(self) -> str:
        """sha256 hex of the questions, in any order."""
        text = "\0".join(sorted(self.whole))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def reason(self, texts: Sequence[str]) -> str | None:
        """Why a row that asks these may not be used; None if it may."""
        if any(normalised(text) in self.whole for text in texts):
            return ASKED
        if self.runs and any(not self.runs.isdisjoint(_runs(text)) for text in texts):
            return SHARED
        return None


def _runs(text: str) -> Iterator[str]:
    words = re.findall(r"\w+", text.casefold())
    return (" ".join(words[first : first + RUN]) for first in range(len(words) - RUN + 1))
