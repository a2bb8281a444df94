"""The arms of a study, and `python -m train experiment=ttt_study` from one end to the other."""

import csv
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest

from conf.cli import load
from conf.errors import UserError
from data.prepare import excluding
from eval.study import EXPLANATION
from tiny import tiny_model, tiny_tokenizer
from train.fit import fit
from train.ledger import Ledger
from train.main import Job, train
from train.study import Run, begin, runs_of, study_rows, train_arms


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    tiny_model("llama", layers=8, hidden=32, vocab=300).save_pretrained(folder / "verifier")
    tiny_tokenizer(300).save_pretrained(folder / "verifier")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"What is {i} and {i * i}?"}) + "\n" for i in range(14)))
    return [
        "experiment=ttt_study",
        "budget=tiny",
        "verifier=folder",
        f"verifier.source={folder / 'verifier'}",
        "logger=csv",
        "data=jsonl",
        f"data.path={prompts}",
        "data.exclude=[]",
        f"evaluation.prompts={prompts}",
        "evaluation.limit=6",
        f"output_dir={folder / 'out'}",
        "trainer.accelerator=cpu",
        "trainer.validate_every=0",
        "json=true",
    ]


@pytest.fixture(scope="module")
def base(words):
    return load("train", words)


def study_of(base, folder, arms=((1, "given"), (7, "given")), **changes):
    """(job, runs) of a fresh study in `folder`; arms: of each, K and what its later steps read."""
    trainer = {name: changes.pop(name) for name in ("max_steps",) if name in changes}
    trainer |= {"minutes": changes.pop("trainer_minutes", None)}
    cfg = replace(base, trainer=replace(base.trainer, **trainer), **changes)
    runs = []
    for K, tokens in arms:
        own = replace(cfg, head=replace(cfg.head, ttt_steps=K), objective=replace(cfg.objective, tokens=tokens))
        runs.append(Run("ttt", own, folder / f"{K}-{tokens}"))
    begin(runs)
    return Job(cfg, folder, 0, 1, Ledger()), runs


def test_arms_leave_out_what_is_asked_in_the_evaluation(words, tmp_path):
    """As the study itself does: they would be found to differ from it."""
    words = [word for word in words if word != "data.exclude=[]"]
    cfg = load("train", words)
    cfg.data = excluding(cfg.data, cfg.evaluation.prompts)
    assert {run.cfg.data.exclude for run in runs_of(cfg, tmp_path, words)} == {cfg.evaluation.prompts}


def pretend(job, runs, steps=9):
    """Trains nothing: returns the settings of each head that would have been, in order, and the record."""
    seen = []

    def train_head(one):
        seen.append(one.cfg)
        return {"training": {"steps": one.cfg.trainer.max_steps or steps, "seconds": 0.0}, "data": {}}

    return seen, train_arms(job, runs, train_head)


def test_arms_share_all_but_their_own_settings(words, tmp_path):
    words = [*words, "study.seeds=[3,4]", "seed=8"]
    cfg = load("train", words)
    runs = runs_of(cfg, tmp_path, words)
    job = Job(cfg, tmp_path, 0, 1, Ledger())
    assert [run.folder.name for run in runs] == ["no_ttt-seed3", "no_ttt-seed4", "ttt-seed3", "ttt-seed4"]
    assert [run.cfg.head.ttt_steps for run in runs] == [1, 1, 7, 7] and cfg.decode.depth == 8
    assert [run.cfg.seed for run in runs] == [3, 4, 3, 4] and {run.cfg.data.seed for run in runs} == {8}
    first = replace(runs[0].cfg, head=runs[2].cfg.head)
    assert first == runs[2].cfg
    seen, record = pretend(job, runs)
    assert [cfg.head.ttt_steps for cfg in seen] == [7, 7, 1, 1]
    assert list(record["training"]) == ["ttt-seed3", "ttt-seed4", "no_ttt-seed3", "no_ttt-seed4"]
    assert record["seed"] == 8


