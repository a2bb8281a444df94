"""rounds.json: who wrote each token of a few texts, and what was drafted in vain; the page's token view reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from conf.errors import UserError
from conf.parse import json_file
from data.files import replacing
from eval.speculative.loop import Decoded, Round

NAME = "rounds.json"
TEXTS, ROUNDS = 3, 1000  # texts of a file, and rounds of a text: the others are counted
CONTEXT = 8  # tokens before one that decide how it reads

Count = Annotated[int, Field(ge=0, lt=2**53)]
Time = Annotated[float, Field(ge=0, le=1e9)]  # seconds


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class RoundText(_Part):
    """One verify call, in words.

    drafts: the candidates, and of each the place of the one before it, -1: the text so far. path: those that passed.
    own: the verifier's token behind them, which ends a round: a correction of the draft that was refused, a bonus
    where none was, or the first token, which comes of the prompt. kept: how many of path and own are in the text.
    """

    drafts: list[str]
    parents: list[Annotated[int, Field(ge=-1)]]
    path: list[Count]
    own: str
    kind: Literal["first", "correction", "bonus"]
    kept: Count
    draft_seconds: Time | None = None
    verify_seconds: Time | None = None
    seconds: Time | None = None

    @model_validator(mode="after")
    def _a_tree(self) -> Self:
        if len(self.parents) != len(self.drafts) or any(p >= n for n, p in enumerate(self.parents)):
            raise ValueError("a draft must follow one that stands before it")
        steps = zip([-1, *self.path], self.path, strict=False)
        if any(n >= len(self.drafts) or self.parents[n] != before for before, n in steps):
            raise ValueError("what passed must be a path of the drafts")
        if self.kept > len(self.path) + 1:
            raise ValueError("more tokens were kept than written")
        return self

    def words(self) -> list[tuple[str, str, int]]:
        """(text, who wrote it, depth) of the tokens that are in the text; depth 0: the verifier."""
        passed = [(self.drafts[n], "draft", depth) for depth, n in enumerate(self.path, 1)]
        return [*passed, (self.own, self.kind, 0)][: self.kept]


class TextRounds(_Part):
    """One text. left_out: rounds that are not in the file. whole: the refused drafts were recorded as well."""

    id: str = ""
    category: str = ""
    prompt: str
    rounds: list[RoundText]
    left_out: Count = 0
    whole: bool = True


class RoundsFile(_Part):
    texts: list[TextRounds]


def text_rounds(tokenizer, id: str, category: str, prompt_ids: Sequence[int], decoded: Decoded) -> dict:
    """The record of a text (`TextRounds`): its prefill, then a row a verify call."""
    before, left = list(prompt_ids), len(decoded.tokens)
    first = Round((), 0, 0, (decoded.tokens[0],), prefill=True)
    rows = []
    for call in [first, *decoded.rounds][:ROUNDS]:
        rows.append(_round_text(tokenizer, before, call, left))
        before += call.emitted
        left -= rows[-1]["kept"]
    prompt = tokenizer.decode(list(prompt_ids))
    left_out = len(decoded.rounds) + 1 - len(rows)
    return {"id": id, "category": category, "prompt": prompt, "rounds": rows, "left_out": left_out, "whole": True}


def _round_text(tokenizer, before: list[int], call: Round, left: int) -> dict:
    nodes = list(zip(call.parents, call.drafted, strict=True))
    ways: dict[int, list[int]] = {-1: before}  # the text up to and with each candidate
    for n, (parent, token) in enumerate(nodes):
        ways[n] = [*ways[parent][-CONTEXT:], token]
    path: list[int] = []
    for token in call.emitted[:-1]:
        path.append(nodes.index(((path or [-1])[-1], token)))
    timed = call.seconds > 0  # a replay has no verify calls
    return {
        "drafts": [added(tokenizer, ways[parent], token) for parent, token in nodes],
        "parents": list(call.parents),
        "path": path,
        "own": added(tokenizer, ways[(path or [-1])[-1]], call.emitted[-1]),
        "kind": "first" if call.prefill else "correction" if call.tested > call.accepted else "bonus",
        "kept": min(len(call.emitted), left),
        "draft_seconds": call.draft_seconds if timed else None,
        "verify_seconds": call.verify_seconds if timed else None,
        "seconds": call.seconds if timed else None,
    }


def added(tokenizer, before: Sequence[int], token: int) -> str:
    """What a token adds to the text; of a character that takes several tokens, all of it comes with the last."""
    window = list(before[-CONTEXT:])

    def read(ids: list[int]) -> str:
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False).rstrip("\ufffd") if ids else ""

    return read([*window, token])[len(read(window)) :]


def write_rounds(folder: Path, texts: Sequence[dict]) -> Path:
    """Whole or not at all."""
    path = folder / NAME
    with replacing(path) as part:
        part.write_text(json.dumps({"texts": list(texts)}, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def read_rounds(folder: Path, samples: Sequence[dict] = ()) -> list[TextRounds]:
    """Of a run or evaluation folder; without the file, what an older alpha.json has under `samples`: what passed.

    Raises UserError for a file that is damaged.
    """
    file = Path(folder) / NAME
    if not file.is_file():
        return [_of_sample(sample) for sample in samples]
    try:
        return RoundsFile.model_validate(json_file(file)).texts
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{file} is damaged ({place}: {first['msg']}): run python -m eval again") from error


def _of_sample(sample: dict) -> TextRounds:
    """rounds: [pieces that passed, the verifier's own piece], the last one cut where the text was."""
    rounds = []
    for n, (passed, own) in enumerate(sample["rounds"]):
        kind, cut = "correction" if n else "first", own == "" and n == len(sample["rounds"]) - 1
        chain, kept = list(range(len(passed))), len(passed) + 1 - cut
        parents = [place - 1 for place in chain]
        rounds.append(RoundText(drafts=passed, parents=parents, path=chain, own=own, kind=kind, kept=kept))
    names = {name: sample.get(name, "") for name in ("id", "category")}
    return TextRounds(prompt=sample["prompt"], rounds=rounds, whole=False, **names)
