"""Long prompts that are real: the question asked at the end of a conversation that went before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conf.errors import UserError
from eval.prompts import Prompt, questions
from eval.replay import record
from models.chat import render

BLOCK = 16  # questions that are answered at a time, until there are enough tokens
ANSWER = 128  # tokens of an earlier answer, at most
SHORTEST = 8  # tokens of an answer that is cut to fit


@dataclass(frozen=True)
class Turn:
    """A question, how many tokens it takes with the template around it, and the verifier's answer."""

    question: dict
    tokens: int
    answer: tuple[int, ...]


class Conversations:
    """The questions, each behind as many earlier turns as a length takes.

    The turns are other questions with the verifier's own greedy answers, which are kept in the cache (eval.replay);
    each question begins at another place in them. longest: tokens that the longest prompt will have; 0: no turns.
    """

    def __init__(self, verifier, asked: Sequence[dict], earlier: str | Sequence[str], longest: int):
        self.tokenizer, self.asked = verifier.tokenizer, list(asked)
        self.turns: list[Turn] = []
        if longest:
            self._write(verifier, earlier, longest)

    def _write(self, verifier, earlier: str | Sequence[str], longest: int) -> None:
        own = {row["messages"][-1]["content"] for row in self.asked}
        rows = [row for row in questions(earlier) if row["messages"][-1]["content"] not in own]
        for first in range(0, len(rows), BLOCK):
            if sum(turn.tokens + len(turn.answer) for turn in self.turns) >= 1.5 * longest:
                break
            some = [row["messages"][-1] for row in rows[first : first + BLOCK]]
            ids = [render(self.tokenizer, [question], add_generation_prompt=True) for question in some]
            recordings = record(verifier, [Prompt("", "", tuple(row)) for row in ids], ANSWER, 1)
            for question, recording in zip(some, recordings, strict=True):
                answer = recording.tokens[: recording.length]
                if self._text(answer):
                    self.turns.append(Turn(question, len(recording.prompt.input_ids), answer))

    def prompts(self, context: int) -> list[Prompt]:
        """Of about `context` tokens each and no more, unless the question alone has more; 0: the questions alone.

        Raises UserError when all turns together are too few.
        """
        found = []
        for index, row in enumerate(self.asked):
            ids = self._filled(row["messages"], context, 5 * index)
            if context - len(ids) > ANSWER + max((turn.tokens for turn in self.turns), default=0):
                raise UserError(
                    f"expected earlier turns for a context of {context} tokens, found {len(ids)} tokens in all: name "
                    "more questions, earlier=[humaneval,FILE.jsonl], or a shorter context"
                )
            found.append(Prompt(row["id"], row["category"], tuple(ids)))
        return found

    def _filled(self, messages: list[dict], context: int, start: int) -> list[int]:
        """Turns in order from `start` on, as long as the whole has `context` tokens; an answer that is too long for
        what is left is cut."""
        system = messages[:1] if messages[0]["role"] == "system" else []
        ids, earlier = render(self.tokenizer, messages, add_generation_prompt=True), []
        for index in range(len(self.turns)):
            turn = self.turns[(start + index) % len(self.turns)]
            answer = turn.answer[: max(0, context - len(ids) - turn.tokens)]
            text = self._text(answer)
            if not text or len(answer) < min(SHORTEST, len(turn.answer)):
                continue
            more = [*earlier, turn.question, {"role": "assistant", "content": text}]
            longer = render(self.tokenizer, [*system, *more, *messages[len(system) :]], add_generation_prompt=True)
            if len(longer) <= context:
                ids, earlier = longer, more
        return ids

    def _text(self, answer: Sequence[int]) -> str:
        return self.tokenizer.decode(answer, skip_special_tokens=True).strip()