def test_a_clock_is_dealt_out_and_the_dearest_arm_sets_the_steps(base, tmp_path):
    clock = {"max_steps": None, "trainer_minutes": 10.0, "minutes": 60.0}
    arms = ((1, "given"), (7, "given"), (7, "own"))
    seen, _ = pretend(*study_of(base, tmp_path / "a", arms, **clock))
    assert [(cfg.head.ttt_steps, cfg.objective.tokens) for cfg in seen] == [(7, "own"), (7, "given"), (1, "given")]
    assert seen[0].trainer.minutes == pytest.approx(10 * 16 / 26) and seen[0].minutes is None
    assert [(cfg.trainer.max_steps, cfg.trainer.minutes) for cfg in seen[1:]] == [(9, None)] * 2
    minutes = replace(base.study, equal="minutes")
    seen, _ = pretend(*study_of(base, tmp_path / "b", **clock, study=minutes))
    assert [(cfg.trainer.max_steps, cfg.trainer.minutes) for cfg in seen] == [(None, 5.0)] * 2
    assert not any(cfg.study.arms for cfg in seen)  # each of them is an ordinary run


def test_what_the_plan_says(base):
    assert study_rows(base) == [("study", "2 arms, one after another. no_ttt: head.ttt_steps=1; ttt: head.ttt_steps=7")]
    clock = replace(base, minutes=9.0)
    ((_, line),) = study_rows(clock)
    assert line.startswith("2 arms, one after another, all for the steps of the dearest. no_ttt: head.ttt_steps=1")
    ((_, line),) = study_rows(replace(clock, study=replace(base.study, equal="minutes", seeds=[1, 2])))
    assert line.startswith("2 arms x 2 seeds, one after another, equal minutes, so not equal steps")


def test_arms_that_are_finished_are_kept(base, tmp_path):
    job, runs = study_of(base, tmp_path)
    runs[1].folder.joinpath("provenance.json").write_text(json.dumps({"training": {"steps": 5, "seconds": 1.0}}))
    seen, record = pretend(job, runs)
    assert [cfg.head.ttt_steps for cfg in seen] == [1] and seen[0].trainer.max_steps == 5
    assert record["training"]["7-given"] == {"steps": 5, "seconds": 1.0}


def test_an_ordinary_run_is_no_study(words):
    cfg = load("train", ["experiment=debug", *words[2:]])
    assert runs_of(cfg, Path("nowhere"), words) == [] and study_rows(cfg) == []


def call(monkeypatch, capsys, words):
    """(exit code, the JSON object of the last line, standard error) of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["train", *words])
    code = 0
    try:
        train()
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]) if out.strip() else None, err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("head.ttt_steps=0", "head.ttt_steps must be 1 or more"),
        ("head.ttt_steps=x", "head.ttt_steps"),
        ("data.max_length=9", "arms share everything but head, objective and optim, found another data"),
        ("head=medusa", "eagle1 or eagle3, found medusa"),
        ("head=eagle1", "reads other states than eagle3"),
    ],
)
def test_an_arm_that_cannot_work_is_named(words, base, setting, message):
    study = replace(base.study, arms=base.study.arms | {"ttt": [setting]})
    with pytest.raises(UserError, match=f"^study arm ttt: .*{message}"):
        runs_of(replace(base, study=study), Path("nowhere"), [*words, f'study.arms={{ttt:["{setting}"]}}'])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [1, 1]}, "different numbers"),
        ({"seeds": []}, "different numbers"),
        ({"equal": "tokens"}, "steps or minutes"),
        ({"arms": {"a/b": []}}, "names a folder"),
    ],
)
def test_a_study_that_cannot_work(words, base, changes, message):
    with pytest.raises(UserError, match=message):
        runs_of(replace(base, study=replace(base.study, **changes)), Path("nowhere"), words)


def test_only_greedy_studies(words, base):
    with pytest.raises(UserError, match="leave decode.temperature at 0"):
        runs_of(replace(base, decode=replace(base.decode, temperature=1.0)), Path("nowhere"), words)


def test_a_mistake_ends_at_once_in_one_line(words, monkeypatch, capsys, tmp_path):
    """Before the verifier is loaded, and without a run folder left behind."""
    monkeypatch.setattr("models.verifier.Verifier.load", None)
    extra = [f"output_dir={tmp_path}", 'study.arms={ttt:["head.tt_steps=7"]}']
    code, _, err = call(monkeypatch, capsys, [*words, *extra])
    assert code == 2 and len(err.splitlines()) == 1
    assert err.startswith("error: study arm ttt: train has no setting 'head.tt_steps'; did you mean head.ttt_steps")
    assert not list(tmp_path.glob("*/*"))


def test_a_resumed_study_without_its_arms(words, base, tmp_path):
    cfg = replace(base, resume=str(tmp_path))
    with pytest.raises(UserError, match="study arm no_ttt: expected its settings in .*start the study anew"):
        runs_of(cfg, tmp_path, words)


def logged(folder):
    with (folder / "metrics.csv").open() as stream:
        return list(csv.DictReader(stream))


class StopAt(pl.Callback):
    """What Ctrl-C does, at a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, *_):
        module.stop_wanted = module.stop_wanted or trainer.global_step == self.step


