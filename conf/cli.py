"""The shell around every command: Hydra-style overrides in, one line per mistake out.

    @main("eval")
    def run(cfg: EvalCommandConf) -> Outcome: ...

Exit codes: 0 done, 2 a mistake the user can mend or a disk that refuses (one line on standard error), 130 interrupted,
143 terminated (SIGTERM); anything else is a bug and keeps its traceback. Logs and progress go to standard error. The
last line of standard output names the file written, or with json=true is one JSON object.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.disk import advice, disk_error
from conf.errors import Terminated, UserError, printable
from conf.explain import explain, groups, mistake
from conf.schema import COMMANDS
from conf.terminal import LineFormatter, nobody_reads, say
from conf.usage import usage

CONF = str(Path(__file__).parent.resolve())
AGAIN = 0.2  # seconds until a SIGTERM that nobody has seen is raised again
MOST_THREADS = 1024  # with many more the process ends without a word


@dataclass
class Outcome:
    """What a command did: `path` is the file (or folder) to look at, `values` what json=true prints."""

    path: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)


def load(command: str, overrides: list[str]) -> Any:
    """The command's settings as a dataclass of conf.schema. Raises UserError with one line for a mistake."""
    return _plain_objects(_compose(command, overrides))


def choices(command: str, overrides: list[str]) -> dict[str, str]:
    """Which file each group was filled from, e.g. {"budget": "demo"}; groups left empty are absent."""
    with initialize_config_dir(CONF, version_base="1.3", job_name=command):
        chosen = compose(command, overrides, return_hydra_config=True).hydra.runtime.choices
    return {group: name for group, name in chosen.items() if name is not None and not group.startswith("hydra/")}


def with_budget(command: str, overrides: list[str]) -> list[str]:
    """Adds `budget=hour` (CPU) or `budget=full` (GPU) where none is named, so that every run has its limits.

    The data command takes a limit on the data (data.minutes, data.max_documents, ...) in place of a budget.
    """
    parsed = OverridesParser.create().parse_overrides(overrides)
    names = {item.key_or_group for item in parsed}
    if command == "data" and names & {"data.minutes", "data.max_documents", "data.max_tokens"}:
        return overrides
    # Of a sweep, the first value stands for all: it decides nothing here but whether a budget is named.
    single = [
        f"{item.key_or_group}={next(item.sweep_string_iterator())}" if item.is_sweep_override() else item.input_line
        for item in parsed
        if not item.key_or_group.startswith("hydra.")
    ]
    if "budget" in names or "budget" in choices(command, single):
        return overrides
    import torch  # slow, and most commands' shells do without it

    return [*overrides, f"budget={'full' if torch.cuda.is_available() else 'hour'}"]


def main(command: str, multirun: bool = False, resolve: Callable[[list[str]], list[str]] | None = None):
    """Decorator: `run(cfg) -> Outcome` becomes the entry point of `command`; None says nothing (ranks above 0).

    multirun: run under hydra.main, so that -m, sweepers and launchers work (each job validated as it starts).
    resolve:  rewrites the overrides before anything runs; where there are budgets, `with_budget` if not given.
    """
    fill = resolve or (functools.partial(with_budget, command) if "budget" in groups(command) else None)

    def decorate(run: Callable[[Any], Outcome | None]) -> Callable[[], None]:
        @functools.wraps(run)
        def entry() -> None:
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="backslashreplace")  # of a terminal that has not every character
            overrides = sys.argv[1:]
            if {"-h", "--help"} & set(overrides):
                say(usage(command, _compose(command, [])))
                return
            quiet_logs()
            with reported():
                if multirun:
                    _under_hydra(command, run, fill, overrides)
                    return
                flags = [word for word in overrides if word.startswith("-")]
                if flags:
                    raise UserError(f"expected settings like name=value, found {flags[0]}; {command} takes no flags")
                if line := mistake(command, overrides):
                    raise UserError(line)
                _finish(run, load(command, fill(overrides) if fill else overrides))

        return entry

    return decorate


