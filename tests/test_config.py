"""Every experiment and every option of every group composes into the typed schema; a typo is an error."""

import shutil
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf import schema
from conf.cli import CONF, choices, load, with_budget
from conf.errors import UserError
from conf.explain import explain, groups, options, settings
from train.resolve import resumed_config, with_defaults

NEEDED = ["data.path=x.jsonl", "verifier.source=x"]  # what folder and jsonl leave to the user
OPTIONS = [(group, name) for group in groups("train") for name in options(group)]
FILES = [*OPTIONS, *(("workload", name) for name in options("workload"))]


def test_every_group_is_known():
    folders = {path.name for path in Path(CONF).iterdir() if list(path.glob("*.yaml"))}
    assert folders - set(groups("tuner")) == set(groups("train")) == set(groups("data"))
    assert groups("tuner") == ["workload"]


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_every_option_composes(group, name):
    cfg = load("train", [f"{group}={name}", *NEEDED])
    assert isinstance(cfg, schema.TrainConf)
    if group == "experiment":
        assert cfg.name == name
    if group == "budget":
        assert cfg.budget_name == name


@pytest.mark.parametrize("command", schema.COMMANDS)
def test_every_command_composes(command):
    assert isinstance(load(command, []), schema.COMMANDS[command])


def test_data_takes_what_training_takes():
    overrides = ["experiment=eagle3_llama", "budget=demo"]
    assert load("data", overrides).data == load("train", overrides).data


@pytest.mark.parametrize(("group", "name"), FILES)
def test_files_open_with_purpose_and_command(group, name):
    lines = (Path(CONF) / group / f"{name}.yaml").read_text().splitlines()
    opening = " ".join(line for line in lines if line.startswith("#"))
    assert "python -m " in opening
    assert len(lines) <= 25


def test_a_typo_in_an_experiment_file_is_an_error(tmp_path, monkeypatch):
    copy = tmp_path / "conf"
    shutil.copytree(CONF, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (copy / "experiment" / "typo.yaml").write_text("# @package _global_\noptim: {lerning_rate: 1}\n")
    monkeypatch.setattr("conf.cli.CONF", str(copy))
    monkeypatch.setattr("conf.explain.CONF", copy)
    assert load("train", ["experiment=eagle3_llama"]).name == "eagle3_llama"
    with pytest.raises(UserError, match="experiment/typo.*'lerning_rate'"):
        load("train", ["experiment=typo"])


def test_every_setting_has_a_default_or_asks():
    def plain(value):
        return not is_dataclass(value) and value != "???"

    for command in schema.COMMANDS:
        cfg = load(command, [])
        for name in settings(command):
            value = cfg
            for part in name.split("."):
                value = getattr(value, part)
            assert is_dataclass(value) or plain(value), name


def test_budgets_with_a_clock_have_room_for_each_part():
    for name in ("demo", "hour"):
        cfg = load("train", [f"budget={name}"])
        assert cfg.evaluation.minutes and cfg.data.minutes + cfg.evaluation.minutes < cfg.minutes
        assert cfg.trainer.minutes < cfg.minutes  # the cap holds when the data was there already


def test_budget_is_chosen_when_none_is_named(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert with_defaults(["seed=1"]) == ["seed=1", "budget=hour"]
    assert with_defaults(["budget=demo"]) == ["budget=demo"]
    assert with_defaults(["experiment=debug", "seed=1,2"]) == ["experiment=debug", "seed=1,2"]
    assert choices("train", ["experiment=debug"])["budget"] == "tiny"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert with_defaults([]) == ["budget=full"]
    assert with_budget("data", ["task=synthesize"]) == ["task=synthesize", "budget=full"]
    assert with_budget("data", ["data.minutes=5"]) == ["data.minutes=5"]
    assert with_budget("data", ["budget=demo"]) == ["budget=demo"]
    with pytest.raises(UserError, match="to resume"):
        with_defaults(["resume=/nowhere"])


def test_a_group_that_is_null_and_causes_in_a_circle():
    with pytest.raises(UserError, match="must be a string"):
        load("train", ["trainer=null"])
    with pytest.raises(UserError):
        load("train", ["trainer=[null]"])
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert explain(one) in ("one", "other")


def test_a_list_in_a_runs_config_keeps_its_type(tmp_path):
    values = OmegaConf.create(
        {"verifier": {"source": "x"}, "data": {"path": "x"}, "optim": {"betas": [0.9, {"eps": 1}]}}
    )
    OmegaConf.save(values, tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"betas\[1\]: Value .* could not be converted to Float"):
        resumed_config(tmp_path, [])
