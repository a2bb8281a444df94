"""One quiet, offline, single-threaded setting for every test; caches go to a temporary folder."""

import os
import signal
import sys
import tempfile
from pathlib import Path

# Jobs in the background begin by ignoring Ctrl-C, and so would the commands that tests start there.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch, transformers and wandb are imported, and inherited by the commands that tests start.
_CACHE = tempfile.TemporaryDirectory(prefix="eyrie-tests-")
os.environ.update(
    EYRIE_CACHE=_CACHE.name,
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    OMP_NUM_THREADS="1",
    MPLBACKEND="Agg",
    TOKENIZERS_PARALLELISM="false",
)

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    """Each test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a command in this process: command(name, function, *words) -> (exit code, standard output, standard error).

    name: as conf.schema.COMMANDS has it. Both outputs come without the white space around them.
    """
    from conf.cli import main

    def call(name: str, function, *words: str):
        monkeypatch.setattr(sys, "argv", [name, *words])
        code = 0
        try:
            main(name)(function)()
        except SystemExit as end:
            code = end.code
        out = capsys.readouterr()
        return code, out.out.strip(), out.err.strip()

    return call


@pytest.fixture
def fault(record_property):
    """fault(injected, shown, kept): a row of the fault table, true if the test passes."""

    def add(injected: str, shown: str, kept: str) -> None:
        record_property("fault", (injected, shown, kept))

    return add


def pytest_terminal_summary(terminalreporter):
    """The fault table of the tests that have run, to the terminal and to the file that FAULT_TABLE names."""
    path = os.environ.get("FAULT_TABLE")
    if path is None:
        return
    from fault_table import table

    text = table(terminalreporter.stats)
    terminalreporter.write_line(text)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text + "\n")


def pytest_unconfigure():
    _CACHE.cleanup()


def pytest_configure(config):
    # A warning is a fault of ours or a surprise of a library's: each exception is named here, with its reason.
    config.addinivalue_line("filterwarnings", "error")
