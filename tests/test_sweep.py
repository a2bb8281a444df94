"""`python -m eval.sweep`: its points, its long prompts, and a sweep that is stopped and goes on."""

import json
from types import SimpleNamespace

import pytest

import eval.sweep.command as sweeping
from conf.cli import load
from eval.command import evaluate_run
from eval.counts import Counts
from eval.speculative.acceptance import Accepted
from eval.speculative.loop import Decoded, round_of
from eval.sweep.context import ANSWER, Conversations
from eval.sweep.points import Point, Rates, duration, obstacle, points_of, texts_at
from eval.sweep.row import counts_by_prompt, live, speedup_interval
from eval.sweep.show import along, remarks
from tiny import tiny_verifier
from tiny_run import save_run


def points(*words):
    return points_of(load("sweep", ["run=x", *words]))


def test_one_axis_at_a_time_around_the_middle():
    found = points("temperatures=[0,1]", "batches=[4,1]", "contexts=[]", "depths=[2,5]")
    assert found == [Point(0, 1, 0, 5), Point(1, 1, 0, 5), Point(0, 4, 0, 5), Point(0, 1, 0, 2)]
    found = points("temperatures=[0,1]", "batches=[]", "contexts=[512]", "depths=[]", "temperature=0.5",
                   "decode.depth=3", "decode.batch=2", "context=64")  # fmt: skip
    assert found == [Point(0.5, 2, 64, 3), Point(0, 2, 64, 3), Point(1, 2, 64, 3), Point(0.5, 2, 512, 3)]
    assert len(points()) == 1 + 5 + 6 + 4 + 5  # the default: the middle, and the rest of each axis


def test_a_grid_is_every_combination():
    found = points("grid=true", "temperatures=[0,1]", "batches=[1,4]", "contexts=[0]", "depths=[1,2,3]")
    assert len(found) == 12 == len(set(found)) and Point(1, 4, 0, 2) in found


@pytest.mark.parametrize(
    "words, hint",
    [
        (["batches=[0]"], "expected batches of 1 or more, found 0"),
        (["depths=[0,1]"], "expected depths of 1 or more, found 0"),
        (["temperatures=[-1]"], "expected temperatures of 0 or more"),
        (["decode=tree", "decode.shape=[2,2]"], "no N to sweep"),
    ],
)
def test_mistakes_are_one_line(words, hint, command):
    code, _, err = command("sweep", sweeping.run, "run=/x", *words)
    assert code == 2 and hint in err and len(err.splitlines()) == 1


def test_full_batches_that_take_turns():
    assert texts_at(Point(0, 1, 0, 5), 6, 2) == 12 and texts_at(Point(0, 1, 0, 5), 3, 1) == 4
    assert texts_at(Point(0, 8, 0, 5), 6, 2) == 16 and texts_at(Point(0, 64, 0, 5), 6, 2) == 128


def test_what_cannot_be_measured():
    point = Point(0, 4, 0, 5)
    assert obstacle(point, 5, 100, 512, 400) is None
    assert obstacle(point, 3, 100, 512, 400) == "it drafts 3 at most"
    assert obstacle(point, 5, 513, 512, 9999) == "513 positions of 512"
    assert obstacle(point, 5, 101, 512, 400).startswith("404 cache slots; 400 fit")


def test_the_estimate():
    rates = Rates(prefill=0.01, drafted=0.2, plain=0.3)
    assert rates.seconds(Point(0, 1, 0, 5), 4, 100, 10) == pytest.approx(4 * (2 * 100 * 0.01 + 10 * 0.5))
    assert rates.seconds(Point(0, 4, 0, 5), 4, 0, 10) < rates.seconds(Point(0, 1, 0, 5), 4, 0, 10)
    assert (duration(30), duration(600)) == ("30 s", "10 minutes")


# --- counts and speeds of a point -----------------------------------------------------------------------------


def text(accepted, tokens, seconds):
    """One call with so many of two drafts accepted."""
    call = round_of([(-1, 1), (0, 2)], Accepted(tuple(range(accepted)), 9), [*range(1, accepted + 1), 9])
    return Decoded([0] * tokens, "length", 0.1, seconds, rounds=[call])


def pair(name, accepted):
    counts = Counts()
    (call,) = (one := text(accepted, 11, 2.0)).rounds
    counts.add(call)
    return SimpleNamespace(prompt=SimpleNamespace(id=name), speculative=one, counts=counts)


def test_a_repeated_greedy_text_counts_once():
    runs = [pair("a", 2), pair("b", 0), pair("a", 2), pair("b", 0)]
    once, each = counts_by_prompt(runs, once=True), counts_by_prompt(runs, once=False)
    assert [c.verify_calls for c in once.values()] == [1, 1] and once["a"].accepted == 2
    assert [c.verify_calls for c in each.values()] == [2, 2] and each["a"].accepted == 4
    assert runs[0].counts.verify_calls == 1  # the runs' own counts stay


def test_the_speedup_of_equal_turns_is_sure():
    assert speedup_interval([(10, 1.0, 10, 2.0)] * 3) is None
    assert speedup_interval([(10, 1.0, 10, 2.0)] * 5) == pytest.approx([2.0, 2.0])
    low, high = speedup_interval([(10, 1.0, 10, 2.0), (10, 2.0, 10, 1.0)] * 3)
    assert 0.5 <= low < 1 < high <= 2


