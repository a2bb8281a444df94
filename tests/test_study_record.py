"""What a study shows: from its counts to study.json, the tables, the picture and the page."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from eval.counts import Counts
from eval.exposure import Exposure
from eval.study import EXPLANATION, ArmRun, last_accuracy, markdown, study_record, study_tables, write_study
from eval.tables import markdown_table


def loop(accepted: list[int], tested: list[int], calls: int) -> Counts:
    return Counts(calls, 8 * calls, sum(accepted), sum(accepted) + calls, [calls] * 2, tested, accepted)


def arm(name, seed=0, prompts=6, own=(3, 1), accepted=(3, 1), steps=7) -> ArmRun:
    """The same counts for every prompt: 10 drafts of which `own` hit, and as many with true features as at depth 0."""
    rows = lambda *values: np.array([[*values, 0]] * prompts)  # noqa: E731
    exposure = Exposure(
        counted=rows(20, 18), forced=rows(8, 9), given=rows(8, 4), tested=rows(10, own[0]),
        own=rows(*own), true=rows(own[0], 2),
    )  # fmt: skip
    counts = [loop(list(accepted), [5, accepted[0]], 5) for _ in range(prompts)]
    return ArmRun(name, seed, counts, exposure, {"steps": steps, "seconds": 1.5}, [0.5, 0.25])


ARMS = {"plain": ["head.ttt_steps=1"], "unrolled": ["head.ttt_steps=7"]}
MADE_FROM = {"seed": 0, "versions": {"torch": "2.13"}}


def test_what_the_record_holds():
    runs = [arm("plain"), arm("unrolled", own=(4, 2), accepted=(4, 3), steps=8)]
    values = study_record(ARMS, runs, 3, MADE_FROM)
    plain, unrolled = values["arms"]["plain"], values["arms"]["unrolled"]
    assert plain["n_alpha"] == [0.6, 1 / 3, None] and unrolled["n_alpha"] == [0.8, 0.75, None]
    assert plain["own_accuracy"][:2] == [0.3, 1 / 3] and plain["true_accuracy"][:2] == [0.3, 2 / 3]
    assert plain["gap"][:2] == [0, pytest.approx(1 / 3)] and plain["tested"][:2] == [60, 18]
    assert plain["teacher_forced"][:2] == [0.4, 0.5] and plain["own_given_tokens"][:2] == [0.4, pytest.approx(2 / 9)]
    assert plain["tau"] == 1.8 and plain["training_accuracy"] == [0.5, 0.25] and plain["loop_tested"] == [30, 18, 0]
    assert plain["n_alpha_interval"] == [[0.6, 0.6], [pytest.approx(1 / 3)] * 2, None]  # every prompt says the same
    assert list(values["differences"]) == ["unrolled - plain"]
    difference = values["differences"]["unrolled - plain"]
    assert difference["n_alpha"] == [pytest.approx(0.2), pytest.approx(0.75 - 1 / 3), None]
    assert difference["tau"] == pytest.approx(0.6) and difference["tau_interval"] == [pytest.approx(0.6)] * 2
    assert difference["gap"][1] == pytest.approx(2 / 4 - 2 / 4 - 1 / 3)
    assert (values["equal"], plain["steps"], unrolled["steps"]) == ("minutes", [7], [8])
    json.dumps(values, allow_nan=False)


def test_seeds_are_pooled_and_shown():
    runs = [arm("plain"), arm("plain", seed=1, accepted=(1, 1)), arm("unrolled"), arm("unrolled", seed=1)]
    plain = study_record(ARMS, runs, 3, MADE_FROM)["arms"]["plain"]
    assert plain["seeds"] == [0, 1] and plain["n_alpha"] == [0.4, 0.5, None]
    assert plain["n_alpha_by_seed"] == [[0.6, 1 / 3, None], [0.2, 1.0, None]] and plain["tested"] == [120, 36, 0]


def test_a_few_prompts_have_no_interval():
    values = study_record(ARMS, [arm("plain", prompts=4), arm("unrolled", prompts=4)], 3, MADE_FROM)
    for part in (*values["arms"].values(), *values["differences"].values()):
        assert part["n_alpha_interval"] == [None] * 3 and part["tau_interval"] is None
        assert part["n_alpha"][0] is not None


def test_paired_differences_are_surer_than_each_arm():
    """Prompts differ a lot, the arms differ alike on each."""
    runs = []
    for name, more in (("plain", 0), ("unrolled", 1)):
        counts = [loop([hits + more, 0], [20, hits + more], 20) for hits in (1, 4, 7, 10, 13, 16, 18)]
        runs.append(replace(arm(name, prompts=7), loop=counts))
    values = study_record(ARMS, runs, 3, MADE_FROM)
    width = lambda part: np.ptp(part["n_alpha_interval"][0])  # noqa: E731
    assert width(values["arms"]["plain"]) > 0.3
    low, high = values["differences"]["unrolled - plain"]["n_alpha_interval"][0]
    assert low == pytest.approx(0.05) and high == pytest.approx(0.05)


def test_the_explanation_is_two_sentences_and_names_its_link():
    assert len(re.findall(r"[a-z0-9)]\.(?: [A-Z]|$)", EXPLANATION)) == 2
    for words in ("exposure bias", "Training-time test", "scheduled sampling (Bengio et al. 2015)"):
        assert words in EXPLANATION


def test_tables_page_and_markdown_say_the_same(tmp_path):
    values = study_record(ARMS, [arm("plain"), arm("unrolled", accepted=(4, 3))], 3, MADE_FROM)
    page = write_study(values, tmp_path)
    assert page == tmp_path / "study.html" and (tmp_path / "study.png").stat().st_size > 10000
    text, lines = page.read_text(), (tmp_path / "study.md").read_text()
    assert json.loads((tmp_path / "study.json").read_text()) == values and lines == markdown(values)
    assert "http://" not in text and "https://" not in text and "<script" not in text and "<link" not in text
    assert text.count("data:image/png;base64,") == 1 and "None" not in text
    for title, head, rows in study_tables(values):
        assert rows and all(len(row) == len(head) for row in rows)
        assert f"**{title}**" in lines and title in text
    for part in (EXPLANATION.replace("'", "&#x27;"), "unrolled - plain", "0.200 (0.20 to 0.20)", "versions.torch"):
        assert part in text
    assert (
        EXPLANATION in lines and "| 0 | 0.600 (0.60 to 0.60) | 0.800 (0.80 to 0.80) | 0.200 (0.20 to 0.20) |" in lines
    )


def test_a_bar_in_a_cell_stays_a_cell():
    assert markdown_table(("a", "b"), [("x|y", "1")]) == "| a | b |\n| --- | --- |\n| x\\|y | 1 |"


def test_a_picture_without_intervals_and_no_page(tmp_path):
    values = study_record(ARMS, [arm("plain", prompts=1), arm("unrolled", prompts=1)], 3, MADE_FROM)
    assert write_study(values, tmp_path, page=False) == tmp_path / "study.json"
    assert (tmp_path / "study.png").is_file() and not (tmp_path / "study.html").exists()
    (tmp_path / "bare").mkdir()
    write_study(values, tmp_path / "bare", plots=False, page=False)
    assert {path.name for path in (tmp_path / "bare").iterdir()} == {"study.json", "study.md"}


def test_training_accuracy_is_that_of_the_last_tenth(tmp_path):
    file = tmp_path / "metrics.csv"
    rows = [f"{i},{i / 100},{i / 200}" for i in range(1, 41)]
    file.write_text("\n".join(["step,train/accuracy_0,train/accuracy_1", *rows]) + "\n")
    assert last_accuracy(file) == pytest.approx([0.385, 0.1925])
    file.write_text("step,train/accuracy_0\n1,0.5\n")
    assert last_accuracy(file) == [0.5]
    assert last_accuracy(tmp_path / "absent.csv") == []