def test_a_study_that_is_interrupted_and_continued(words, monkeypatch, capsys, tmp_path):
    """Ctrl-C in the second arm; then the first is kept, the second goes on, and the study ends as it should."""

    def stopping(module, cfg, callbacks, loggers, checkpoint, folder):
        stop = [StopAt(2)] if folder.name == "no_ttt" else []
        return fit(module, cfg, [*callbacks, *stop], loggers, checkpoint, folder)

    with monkeypatch.context() as patch:
        patch.setattr("train.main.fit", stopping)
        code, _, err = call(patch, capsys, [*words, f"output_dir={tmp_path}"])
    (folder,) = tmp_path.glob("ttt_study/*")
    assert code == 130 and err.splitlines()[-1] == f"interrupted; continue with: python -m train resume={folder}"
    assert (folder / "ttt" / "provenance.json").is_file() and not (folder / "no_ttt" / "head").exists()
    written = (folder / "ttt" / "head" / "head.safetensors").stat().st_mtime_ns

    code, values, err = call(monkeypatch, capsys, [f"resume={folder}", "json=true"])
    assert code == 0, err
    assert (
        "ttt: trained already" in err and (folder / "ttt" / "head" / "head.safetensors").stat().st_mtime_ns == written
    )
    assert [row["step"] for row in logged(folder / "no_ttt")] == ["1", "2", "3", "4"]

    names = {path.name for path in folder.iterdir()} - {".lock"}
    assert names == {
        "config.yaml",
        "provenance.json",
        "ttt",
        "no_ttt",
        "study.json",
        "study.md",
        "study.png",
        "study.html",
    }
    for name in ("ttt", "no_ttt"):
        assert {"config.yaml", "checkpoints", "head", "metrics.csv"} <= {p.name for p in (folder / name).iterdir()}
    assert values["path"] == str(folder / "study.html") and values["run"] == str(folder)
    record = json.loads((folder / "study.json").read_text())
    assert record["explanation"] == EXPLANATION and record["depth"] == 8 and record["prompts"] == 6
    plain, unrolled = record["arms"]["no_ttt"], record["arms"]["ttt"]
    assert plain["steps"] == unrolled["steps"] == [4] and record["equal"] == "steps"
    assert len(plain["training_accuracy"]) == 1 and len(unrolled["training_accuracy"]) == 7
    assert all(len(part["n_alpha"]) == 8 == len(part["teacher_forced"]) for part in (plain, unrolled))
    assert plain["n_alpha_interval"][0] and record["differences"]["ttt - no_ttt"]["n_alpha_interval"][0]
    trained = record["provenance"]["training"]
    assert trained["ttt"]["data_hash"] == trained["no_ttt"]["data_hash"]
    assert trained["ttt"]["ttt_steps"] == 7 and trained["no_ttt"]["ttt_steps"] == 1
    # Both arms saw the same batches from the same start: at the first step their first drafts are alike.
    both = [logged(folder / name)[0]["train/accuracy_0"] for name in ("ttt", "no_ttt")]
    assert both[0] == both[1] and logged(folder / "ttt")[0]["train/accuracy_6"]


def test_a_sweep_of_studies(words, monkeypatch, capsys, tmp_path):
    """The arms are composed from each job's own settings, or they would be found to differ from the job's."""
    sweep = ["-m", *words, f"output_dir={tmp_path}", "trainer.max_steps=1,2", "plan=true"]
    monkeypatch.setattr(sys, "argv", ["train", *sweep])
    train()
    plans = [json.loads(line)["plan"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [re.search(r"(\d) steps =", plan["training"])[1] for plan in plans] == ["1", "2"]
    assert all(plan["study"].startswith("2 arms") for plan in plans)