def test_sequences_that_have_left():
    runs = [pair("a", 1), pair("b", 1)]
    runs[0].speculative.rounds *= 3
    assert live(runs, 2) == 4 / 3 and live(runs, 1) == 1


def row(**changes):
    return {
        "temperature": 0,
        "batch": 1,
        "context": 0,
        "depth": 5,
        "speedup": 1.5,
        "speedup_interval": [1.1, 1.9],
        "differences": 0,
    } | changes


def test_what_pays_along_an_axis():
    points = [row(batch=4, speedup=0.8), row(), row(batch=2, speedup=1.2), row(depth=3, speedup_interval=None)]
    axes = ["temperature", "batch", "context", "depth"]
    values = {"axes": axes, "left_out": [], "middle": row(), "points": points}
    assert [one["batch"] for one in along(values, "batch")] == [1, 2, 4]
    assert remarks(values) == [
        "sequences at once: faster than without drafts: 1, 2; best 1 (1.50)",
        "drafts per verify call N: faster than without drafts: 3 ?, 5; best 3 (1.50)",
    ]


# --- long prompts ---------------------------------------------------------------------------------------------


def test_earlier_turns_fill_a_prompt(tmp_path):
    verifier = tiny_verifier(layers=7, hidden=32)
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Question {i}: why?"}) + "\n" for i in range(12)))
    asked = [{"id": str(i), "category": "c", "messages": [{"role": "user", "content": f"Question {i}: why?"}]}
             for i in (0, 1)]  # fmt: skip
    talks = Conversations(verifier, asked, str(file), 300)
    assert talks.turns and all(turn.question["content"] != "Question 0: why?" for turn in talks.turns)
    short, long = talks.prompts(0), talks.prompts(300)
    for own, filled in zip(short, long, strict=True):
        assert 300 - ANSWER - 40 < len(filled.input_ids) <= 300
        read = verifier.tokenizer.decode(list(filled.input_ids))
        assert read.count("<|im_start|>user") > 1
        question = verifier.tokenizer.decode(list(own.input_ids)).split("<|im_start|>user")[1]
        assert read.endswith("<|im_start|>user" + question)
    assert long[0].input_ids[:60] != long[1].input_ids[:60]  # each begins elsewhere
    with pytest.raises(ValueError, match="expected earlier turns for a context of 9000"):
        talks.prompts(9000)


# --- the command ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"))


def words_of(run, out):
    return [f"run={run}", f"prompts={run}/prompts.jsonl", "decode.max_new_tokens=6", "decode.depth=2", "repeats=1",
            f"out={out}", "contexts=[0,4000]", "temperatures=[1]", "batches=[2]", "depths=[]"]  # fmt: skip


def test_a_stopped_sweep_goes_on(run, tmp_path, command, monkeypatch):
    real, measured = sweeping.run_prompts, []

    def stopping(*arguments, **options):
        measured.append(arguments[3])
        if len(measured) == 3:  # the estimate, the middle, and then
            raise KeyboardInterrupt
        return real(*arguments, **options)

    words = words_of(run, tmp_path)
    monkeypatch.setattr(sweeping, "run_prompts", stopping)
    assert command("sweep", sweeping.run, *words)[0] == 130
    before = json.loads((tmp_path / "sweep.json").read_text())
    assert [row["temperature"] for row in before["points"]] == [0] and before["missing"] == 2
    code, out, err = command("sweep", sweeping.run, *words, "json=true")
    assert code == 0, err
    after = json.loads(out.splitlines()[-1])
    assert after["points"][0] == before["points"][0] and after["missing"] == 0
    assert [(row["temperature"], row["batch"]) for row in after["points"]] == [(0, 1), (1, 1), (0, 2)]
    assert [one["reason"].split()[1] for one in after["left_out"]] == ["positions"]
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.json", "sweep-temperature.png", "sweep-batch.png"}
    assert all(row["differences"] == 0 for row in after["points"] if row["temperature"] == 0)
    monkeypatch.setattr(sweeping, "run_prompts", None)  # nothing is left to do
    assert command("sweep", sweeping.run, *words, "plots=false")[0] == 0
    code, _, err = command("sweep", sweeping.run, *words, "seed=1")
    assert code == 2 and "other settings" in err and len(err.splitlines()) == 1


def test_a_point_is_what_eval_measures(run, tmp_path, command):
    words = [*words_of(run, tmp_path / "s"), "temperature=1", "temperatures=[]", "batches=[]", "contexts=[]"]
    assert command("sweep", sweeping.run, *words, "plots=false")[0] == 0
    (point,) = json.loads((tmp_path / "s" / "sweep.json").read_text())["points"]
    assert command("eval", evaluate_run, *words[:4], "temperature=1", "report=false", "plots=false",
                   f"out={tmp_path}/e")[0] == 0  # fmt: skip
    alpha = json.loads((tmp_path / "e" / "alpha.json").read_text())
    for name in ("tau", "verify_calls", "accepted_by_depth", "tested_by_depth", "drafted", "emitted"):
        assert point[name] == alpha[name], name


def test_the_folder_follows_from_the_settings(run, command):
    words = [word for word in words_of(run, "x") if not word.startswith("out=")]
    words += ["temperatures=[]", "batches=[]", "contexts=[]", "plots=false"]
    for _ in range(2):
        assert command("sweep", sweeping.run, *words)[0] == 0
    assert command("sweep", sweeping.run, *words, "decode.max_new_tokens=7")[0] == 0
    assert len(list(run.glob("sweep-*"))) == 2
