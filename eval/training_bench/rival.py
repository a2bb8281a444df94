"""A training step in a process of its own: what it is called, how it is run, and how it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from conf.errors import UserError
from eval.serving.engine import last_line

PEERS = Path(__file__).parent / "peers"
# Large tensors come back from the heap instead of being mapped and faulted in anew. The same for every rival.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}


@dataclass(frozen=True)
class Rival:
    """command: of its worker.  options: what that is told beside the setting.

    lm_head: does it train one?  dense: it may need several GB, or not be able to run.
    """

    name: str
    command: list[str]
    options: dict = field(default_factory=dict)
    lm_head: bool = True
    dense: bool = True


def own(name: str, rival: str, lm_head: bool = True, dense: bool = False) -> Rival:
    """A step of eval.training_bench.worker."""
    command = [sys.executable, "-m", "eval.training_bench.worker"]
    return Rival(name, command, {"rival": rival, "freeze_lm_head": not lm_head}, lm_head, dense)


OURS, FROZEN = own("ours", "ours"), own("ours, LM head frozen", "ours", lm_head=False)
NAIVE = own("naive", "naive", dense=True)


def peer(environments: Path | str, name: str) -> Rival | None:
    """Another trainer by the name of its worker, or None where its environment isn't there.

    It freezes the LM head. UserError for a name that has no worker.
    """
    script = PEERS / f"{name}_worker.py"
    if not script.is_file():
        known = ", ".join(sorted(path.stem.removesuffix("_worker") for path in PEERS.glob("*_worker.py")))
        raise UserError(f"no peer '{name}'; there are: {known}")
    python = Path(environments, name, "bin", "python").absolute()
    return Rival(name, [str(python), str(script)], lm_head=False) if python.is_file() else None


class Process:
    """A rival at work on a setting file. Raises UserError with its last words when it ends too early."""

    def __init__(self, rival: Rival, setting: Path, threads: int, log: Path):
        self.rival, self.log = rival, log
        environment = MALLOC | os.environ | {"OMP_NUM_THREADS": str(threads), "TORCHDYNAMO_DISABLE": "1"}
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                rival.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True, env=environment
            )
        self.about = self.ask(setting=str(setting), threads=threads, **rival.options)

    def ask(self, **question: object) -> dict:
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self.process.wait()
            self.close()
            why = "killed, which is how a system without memory ends a process" if code == -9 else f"ended with {code}"
            raise UserError(f"{self.rival.name} was {why}: {last_line(self.log)}; see {self.log}")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process; it has nothing to save."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_) -> None:
        self.close()
