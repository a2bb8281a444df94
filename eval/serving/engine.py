"""A serving engine that decodes prompts greedily: what it is asked, what it answers, and how it is run.

Each engine lives in an environment of its own, and is driven by a script in eval/serving/engines/ that imports nothing
of ours: JSON in, JSON out.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from conf.errors import UserError
from eval.counts import ratio

WORKERS = Path(__file__).parent / "engines"


@dataclass(frozen=True)
class Job:
    """verifier, head: folders or files as the engine reads them; head None decodes without drafts.

    method: eagle1, eagle3 or medusa. depth: drafts of a chain. stop_ids: tokens that end a text.
    batch: sequences at once, where the engine can be told.
    """

    verifier: str
    head: str | None
    method: str
    depth: int
    prompts: list[list[int]]
    max_new_tokens: int
    stop_ids: list[int]
    dtype: str = "float32"
    threads: int = 1
    batch: int = 1


@dataclass(frozen=True)
class EngineRun:
    """texts: token ids of each prompt, the stop token in. Counters are the engine's own.

    accepted_by_position: how often the draft at each depth was accepted. rounds: of each prompt the verify calls, as
    (tokens emitted before it, drafted tokens). None where the engine doesn't tell. seconds: of all prompts.
    """

    engine: str
    texts: list[list[int]]
    verify_calls: int
    drafted: int
    accepted: int
    accepted_by_position: list[int] | None
    rounds: list[list[tuple[int, list[int]]]] | None
    seconds: float

    @property
    def tau(self) -> float | None:
        return 1 + self.accepted / self.verify_calls if self.verify_calls else None

    @property
    def by_position(self) -> list[float | None] | None:
        """P(draft n accepted), unconditional."""
        hits = self.accepted_by_position
        return None if hits is None else [ratio(hit, self.verify_calls) for hit in hits]

    @property
    def tokens_per_second(self) -> float | None:
        return ratio(sum(map(len, self.texts)), self.seconds)


RECORD = TypeAdapter(with_config(ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))(EngineRun))


def run_engine(command: Sequence[str], worker: str, job: Job, folder: Path, **more: object) -> EngineRun:
    """Runs eval/serving/engines/`worker` by `command` (the engine's Python) on the job; its log is kept in `folder`.

    more: what a worker asks for beside the job, or in another form: `program`, its server; `verifier`, a file.
    Raises UserError with the log's last line when it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ask, answer, log = folder / "job.json", folder / "result.json", folder / "log.txt"
    ask.write_text(json.dumps(asdict(job) | more))
    answer.unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(job.threads)}
    with log.open("w") as stream:
        call = [*command, str(WORKERS / worker), str(ask), str(answer)]
        done = subprocess.run(call, stdout=stream, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode or not answer.is_file():
        raise UserError(f"{worker} ended with {done.returncode}: {last_line(log)}; see {log}")
    return read_run(answer)


def read_run(answer: Path) -> EngineRun:
    """What a worker wrote; UserError for a record of other fields or types."""
    try:
        return RECORD.validate_json(answer.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise UserError(f"{answer}: another record than was expected ({place}: {first['msg']})") from error


def check_run(run: EngineRun, job: Job, vocab_size: int, where: Path) -> EngineRun:
    """`run`, where it answers the job in full: a text for each prompt, and, if drafts are shown, those of every call.

    Raises UserError, since what is missing would otherwise count as agreement.
    """

    def ids(values: object) -> bool:
        return isinstance(values, list) and all(type(value) is int and 0 <= value < vocab_size for value in values)

    def whole(text: list[int], calls: list) -> bool:
        """Calls in order, each behind tokens of the text, with 1 to K drafts."""
        starts = [emitted for emitted, _ in calls]
        ascending = all(type(n) is int for n in starts) and starts == sorted(set(starts))
        return ascending and all(
            1 <= emitted <= len(text) and ids(drafts) and 1 <= len(drafts) <= job.depth for emitted, drafts in calls
        )

    counts = (run.verify_calls, run.drafted, run.accepted, *(run.accepted_by_position or ()))
    faults = {
        f"texts of {len(job.prompts)} prompts": len(run.texts) == len(job.prompts) and all(map(ids, run.texts)),
        "counts from 0 up": all(type(count) is int and 0 <= count < 2**53 for count in counts),
    }
    if run.rounds is not None:
        calls = [call for rounds in run.rounds for call in rounds]
        drafted = sum(len(drafts) for _, drafts in calls)
        faults |= {
            "rounds that lie in their texts": len(run.rounds) == len(run.texts)
            and all(map(whole, run.texts, run.rounds)),
            f"the drafts of {run.verify_calls} verify calls, {run.drafted} tokens (shown: {len(calls)}, {drafted})": (
                len(calls) == run.verify_calls and drafted == run.drafted
            ),
        }
    for what, holds in faults.items():
        if not holds:
            raise UserError(f"expected {what} from {run.engine}, found others; see {where}")
    return run


def last_line(log: Path) -> str:
    """What a program said last."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
