"""alpha.json read back: every value of the type and size that tables, plots and pages take it for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from conf.errors import UserError
from conf.parse import json_file

MOST_DEPTHS = 1000
# What older files lack, and `samples`, which newer ones have in rounds.json.
OLD = {"measured": "loop", "batch": 1, "predicted_speedup": None, "exposure": None, "samples": []}

Count = Annotated[int, Field(ge=0, lt=2**53)]
Number = Annotated[float, Field(ge=-1e15, le=1e15)]
Share = Annotated[float, Field(ge=0, le=1)]
Time = Annotated[float, Field(ge=0, le=1e9)]  # seconds
Span = Annotated[list[Number], Field(min_length=2, max_length=2)]
Whole = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,6}$")]  # a number as a key
Depths = Field(max_length=MOST_DEPTHS)


class Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)  # other keys than these mean nothing to a reader


class Times(Part):
    t_decode: Time
    t_verify: dict[Whole, Time]
    t_draft_first: Time
    t_draft: Time
    t_other: Time


class Intervals(Part):
    tau: Span | None
    alpha: Span | None
    alpha_by_depth: list[Span | None]


class Outlook(Part):
    n_star: Count
    speedup: Number
    speedup_by_n: Annotated[dict[Whole, Number], Depths]


class Category(Part):
    prompts: Count
    tau: Number | None
    alpha: Share | None
    prompt_lookup_tau: Number | None
    speedup: Number | None


class PromptRow(Part):
    """accepted_by_depth, tested_by_depth: of one prompt; None in files that nothing is compared with."""

    id: str
    prompt_tokens: Count | None = None
    verify_calls: Count | None = None
    drafted: Count | None = None
    accepted: Count | None = None
    tested_by_depth: Annotated[list[Count], Depths] | None = None
    accepted_by_depth: Annotated[list[Count], Depths] | None = None

    @model_validator(mode="after")
    def _shares(self) -> Self:
        return check_shares(self)


class Exposure(Part):
    """By own features read; `eval.exposure.exposure_record`."""

    tested: Annotated[list[Count], Depths]
    counted: list[Count]
    true_accuracy: list[Share | None]
    true_accuracy_interval: list[Span | None]
    own_accuracy: list[Share | None]
    own_accuracy_interval: list[Span | None]
    gap: list[Number | None]
    gap_interval: list[Span | None]
    teacher_forced: list[Share | None]
    own_given_tokens: list[Share | None]

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if any(len(values) != len(self.tested) for _, values in self):
            raise ValueError("lists by depth are not of one length")
        return self


class Difference(Part):
    prompt: str
    position: Count
    gap: Number


def _round(value: list) -> list:
    if len(value) != 2 or not isinstance(value[0], list) or not all(isinstance(x, str) for x in (*value[0], value[1])):
        raise ValueError("a round is [accepted pieces, the verifier's own piece]")
    return value


class Sample(Part):
    prompt: str
    rounds: list[Annotated[list, AfterValidator(_round)]]


class AlphaFile(Part):
    """The keys of eval.alpha.AlphaReport."""

    tau: Number | None
    alpha: Share | None
    alpha_by_depth: Annotated[list[Share | None], Depths]
    accepted_by_position: list[Share | None]
    tested_by_depth: list[Count]
    accepted_by_depth: list[Count]
    intervals: Intervals
    out_of_vocab_rate: Share | None
    times: Times | None
    cost_ratio: Number | None
    dtype: str
    threads: Count
    repetition_rate: Share | None
    prompt_lookup_tau: Number | None
    tokens_per_second: Number | None
    baseline_tokens_per_second: Number | None
    speedup: Number | None
    identical_to_baseline: bool | None
    ties: list[Difference]
    differences: list[Difference]
    measured: str = OLD["measured"]
    decode: str
    depth: Annotated[int, Field(ge=0, le=MOST_DEPTHS)]
    nodes: Count | None = None
    batch: Count = OLD["batch"]
    temperature: Number
    max_new_tokens: Count
    seed: int
    device: str
    verifier: str
    verifier_hash: str
    head: str | None
    head_hash: str | None
    predicted: Outlook | None
    predicted_speedup: Number | None = OLD["predicted_speedup"]
    by_category: dict[str, Category]
    prompts: list[PromptRow]
    exposure: Exposure | None = OLD["exposure"]
    samples: list[Sample] = OLD["samples"]
    definitions: dict[str, str]

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        lists = (self.accepted_by_position, self.tested_by_depth, self.intervals.alpha_by_depth)
        if any(len(one) != len(self.alpha_by_depth) for one in lists):
            raise ValueError("lists by depth are not of one length")
        missing = [a is not None and i is None for a, i in zip(self.alpha_by_depth, lists[2], strict=True)]
        if any(missing):
            raise ValueError(f"depth {missing.index(True) + 1} has an n-alpha and no interval")
        return check_shares(self)


def check_shares(values):
    accepted, tested = values.accepted_by_depth or [], values.tested_by_depth or []
    if len(accepted) != len(tested) or any(a > t for a, t in zip(accepted, tested, strict=True)):
        raise ValueError("more drafts were accepted than tested")
    return values


def read_alpha(path: Path) -> dict:
    """alpha.json of a run or evaluation folder, or such a file. Raises UserError when there is none that is whole."""
    path = Path(path)
    file = path / "alpha.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"expected alpha.json in {path}: run python -m eval run={path} first")
    values = read_as(AlphaFile, file, "an alpha.json", "python -m eval")
    return OLD | {"nodes": values["depth"]} | values


def read_as(kind: type[Part], file: Path, what: str, maker: str) -> dict:
    """The values of a JSON file. maker: the command that writes it. Raises UserError for what `kind` doesn't take."""
    values = json_file(file)
    try:
        kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "its values"
        raise UserError(f"{file} isn't {what} of this version ({place}: {first['msg']}): run {maker} again") from error
    return values
