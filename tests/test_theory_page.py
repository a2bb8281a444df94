"""docs/theory.md: every command in it is run, and what it quotes is what they print; theory of a measured run."""

import json
import re
import shlex
from pathlib import Path

import pytest

from conf.cli import load
from eval.command import evaluate_run
from eval.compare import compare
from eval.simulate.command import SIMULATIONS
from eval.simulate.command import run as simulate
from eval.theory.command import run as theory
from tiny_run import save_run

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "theory.md").read_text()
SPANS = re.findall(r"`((?:python -m|make) [^`]+)`", PAGE) + re.findall(r"^    (python -m [^#\n]+)", PAGE, re.M)
COMMANDS = sorted({" ".join(span.split()) for span in SPANS if " " in span.removeprefix("python -m ")})
SHORT = ["limit=1", "decode.max_new_tokens=6", "decode.depth=2", "report=false", "plots=false"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A tiny run, measured: folder/alpha.json."""
    folder = save_run(tmp_path_factory.mktemp("page"))
    words = [f"run={folder}", f"prompts={folder}/prompts.jsonl", "decode.max_new_tokens=12", "decode.depth=3"]
    evaluate_run(load("eval", [*words, "report=false", "plots=false", f"out={folder}"]))
    return folder


def test_the_page_has_commands_of_each_kind():
    modules = {words[2] for words in map(str.split, COMMANDS) if words[0] == "python"}
    assert modules == {"eval", "eval.theory", "eval.simulate", "eval.compare", "train"}
    names = set(re.findall(r"`name=(\w+)`", PAGE)) | set(re.findall(r"eval\.simulate name=(\w+)", PAGE))
    assert names == {*SIMULATIONS, "all"}
    assert "make exactness" in COMMANDS


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(line, measured, tmp_path, command):
    if line.startswith("make "):
        assert re.search(rf"^{line.removeprefix('make ')}:", (ROOT / "Makefile").read_text(), re.M)
        return
    _, _, module, *words = shlex.split(line)
    words = [word.replace("out=DIR", f"out={tmp_path}") for word in words]
    words = [re.sub(r"\bDIR\b", str(measured), word) for word in words]
    words = [re.sub(r"\b(MODEL|VERIFIER)\b", f"{measured}/verifier", word) for word in words]
    if module == "train":
        load("train", words)  # the experiments themselves run in test_experiments and test_study_run
        return
    if module == "eval.simulate":
        words += ["seeds=3", "rounds=5000", f"out={tmp_path}"]
    if module == "eval":
        words += [f"prompts={measured}/prompts.jsonl", f"out={tmp_path}", *SHORT]
    if module == "eval.compare":
        words = [word.replace("[A,B]", f"[{measured},{rewritten(tmp_path, measured)}]") for word in words]
        words += ["names=[a,b]", f"out={tmp_path}"]
    run = {"eval": evaluate_run, "eval.compare": compare, "eval.simulate": simulate, "eval.theory": theory}[module]
    code, out, err = command(module.removeprefix("eval.") if module != "eval" else "eval", run, *words)
    assert code == 0, err
    assert out


def test_the_drawing_is_what_the_command_prints(command, tmp_path):
    drawing = PAGE.split("```\n")[1].strip().splitlines()
    assert len(drawing) == 5
    printed = command("simulate", simulate, "name=rollback", f"out={tmp_path}")[1]
    assert [line.rstrip() for line in printed.splitlines()[:5]] == drawing


def test_the_tables_figures_are_what_the_commands_give(command, tmp_path):
    rows = re.findall(r"^\| (\.\d+) \| (\.\d+) \| (\d+) \| ([\d.]+) \|(.*?)\|$", PAGE, re.M)
    assert len(rows) == 5
    for alpha, c, n_star, speedup, others in rows:
        values = values_of(command, f"alpha={alpha}", f"c={c}")
        digits = len(speedup.split(".")[1])
        assert (str(values["n_star"]), f"{values['speedup']:.{digits}f}") == (n_star, speedup)
        for n, other in re.findall(r"(\d+): (\d\.\d{3})", others):
            assert f"{values['speedup_by_n'][n]:.3f}" == other
    code, out, _ = command("simulate", simulate, "name=tree", "rounds=2000", f"out={tmp_path}", "json=true")
    trees = {round(row["alpha"], 2): row for row in json.loads(out.splitlines()[-1])["tree"]["by_draft"]}
    quoted = [(trees[0.86], 3.66, 6.51), (trees[0.59], 2.66, 2.44)]
    assert all((round(row["tree"], 2), round(row["chain_same_rows"], 2)) == (a, b) for row, a, b in quoted)
    assert "(α .86): 3.66 tokens against 6.51; poor ones (α .59): 2.66 against 2.44" in PAGE


# --- a measured run -------------------------------------------------------------------------------------------


def values_of(command, *words):
    code, out, err = command("theory", theory, *words, "json=true")
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def rewritten(folder, source, **changes):
    values = json.loads((source / "alpha.json").read_text())
    folder.mkdir(exist_ok=True)
    (folder / "alpha.json").write_text(json.dumps(values | changes))
    return folder


TIMES = {"t_decode": 1.0, "t_verify": {"1": 1.0, "2": 1.1, "4": 1.3}, "t_draft_first": 0.2, "t_draft": 0.1,
         "t_other": 0.05}  # fmt: skip


@pytest.fixture
def head(measured, tmp_path):
    """The run as if its head were a good one: depths .8, .7 and one that was never tested."""
    intervals = json.loads((measured / "alpha.json").read_text())["intervals"]
    known = {"alpha_by_depth": [0.8, 0.7, None], "accepted_by_position": [0.8, 0.56, None], "times": TIMES,
             "cost_ratio": 0.09, "tested_by_depth": [10, 8, 0], "accepted_by_depth": [8, 5, 0],
             "intervals": intervals | {"alpha_by_depth": [[0.7, 0.9], [0.6, 0.8], None]}}  # fmt: skip
    return rewritten(tmp_path / "head", measured, **known)


def test_a_runs_own_profile_and_times(head, command):
    values = values_of(command, f"run={head}")
    assert list(values["speedup_by_n"].values()) == pytest.approx([1.8 / 1.35, 2.36 / (1.2 + 0.2 + 0.1 + 0.05)])
    assert (values["n_star"], values["c"]) == (2, 0.09)
    assert values["break_even_by_n"]["1"] == pytest.approx(0.35)  # 1.1 + .2 + .05 of a step, less the token for nothing
    assert 0.8**2 * 0.7 < values["equal_alpha"] < 0.8
    assert [one["batch"] for one in values["batches"]] == [1, 2, 4, 8, 16, 32, 64]
    assert [one["known"] for one in values["batches"]][:2] == [True, False]
    assert values_of(command, f"run={head}/alpha.json")["n_star"] == 2
    out = command("theory", theory, f"run={head}")[1]
    assert "measured times" in out and "measure deeper" in " ".join(out.split())


def test_a_c_given_by_hand_takes_the_place_of_the_times(head, command):
    values = values_of(command, f"run={head}", "c=0.1")
    assert list(values["speedup_by_n"].values()) == pytest.approx([1.8 / 1.1, 2.36 / 1.2]) and "batches" not in values


def test_runs_that_cannot_answer_say_so(head, command):
    cases = [
        ({"nodes": 14, "decode": "tree"}, [], "found a tree of 14 nodes"),
        ({"alpha_by_depth": [None] * 3}, [], "found no draft that was tested"),
        ({"times": None, "cost_ratio": None}, [], "no times"),
        ({"times": TIMES | {"t_decode": 0.0}}, [], "above zero"),
        ({"times": TIMES | {"t_verify": {}}}, [], "above zero"),
        ({"batch": 8}, ["batches=[8]"], "decode.batch=1"),
    ]
    for changes, words, hint in cases:
        code, _, err = command("theory", theory, f"run={rewritten(head.parent / 'other', head, **changes)}", *words)
        assert code == 2 and hint in err and len(err.splitlines()) == 1, err
    assert "batches" not in values_of(command, f"run={rewritten(head.parent / 'batch', head, batch=8)}")
