"""README.md and docs/*.md: every command they show is run here, by another test, or by a make target.

The fast tests hold each to compose; `make docs-check` runs each, in a folder where the names that pages use are real:
a tiny verifier, a tiny run, files of prompts, stand-ins for servers.
"""

import json
import re
import runpy
import shlex
import subprocess
import sys
import threading
import warnings
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import test_serve
import test_server_states
import test_theory_page
import test_tuner_page
from counter_page import serving, vllm_page
from docs_commands import PAGES, ROOT, commands, plain, spoken

import answer_stub
from conf.cli import load
from conf.explain import mistake
from conf.schema import COMMANDS
from models.verifier import Verifier
from tiny import tiny_tokenizer
from tiny_writer import tiny_writer

SHOWN = {command: page for page in PAGES for command in commands(page)}  # the last page that has it
MADE = [command for command in SHOWN if command.startswith("make")]
OURS = [command for command in SHOWN if command not in MADE and not command.startswith("python -m sglang")]
NAMED = [command for command in OURS if len(command.split()) == 3]  # the command as such: its help is asked for
# What runs elsewhere, and where.
ELSEWHERE = {
    "python -m eval.serving.check runs=[DIR] engines=[vllm]": "make serve-check",
    "python -m eval.gpu_check": "make gpu-check",
    "python -m eval.bench train": "make bench",
    **{f"python -m eval.bench {kind}": "make bench-full" for kind in ("sweep", "scaling", "profile")},
    **{command: "SGLang: needs a GPU, and is said not to have been run" for command in SHOWN.keys() - {*MADE, *OURS}},
    **{command: "test_theory_page" for command in test_theory_page.COMMANDS if "-m train" not in command},
    **{command: "test_tuner_page" for command in test_tuner_page.COMMANDS},
}
# The words of pages that stand for others, and what is put there.
STAND_INS = {
    r"\bout=DIR\b": "out=out",
    r"\[A,B\]": "[DIR,medusa]",
    r"\brun=FOLDER\b": "run=DIR/export",
    r"\b(outputs/eagle3_llama/\w+|RUN)\b": "DIR",
    r"/heads/published\b": "DIR/export",
    r"\$MINE\b": "verifier=folder verifier.source=verifier data=jsonl data.path=chats.jsonl data.answers=given",
    r"\bDIR\b": "outputs/eagle3_llama/first",
    r"/models/my-llama\b|\b(FOLDER|MODEL|VERIFIER)\b": "verifier",
    r"\bverifier=llama31_8b\b": "verifier=folder verifier.source=verifier",
    r"\bDATA\b": "data=jsonl data.path=chats.jsonl data.answers=given data.store=true data.store_dtype=int8",
    r"-m train \.\.\.": "-m train experiment=eagle3_llama verifier=folder verifier.source=verifier",
    r"\bpath=\.\.\.|\bpath=FILE\b": "path=chats.jsonl",
    r"\bFILE\b|\bPROMPTS\.jsonl\b": "prompts.jsonl",
    r"=N\b": "=2",
    r"=T\b": "=0.7",
    r"\bNAME\b": "chat_8b_h100",
    r"\bFORMAT\b": "vllm",
}
ADDRESS = r"http://(HOST:PORT|\w+:8000)|\bURL\b"
SMALL = ["prompts=prompts.jsonl", "decode.max_new_tokens=6"]
EVERY_TRAINING = [
    "verifier=folder", "verifier.source=verifier", "budget=tiny", "data.minutes=null", "data.max_documents=12",
    "data.exclude=[]", "evaluation.prompts=prompts.jsonl", "trainer.accelerator=cpu", "trainer.devices=1",
]  # fmt: skip
# What is added to make a command small, by its module.
BUDGETS = {
    "train": [*EVERY_TRAINING, "logger=csv"],
    "data": EVERY_TRAINING,
    "eval": SMALL,
    "eval.sweep": [*SMALL, "temperatures=[1]", "batches=[2]", "contexts=[]", "depths=[2]", "repeats=1"],
    "eval.diagnose": SMALL,
    "eval.stream": ["decode.max_new_tokens=6"],
    "eval.simulate": ["seeds=3", "rounds=2000"],
    "eval.bench": ["verifier.source=verifier", "repeats=1", "max_new_tokens=4", "depth=2", "batches=[2]"],
}


