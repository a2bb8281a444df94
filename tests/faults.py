"""Commands in processes of their own that are to be hurt: killed, refused files, starved of disk. And what they leave.

A command starts as a fork of a process that has imported everything, so that a kill at a random moment meets its work
and not Python's imports. The tests that use this write the fault table: see `fault` in conftest.py.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tiny_writer import tiny_writer

ROOT = Path(__file__).parent.parent
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train.main", "data.command", "eval.command", "models.export.openvino"])


@dataclass(frozen=True)
class Sabotage:
    """At the `call`-th call of `target` (a dotted name) in the command's process: `act` (of ACTS) with `arguments`.

    after: let the call go through first.
    """

    target: str
    act: str = "signal"
    call: int = 1
    arguments: tuple = (signal.SIGKILL,)
    after: bool = False

    def install(self) -> None:
        owner, name = _owner(self.target)
        original, calls = getattr(owner, name), 0

        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls != self.call:
                return original(*args, **kwargs)
            if self.after:
                result = original(*args, **kwargs)
                ACTS[self.act](*self.arguments)
                return result
            ACTS[self.act](*self.arguments)
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)


def _owner(target: str):
    """(module or class, attribute) of a dotted name."""
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise AssertionError(f"no module of {target}")


def fill(folder: str, room: int = 0) -> None:
    """Leave `room` bytes free on a small file system, in whole pages."""
    free = os.statvfs(folder)
    with open(Path(folder) / "filler", "ab", buffering=0) as stream:
        left = free.f_bavail * free.f_frsize - room
        while left > 0:
            left -= stream.write(b"\0" * min(left, 1 << 16))


def hurry(seconds: float = 3.0) -> None:
    """Servers are given up sooner."""
    from data.fleet import PATIENCE, Fleet

    defaults = Fleet.__init__.__defaults__
    Fleet.__init__.__defaults__ = tuple(seconds if value == PATIENCE else value for value in defaults)


ACTS: dict[str, Callable] = {
    "signal": lambda number: os.kill(os.getpid(), number),
    "fill": fill,
    "hurry": hurry,
}


@dataclass
class Ended:
    """code: the exit code, negative for a signal.   line: the last line of standard error."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""

    @property
    def values(self) -> dict:
        """What json=true printed."""
        return json.loads(self.out.splitlines()[-1])


class Running:
    """A command under way, in a process group of its own."""

    def __init__(self, process, folder: Path):
        self.process, self.folder = process, folder

    def send(self, number: int) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, number)

    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def wait(self, seconds: float = 180) -> Ended:
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise AssertionError(f"still running after {seconds} s:\n{self.err()[-3000:]}")
        return Ended(self.process.exitcode, (self.folder / "out").read_text(errors="replace"), self.err())

    def until(self, happened: Callable[[], object], seconds: float = 120) -> None:
        """Wait for something to be true; the command must live until then."""
        end = time.monotonic() + seconds
        while not happened():
            assert self.process.is_alive() and time.monotonic() < end, self.err()[-3000:]
            time.sleep(0.005)


