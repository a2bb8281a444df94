"""`python -m eval` and `python -m eval.theory`, as a user types them."""

import json
import shutil
import subprocess
import sys

import pytest

from eval.command import evaluate_run, load_verifier
from eval.compare import compare
from eval.rounds import read_rounds
from eval.theory.command import run as theory
from models.export.native import read_head
from models.verifier import Verifier
from tiny_run import save_run, save_verifier


def shell(module: str, *words: str):
    return subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with a head for a verifier in a local folder."""
    return save_run(tmp_path_factory.mktemp("run"))


def test_evaluates_a_run(run):
    done = shell("eval", f"run={run}", f"prompts={run}/prompts.jsonl", "decode=chain", "decode.depth=2",
                 "decode.max_new_tokens=12", "json=true")  # fmt: skip
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.strip().splitlines()[-1])
    assert values["identical_to_baseline"] is True and values["depth"] == 2 and values["dtype"] == "float32"
    (folder,) = run.glob("eval-*")
    assert values["alpha_json"] == str(folder / "alpha.json")
    assert json.loads((folder / "alpha.json").read_text())["tau"] == values["tau"]
    assert "acceptance by depth" in done.stderr
    exposure = values["exposure"]
    assert exposure["counted"][0] > 0 and exposure["gap"][0] == 0 and exposure["tested"][0] == exposure["counted"][0]
    [text] = read_rounds(folder)
    assert text.whole and [one.kind for one in text.rounds][0] == "first"
    assert (folder / "report.html").read_text().count('<span class="t ') > sum(one.kept for one in text.rounds)


def test_sampled_without_a_page(run, tmp_path, command):
    code, out, err = command("eval", evaluate_run, f"run={run}", f"prompts=[{run}/prompts.jsonl]", "temperature=0.9",
                             "report=false", "plots=false", "decode.max_new_tokens=6", "limit=1",
                             f"out={tmp_path}/x")  # fmt: skip
    assert code == 0, err
    assert out.splitlines()[-1] == f"{tmp_path}/x/alpha.json"
    assert json.loads((tmp_path / "x" / "alpha.json").read_text())["temperature"] == 0.9
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"alpha.json", "rounds.json"}


def test_two_replays_of_one_recording_compared(run, tmp_path, command, monkeypatch):
    words = [f"run={run}", f"prompts={run}/prompts.jsonl", "replay=true", "decode.max_new_tokens=6"]
    for name in ("a", "b"):
        code, out, err = command("eval", evaluate_run, *words, f"out={tmp_path}/{name}")
        assert code == 0, err
        assert out.splitlines()[-1] == f"{tmp_path}/{name}/report.html" and "replay" in out
        monkeypatch.setattr("eval.replay.generate", None)  # the text is there
    code, out, err = command("compare", compare, f"runs=[{tmp_path}/a,{tmp_path}/b]", f"out={tmp_path}", "json=true")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["arms"]["b"]["tau_difference"] == 0
    code, _, err = command("eval", evaluate_run, *words, "temperature=0.9")
    assert code == 2 and "temperature 0.9" in err and len(err.splitlines()) == 1


def test_a_place_that_cannot_be_written_is_found_before_measuring(run, tmp_path, command, monkeypatch):
    monkeypatch.setattr("eval.command.measure", None)
    (tmp_path / "file").touch()
    code, _, err = command("eval", evaluate_run, f"run={run}", f"prompts={run}/prompts.jsonl", f"out={tmp_path}/file")
    assert (code, err) == (2, f"error: cannot use {tmp_path}/file (File exists): choose another place")


@pytest.mark.parametrize("draft, kind", [("none", "chain"), ("prompt_lookup", "chain"), ("lookahead", "tree")])
def test_drafts_without_a_model_by_name(run, tmp_path, command, draft, kind):
    words = [f"draft={draft}", f"verifier_source={run}/verifier", f"prompts={run}/prompts.jsonl", "report=false"]
    words += ["plots=false", "decode.max_new_tokens=10", "decode.batch=2"]
    code, _, err = command("eval", evaluate_run, *words, f"out={tmp_path}/x")
    assert code == 0, err
    values = json.loads((tmp_path / "x" / "alpha.json").read_text())
    assert values["identical_to_baseline"] is True and values["head"] == draft and values["batch"] == 2
    assert values["decode"] == kind and values["verify_calls"] > 0
    assert draft != "none" or (values["drafted"], values["tau"]) == (0, 1)
    code, _, err = command("eval", evaluate_run, *words, "replay=true", f"out={tmp_path}/y")
    if draft == "lookahead":
        assert code == 2 and "Lookahead reads the verifier's calls" in err and len(err.splitlines()) == 1
    else:
        replayed = json.loads((tmp_path / "y" / "alpha.json").read_text())
        assert code == 0 and replayed["tau"] == values["tau"]


@pytest.mark.parametrize("words", [["decode.branch=3", "decode.total_tokens=9"], ["decode.shape=[[0],[1],[0,0]]"]])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_trees_of_either_kind(run, tmp_path, command, words, temperature):
    code, _, err = command("eval", evaluate_run, f"run={run}", f"prompts={run}/prompts.jsonl", "decode=tree", *words,
                           "decode.max_new_tokens=8", f"temperature={temperature}", "report=false", "plots=false",
                           f"out={tmp_path}/x")  # fmt: skip
    assert code == 0, err
    values = json.loads((tmp_path / "x" / "alpha.json").read_text())
    best = temperature > 0 and "decode.branch=3" in words
    assert values["decode"] == ("tree of best tokens" if best else "tree")
    assert values["identical_to_baseline"] is (True if temperature == 0 else None)
    assert values["drafted"] == values["nodes"] * values["verify_calls"]
    assert (values["nodes"], values["depth"]) == ((8, 6) if "branch" in words[0] else (3, 2))


def test_a_verifier_that_changed_is_refused_with_both_hashes(run, tmp_path, command):
    copy = shutil.copytree(run, tmp_path / "run")
    card = json.loads((copy / "head" / "config.json").read_text())
    card["verifier"]["name"] = str(save_verifier(tmp_path / "other", 1))
    (copy / "head" / "config.json").write_text(json.dumps(card))
    code, _, err = command("eval", evaluate_run, f"run={copy}", f"prompts={run}/prompts.jsonl")
    other = Verifier.load(str(tmp_path / "other"), dtype="float32", device="cpu").weights_hash[:12]
    assert code == 2 and len(err.splitlines()) == 1
    assert card["verifier"]["weights_hash"][:12] in err and other in err


def test_the_verifier_is_loaded_as_the_run_says_unless_told_otherwise(run, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(Verifier, "load", lambda **options: seen.update(options))
    copy = shutil.copytree(run, tmp_path / "run")
    load_verifier(copy, read_head(copy), "float32")
    assert seen == {
        "source": f"{run}/verifier", "device": "auto", "revision": None, "trust_remote_code": False,
        "dtype": "float32", "aux_layers": list(read_head(copy).config.aux_layers),
        "device_map": None, "max_memory": None,
    }  # fmt: skip
    (copy / "config.yaml").write_text(
        "verifier: {source: org/model, device: cpu, revision: abc, trust_remote_code: true, dtype: auto}\n"
    )
    load_verifier(copy, read_head(copy), "float32", {"device": "cuda:1", "revision": None})
    assert (seen["source"], seen["device"], seen["revision"], seen["trust_remote_code"]) == (
        "org/model", "cuda:1", "abc", False,  # a run folder may come from anywhere
    )  # fmt: skip
    load_verifier(copy, read_head(copy), "float32", {"source": "other/model"})
    assert (seen["source"], seen["revision"], seen["trust_remote_code"]) == ("other/model", None, False)


@pytest.mark.parametrize(
    "words, hint",
    [
        (["decode.depht=2"], "decode.depth"),
        (["run=/absent"], "/absent"),
        ([], "run="),
        (["run=/x", "decode=tree", "decode.shape=[0]"], "found [0]"),
        (["run=/x", "decode.shape=[2,2]"], "decode.shape is of trees, found [2, 2] with a chain: add decode=tree"),
    ],
)
def test_mistakes_are_one_line(words, hint, command):
    code, _, err = command("eval", evaluate_run, *words)
    assert code == 2 and hint in err and len(err.splitlines()) == 1


def test_theory_prints_one_object(command):
    done = shell("eval.theory", "alpha=0.8", "c=0.05", "json=true")
    values = json.loads(done.stdout.strip().splitlines()[-1])
    assert values["n_star"] == 8 and round(values["speedup"], 4) == 3.0921
    assert round(values["speedup_by_n"]["5"], 3) == 2.951 and len(values["expected_by_n"]) == 64
    code, out, _ = command("theory", theory, "profile=[0.7,0.5]", "c=0.1")
    assert code == 0 and "speed-up" in out
    code, _, err = command("theory", theory, "alpha=1.5")
    assert code == 2 and len(err.splitlines()) == 1