def words_of(command: str) -> tuple[str, list[str]]:
    """(module, words), with real names in place of those that pages use."""
    for name, value in STAND_INS.items():
        command = re.sub(name, value, command)
    _, _, module, *words = shlex.split(command)
    return module, words


def with_budget(module: str, words: list[str]) -> list[str]:
    """The words with those of BUDGETS, which take the place of others of the same name; a given axis of a sweep stays
    short; a run that goes on takes nothing else."""
    if any(word.startswith(("resume=", "file=")) for word in words):
        return words
    added = BUDGETS.get(module, [])
    if "plan=true" in words:
        added = [] if "verifier=folder" in words else ["verifier=folder", "verifier.source=verifier"]
    names = {word.partition("=")[0] for word in added}
    return [word for word in words if word.partition("=")[0] not in names] + added


def test_commands_are_found():
    cell = "`python -m data task=a x=1` (or `b`, `task=c y=2`) | `python -m eval run=DIR` (`t=1`), `run=B` to `make x`"
    found = [command for part in cell.split("|") for command in spoken(part)]
    data = ["python -m data task=a x=1", "python -m data task=b x=1", "python -m data task=c y=2 x=1"]
    assert found == [*data, "python -m eval run=DIR", "python -m eval run=DIR t=1", "make x"]
    assert plain("PATH=x:$PATH .venv/bin/python -m eval run=A  [t=1] [overrides]") == "python -m eval run=A t=1"
    assert plain("make") is None and plain("python -c 1") is None
    assert {"make .engines/vllm/.done", "make demo"} <= {*MADE} and any(
        "verifier.whole=false trainer" in c for c in OURS
    )


def test_every_command_runs_somewhere():
    """No entry of the table is a leftover, and what it names is there."""
    assert len(OURS) > 90 and set(ELSEWHERE) - set(SHOWN) <= {*test_theory_page.COMMANDS, *test_tuner_page.COMMANDS}
    targets = {where.split()[1] for where in ELSEWHERE.values() if where.startswith("make ")}
    assert targets <= {command.split()[1] for command in MADE}
    recipe = (ROOT / "Makefile").read_text()
    for command, where in ELSEWHERE.items():
        if where.startswith("make "):
            assert command.split(" runs=")[0] in recipe, command


def test_every_link_leads_somewhere():
    for page in PAGES:
        links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
        missing = [link for link in links if "://" not in link and not ((ROOT / page).parent / link).exists()]
        assert not missing, f"{page}: {missing}"


def test_make_has_every_target():
    for command in MADE:
        done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, f"{SHOWN[command]}: {command}: {done.stderr}"


def test_every_command_composes():
    """Every name, group and file of a group; the values of each set of names once, for they take longer."""
    seen = set()
    for command in OURS:
        module, words = words_of(command)
        if command in NAMED or ELSEWHERE.get(command, "").startswith("test_"):
            continue
        if module == "eval.bench":
            words[0] = f"kind={words[0]}"
        name, place = name_of(module), f"{SHOWN[command]}: {command}"
        assert mistake(name, words) is None, place
        if (names := (name, *sorted(word.partition("=")[0] for word in words))) not in seen:
            seen.add(names)
            assert load(name, words), place