@dataclass
class Site:
    """A folder with a tiny verifier and a cache of its own, and the commands that run there."""

    folder: Path
    cache: Path | None = None
    started: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        imported()
        self.cache = self.cache or self.folder / "cache"
        self.verifier, self.prompts = self.folder / "verifier", self.folder / "prompts.jsonl"
        self.asked = self.folder / "asked.jsonl"  # in evaluation
        if not self.verifier.is_dir():
            save_verifier(self.verifier)
            save_prompts(self.prompts)
            save_prompts(self.asked, 2, "How far is {} from here?")

    @classmethod
    def warm(cls, folder: Path) -> Site:
        """A new site with the calm one's verifier, and its dialogues and states in the cache."""
        undisturbed()
        for name in ("verifier", "cache", "prompts.jsonl", "asked.jsonl"):
            source = calm().folder / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        return cls(folder)

    def start(
        self, command: str, *words: str, sabotage: tuple[Sabotage, ...] = (), bound: bool = False, **environment
    ) -> Running:
        """python -m COMMAND WORDS. bound: permissions bind it, even where it is root's."""
        self.started += 1
        folder = self.folder / "said" / f"{self.started:03d}"
        folder.mkdir(parents=True)
        for name in ("out", "err"):
            (folder / name).touch()
        settings = {"EYRIE_CACHE": str(self.cache)} | self.environment | environment
        arguments = (command, words, settings, str(folder), sabotage, bound)
        process = FORKS.Process(target=_child, args=arguments, daemon=True)
        process.start()
        return Running(process, folder)

    def run(self, command: str, *words: str, seconds: float = 180, **how) -> Ended:
        return self.start(command, *words, **how).wait(seconds)

    def data(self, *more: str) -> list[str]:
        """The debug experiment with this verifier, whose answers to the prompts are the data."""
        base = ["experiment=debug", f"verifier.source={self.verifier}", "trainer.accelerator=cpu", "json=true"]
        return [*base, "data=jsonl", f"data.path={self.prompts}", *more]

    def job(self, folder: Path, *more: str) -> list[str]:
        """Words of `train` for a run in `folder`: 24 steps of 5 batches an epoch, validated and saved on the way."""
        trainer = ("max_steps=24", "checkpoint_every=4", "validate_every=8", "log_every=1")
        evaluation = (f"prompts={self.asked}", "report=false", "plots=false")
        settings = [f"trainer.{word}" for word in trainer] + [f"evaluation.{word}" for word in evaluation]
        return self.data(f"hydra.run.dir={folder}", *settings, *more)

    def plain(self, text: str) -> str:
        """A message without the folders of this machine."""
        return text.replace(str(self.folder), "…").replace(str(ROOT), ".")


def _child(command: str, words, environment: dict, folder: str, sabotage, bound: bool) -> None:
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY, 0o644), number)
    os.environ.update(environment)
    os.chdir(ROOT)
    if bound:
        give_up_root()
    for each in sabotage:
        each.install()
    sys.argv = [command, *words]
    runpy.run_module(command, run_name="__main__", alter_sys=True)


def give_up_root() -> None:
    """Without the capabilities that let root pass by permissions (capset(2); 1 and 2: CAP_DAC_*)."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice, for 64 bits
    libc = ctypes.CDLL(None, use_errno=True)
    libc.capget(header, sets)
    for index in range(3):
        sets[index] &= ~0b110
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def save_verifier(folder: Path, **config) -> None:
    """One that writes text, so that it can be asked for prompts as well."""
    verifier = tiny_writer(**config)
    verifier.model.save_pretrained(folder)
    verifier.tokenizer.save_pretrained(folder)


def save_prompts(path: Path, count: int = 14, text: str = "What is {} times two?") -> None:
    path.write_text("".join(json.dumps({"prompt": text.format(i)}) + "\n" for i in range(count)))


@functools.cache
def imported() -> None:
    """Wait for the process from which all others are forked."""
    first = FORKS.Process(target=int)
    first.start()
    first.join()


@functools.cache
def calm() -> Site:
    """The site where nothing is disturbed; what it has found is there for the others to be compared with."""
    folder = tempfile.TemporaryDirectory(prefix="eyrie-faults-")
    atexit.register(folder.cleanup)
    return Site(Path(folder.name))


@functools.cache
def undisturbed(*more: str) -> Path:
    """The run folder of the job with settings `more`, from start to end without a fault."""
    site = calm()
    folder = site.folder / "calm" / str(len(list(site.folder.glob("calm/*"))))
    ended = site.run("train", *site.job(folder, *more))
    assert ended.code == 0, ended.err
    return folder


@contextmanager
def small_disk(folder: Path, size: str = "4m") -> Iterator[Path]:
    """A tmpfs of `size` at `folder`; skips the test where mounting is not permitted."""
    import pytest

    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount a tmpfs: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