class reported:  # noqa: N801 - reads as a statement
    """Context: a mistake, a disk that refuses, Ctrl-C or SIGTERM inside ends the process with one line; a bug passes
    through."""

    def __enter__(self) -> None:
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, _terminate) for number in (signal.SIGTERM, signal.SIGALRM)}

    def __exit__(self, kind, error, trace) -> None:
        if self.before:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # first: one under way must not set the timer anew
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if isinstance(error, KeyboardInterrupt):
            hint = str(error) or "run the same command again to continue from what is in the cache"
            word, code = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
            print(f"{word}; {hint}", file=sys.stderr)
            raise SystemExit(code) from None
        if isinstance(error, BrokenPipeError) and error.filename is None:
            nobody_reads()
            raise SystemExit(1) from None
        if error is not None and (refusal := disk_error(error)) is not None:
            print(f"error: {printable(advice(refusal))}", file=sys.stderr)
            raise SystemExit(2) from None
        if isinstance(error, UserError):
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        if isinstance(error, (HydraException, OmegaConfBaseException)):
            print(f"error: {explain(error)}", file=sys.stderr)
            raise SystemExit(2) from None


def _terminate(number, frame) -> None:
    """Raised inside a destructor it goes no further: the alarm raises it again, unless it is on its way up here."""
    signal.setitimer(signal.ITIMER_REAL, AGAIN)
    error = sys.exception() if number == signal.SIGALRM else None
    while error is not None:
        if isinstance(error, Terminated):
            return
        error = error.__context__
    raise Terminated


def quiet_logs() -> None:
    """Our log lines to standard error, bare; other libraries' only from warnings up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for name in ("train", "data", "eval", "models"):
        logging.getLogger(name).setLevel(logging.INFO)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _compose(command: str, overrides: list[str]) -> Any:
    assert command in COMMANDS, command
    if line := mistake(command, overrides):
        raise UserError(line)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(CONF, version_base="1.3", job_name=command):
            return compose(command, overrides)
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, OverflowError) as error:
        # the last three: trainer=null, trainer=[null], an integer that is no float
        raise UserError(explain(error)) from error


def _plain_objects(cfg: Any) -> Any:
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        values = None if missing else OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:  # an interpolation that gives what the setting can't be
        raise UserError(explain(error)) from error
    if missing:
        raise UserError(f"{missing[0]} has no value: give {missing[0]}=...")
    name = getattr(values, "name", None)
    if name is not None and not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"a run's name is a folder's: expected letters, digits, _ . -, found {name!r}; give name=")
    threads = getattr(values, "threads", None)
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UserError(f"threads must lie in 1..{MOST_THREADS}, found {threads}")
    return values


def _under_hydra(command: str, run: Callable, resolve: Callable | None, words: list[str]) -> None:
    """Validates, then hands over to hydra.main, which may run `run` here, many times, or through a launcher."""
    flags = [word for word in words if word.startswith("-")]
    settings = [word for word in words if not word.startswith("-")]
    if set(flags) <= {"-m", "--multirun"}:  # Hydra's other flags (--cfg job) are for Hydra alone, as they were typed
        if line := mistake(command, settings):
            raise UserError(line)
        if not flags:
            load(command, settings)  # a mistake ends here, in one line, before Hydra makes a folder
        words = flags + (resolve(settings) if resolve else settings)

    @functools.wraps(run)
    def job(cfg) -> None:
        with reported():
            _finish(run, _plain_objects(cfg))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra must not swallow tracebacks: `reported` sorts the errors
    sys.argv[1:] = words
    hydra.main(config_path=CONF, config_name=command, version_base="1.3")(job)()


def _finish(run: Callable[[Any], Outcome | None], cfg: Any) -> None:
    quiet_logs()  # Hydra resets logging before each job
    outcome = run(cfg)
    if outcome is None:
        return
    if cfg.json:
        values = dict(outcome.values) | ({"path": str(outcome.path)} if outcome.path else {})
        say(json.dumps(_plain(values)))
    elif outcome.path:
        say(str(outcome.path))


def _plain(value: Any) -> Any:
    """Strict JSON: no NaN or infinity, paths as text, numbers of tensors and arrays as numbers."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)