@cache
def name_of(module: str) -> str:
    """The command of conf.schema.COMMANDS that a module is."""
    spec = find_spec(module)
    spec = find_spec(f"{module}.__main__") if spec.submodule_search_locations else spec
    found = re.findall(r"\bmain\(\"(\w+)\"", Path(spec.origin).read_text()) or [module]
    assert found[0] in COMMANDS, module
    return found[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The folder in which the commands run; a run of each kind that they ask for is there."""
    folder = tmp_path_factory.mktemp("docs")
    writer = tiny_writer()
    writer.model.save_pretrained(folder / "verifier")
    tiny_tokenizer().save_pretrained(folder / "verifier")
    (folder / "draft").symlink_to("verifier")  # of the server that is asked for its acceptance
    questions = [f"What is {i} and {i * i}?" for i in range(14)]
    answers = [[{"role": "user", "content": text}, {"role": "assistant", "content": "It is so."}] for text in questions]
    for name, rows in {
        "prompts.jsonl": [{"prompt": text} for text in questions[:3]],
        "chats.jsonl": [{"messages": turns} for turns in answers],
    }.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "serving.jinja").write_text(writer.tokenizer.chat_template.replace("Be brief.", "Be long."))
    (folder / "states").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train = ["experiment=eagle3_llama", *BUDGETS["train"], "data=jsonl", "data.path=prompts.jsonl"]
        first = ["head.draft_vocab_size=64", "hydra.run.dir=outputs/eagle3_llama/first"]
        assert run("train", [*train, *first]) == 0
        assert run("train", [*train, "hydra.run.dir=outputs/broken", "optim.lr=1e30"]) == 2
        assert run("train", ["experiment=medusa_llama", *train[1:], "hydra.run.dir=medusa"]) == 0
        assert run("data", ["task=synthesize", *BUDGETS["data"]]) == 0
    return folder


def run(module: str, words: list[str]) -> int:
    """The module as a program, in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)  # runpy's, of a second import
        patch.setattr(sys, "argv", [module, *words])
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code or 0
    return 0


@pytest.fixture
def server(world):
    """server(command): the address of a stand-in for the server that a command asks."""
    with ExitStack() as stack:

        def start(command: str) -> str:
            verifier = Verifier.load(str(world / "verifier"), dtype="float32", device="cpu")
            if "serve=" in command:
                stub = test_serve.Stub(world)
            elif " server=" in command:
                stub = test_server_states.Server(world / "states", model=verifier.model)
            elif "data.server=" in command:
                return stack.enter_context(answer_stub.Stub(verifier)).url
            else:
                return stack.enter_context(serving(vllm_page(10_000, [7000, 5000, 3000])))
            threading.Thread(target=stub.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(stub.server_close)
            stack.callback(stub.shutdown)
            return stub.url

        yield start


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in OURS if command not in {*ELSEWHERE, *NAMED}])
def test_every_command_runs(command, world, server, monkeypatch, capsys):
    monkeypatch.chdir(world)
    module, words = words_of(command)
    if re.search(ADDRESS, command):
        words = [re.sub(ADDRESS, server(command), word) for word in words]
    if "format=medusa" in words:
        words[0] = "run=medusa"
    words = [f"file={next(world.glob('outputs/broken/nonfinite/*.pt'))}" if w.startswith("file=") else w for w in words]
    if {"verifier.whole=false", "data.store=true"} <= {*words} and module == "train":
        assert run("data", with_budget("data", ["task=capture", *words])) == 0  # as the page has it
    capsys.readouterr()
    code = run(module, [*with_budget(module, words), "json=true"])
    out, err = capsys.readouterr()
    assert code == 0, f"{SHOWN[command]}: {err[-2000:]}"
    values = json.loads(out.splitlines()[-1])
    assert ("path" in values) != (module in ("eval.stream", "eval.theory") or "plan=true" in words)
    assert Path(values.get("path", ".")).exists()


@pytest.mark.parametrize("command", NAMED)
def test_named_commands_have_a_page_of_their_own(command, capsys):
    assert run(command.split()[2], ["--help"]) == 0
    assert "Settings, as name=value" in capsys.readouterr().out
