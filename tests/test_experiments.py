"""Every experiment by its name, and the objectives, from one end to the other on a tiny verifier in a folder."""

import json
import sys
from pathlib import Path

import pytest
from test_eval_cli import save_verifier

from eval.command import evaluate_run
from models.export.native import read_head
from train.main import train

EXPERIMENTS = {
    "eagle1_llama": "eagle1",
    "eagle3_llama": "eagle3",
    "eagle3_llama_no_ttt": "eagle3",
    "eagle31_llama": "eagle3",
    "medusa_llama": "medusa",
    "independent_llama": "independent",
}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """verifier, prompts and outputs in a temporary folder, a handful of steps."""
    folder = tmp_path_factory.mktemp("experiments")
    save_verifier(folder / "verifier", 0)
    save_verifier(folder / "smaller", 1)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"What is {i} and {i * i}?"}) + "\n" for i in range(14)))
    return [
        "budget=tiny", "logger=csv", "verifier=folder", f"verifier.source={folder / 'verifier'}", "data=jsonl",
        f"data.path={prompts}", f"evaluation.prompts={prompts}", f"output_dir={folder / 'out'}", "json=true",
        "data.exclude=[]", "trainer.accelerator=cpu", "evaluation.report=false", "evaluation.plots=false",
    ]  # fmt: skip


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs an entry point in this process; returns (exit code, the JSON object of the last line, standard error)."""

    def call(entry, *words):
        monkeypatch.setattr(sys, "argv", ["command", *words])
        code = 0
        try:
            entry()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, json.loads(out.splitlines()[-1]) if out.strip() else None, err

    return call


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_runs_by_name(words, command, name):
    code, values, err = command(train, f"experiment={name}", *words)
    assert code == 0, err
    stored = read_head(values["run"])
    assert stored.config.kind == EXPERIMENTS[name] and values["identical_to_baseline"] is True
    assert Path(values["run"]).parent.name == name
    exported = stored.config.kind != "independent"
    assert (Path(values["run"]) / "export").is_dir() == exported == (values["export"] is not None)
    steps = {"eagle1_llama": 1, "eagle3_llama_no_ttt": 1, "independent_llama": 1, "medusa_llama": 5}
    assert values["trained"]["ttt_steps"] == steps.get(name, 2)
    switches = ("fc_norm", "norm_output")
    assert all(getattr(stored.config, one, False) == (name == "eagle31_llama") for one in switches)


@pytest.mark.parametrize(
    "extra",
    [["objective=lk"], ["objective=hass"], ["objective=vat"], ["objective=on_policy"], ["objective=feature"],
     ["optim=muon"], ["head.start=random", "objective.token=lk_alpha"]],
    ids=lambda extra: extra[-1],
)  # fmt: skip
def test_objectives_train(words, command, extra):
    code, values, err = command(train, "experiment=eagle3_llama", *words, *extra)
    assert code == 0, err
    assert ("survival.weight" in read_head(values["run"]).tensors) == ("objective=vat" in extra)


def test_a_run_goes_on_from_a_head_and_from_its_export(words, command):
    """Fine-tuning, and evaluating what another trainer would have published."""
    _, first, _ = command(train, "experiment=eagle1_llama", *words)
    for start in (first["run"], first["export"]):
        code, values, err = command(
            train, "experiment=eagle1_llama", *words, f"head.start={start}", "trainer.max_steps=1"
        )
        assert code == 0 and "start from" in err, err
    source = next(word for word in words if word.startswith("verifier.source=")).partition("=")[2]
    entry = __import__("conf.cli", fromlist=["main"]).main("eval")(evaluate_run)
    prompts = next(word for word in words if word.startswith("evaluation.prompts=")).partition("=")[2]
    common = [f"verifier_source={source}", f"prompts={prompts}", "limit=2", "report=false", "plots=false", "json=true"]
    common += ["decode.max_new_tokens=8", "decode.depth=2"]
    code, published, err = command(entry, f"run={first['export']}", *common)
    assert code == 0, err
    code, own, err = command(entry, f"run={first['run']}", *common)
    assert code == 0 and own["tau"] == published["tau"] and own["tested_by_depth"] == published["tested_by_depth"], err
    code, untrained, err = command(entry, f"draft={Path(source).parent / 'smaller'}", *common, f"out={source}-alpha")
    assert code == 0 and untrained["identical_to_baseline"] is True, err
    code, named, err = command(entry, f"run={first['export']}", *common[1:])  # it names its verifier
    assert code == 0 and named["tau"] == published["tau"], err
    Path(first["export"]).rename(f"{first['export']}-gone")
    code, resumed, err = command(train, f"resume={values['run']}", "trainer.max_steps=2", "json=true")
    assert code == 0 and resumed["trained"]["steps"] == 2, err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["head=eagle1", "verifier.aux_layers=[1,2]"], "leave verifier.aux_layers unset"),
        (["head=eagle1", "head.draft_vocab_size=100"], "leave head.draft_vocab_size unset"),
        (["head=eagle1", "head.start=verifier"], "head.start=random"),
        (["head=medusa", "head.heads=0"], "head.heads must be 1 or more"),
        (["head=medusa", "objective=on_policy"], "objective.tokens is for eagle1 and eagle3 heads: expected given"),
        (["head=independent", "objective=vat"], "objective.survival is for eagle1 and eagle3 heads"),
        (["head=independent", "objective=feature"], "objective.feature_weight is for eagle1 and eagle3 heads"),
        (["head=independent", "objective.noise=0.1"], "expected 0.0 for independent, found 0.1"),
        (["head=eagle1", "head.fc_norm=true"], "fc_norm is for eagle3 heads: expected False for eagle1, found True"),
        (["head=eagle31", "head.name=medusa"], "head.fc_norm is for eagle3 heads"),
        (["head.blocks=2"], "head.blocks is for medusa heads"),
        (["head.layers=3"], "head.layers is for independent heads"),
        (["objective.token=mse"], "objective.token must be"),
        (["head.name=eagle4"], "head.name must be"),
        (["objective=kl"], "there are: ce, feature, hass, lk, on_policy, vat"),
    ],
)
def test_mistakes_end_at_once(words, command, monkeypatch, extra, message):
    monkeypatch.setattr("models.verifier.Verifier.load", None)
    code, _, err = command(train, "experiment=eagle3_llama", *words, *extra)
    assert code == 2 and message in err and len(err.splitlines()) == 1, err
