"""What servers' pages say, how their counters are read, and the verdict on them: without a server."""

import pytest

from conf.errors import UserError
from eval.serving import client
from eval.serving.metrics import Tally, depth_of, difference, pooled, read, tally_of
from eval.serving.online import traffic
from eval.serving.verdict import Evidence, Template, TextDifference, judge, likely_causes, remarks
from eval.speculative.loop import Decoded, Round

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {0}
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 10.0
vllm:spec_decode_num_drafts_total{{engine="0",model_name="other"}} 1000.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.79e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {1}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {2}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {3}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {4}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {5}
# TYPE vllm:request_success_total counter
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {6}
vllm:request_success_total{{engine="0",finished_reason="length",model_name="m"}} 1.0
"""
SGLANG = """# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{{model_name="m",tp_rank="0"}} {0}
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{is_streaming="false",model_name="m"}} {1}
sglang:generation_tokens_total{{is_streaming="true",model_name="m"}} 7.0
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{{is_streaming="false",model_name="m"}} {2}
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{model_name="m",tp_rank="0"}} 2.25
# TYPE sglang:spec_num_steps gauge
sglang:spec_num_steps{{model_name="m",tp_rank="0"}} 4.0
"""
LLAMA = """# HELP llamacpp:spec_decode_num_drafts_total Speculative: Total speculative decoding verification steps
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total {0}
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total {1}
# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter
llamacpp:spec_decode_num_accepted_tokens_total {2}
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 99
"""
LLAMA_PLACES = (
    LLAMA
    + """# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 4
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} 1
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="2"}} 0
"""
)


def test_the_text_of_vllm():
    before, after = read(VLLM.format(5, 10, 2, 2, 0, 40, 3), "m"), read(VLLM.format(15, 30, 12, 8, 4, 64, 5), "m")
    assert before.drafts == 15  # engines together, another model's apart
    tally, generated = difference(before, after)
    assert tally == Tally(10, 20, 10, (6, 4)) and generated == 24 and after.requests - before.requests == 2
    assert (tally.tau, tally.rates, tally.alpha) == (2.0, [0.6, 0.4], 10 / 16) and depth_of(after) == 2
    assert read(VLLM.format(0, 0, 0, 0, 0, 0, 0), "m").speculates is True
    assert read("# TYPE vllm:up gauge\nvllm:up 1\n").speculates is False
    with pytest.raises(UserError, match="drafts by 10"):
        difference(after, before)


def test_the_text_of_sglang():
    """3 requests and 30 tokens in 12 calls: 3 of the prefill, 12 of the calls, 15 accepted."""
    before, after = read(SGLANG.format(2, 4, 1)), read(SGLANG.format(14, 34, 4))
    tally, generated = difference(before, after)
    assert (tally.drafts, tally.accepted, tally.by_position, generated) == (12, 15, None, 30)
    assert tally.tau == 2.25 and tally.alpha is None and depth_of(after) == 4
    gauge = "# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length 1.75\n"
    assert difference(read(gauge), read(gauge))[0].tau == 1.75  # older ones have nothing else


def test_the_text_of_llama_cpp():
    """Positions are there after the first draft only, and drafts may be shorter than K."""
    before, after = read(LLAMA.format(0, 0, 0)), read(LLAMA_PLACES.format(6, 16, 5))
    assert before.speculates is None and after.speculates is True
    tally, _ = difference(before, after)
    assert tally == Tally(6, 16, 5, (4, 1, 0)) and tally.alpha is None and depth_of(after) == 3
    assert depth_of(read(LLAMA.format(6, 16, 5))) == 3  # 16 / 6, rounded up


@pytest.mark.parametrize("text", ["<html></html>", "", "# TYPE node_load1 gauge\nnode_load1 2\n"])
def test_other_pages_are_refused(text):
    with pytest.raises(UserError, match="metrics"):
        read(text)


POSITION = '_per_pos_total{position="%s"} 1'


@pytest.mark.parametrize("line", ["_total NaN", "_total +Inf", "_total -1", POSITION % "x", POSITION % "9999999"])
def test_counters_that_count_nothing_are_refused(line):
    name = "vllm:spec_decode_num_accepted_tokens"
    with pytest.raises(UserError, match=f"expected .*{name}.*, found"):
        read(f"# TYPE {name} counter\n{name}{line}\n" if "per_pos" not in line else f"{name}{line}\n")


def one_text(accepted: list[int], kept: int, depth: int = 3) -> Decoded:
    """A text of whole rounds that accepted so many, cut to `kept` tokens."""
    rounds = [Round((7,) * depth, depth, n, (7,) * (n + 1), min(n + 1, depth)) for n in accepted]
    return Decoded([7] * kept, "length", 0.0, 0.0, rounds)


def test_rounds_are_counted_by_each_engines_rule():
    """Five tokens asked for. Prefill 1, then calls of 2 + 1 and 3 + 1 tokens: 8, of which 5 are handed out.

    vLLM counts both calls whole, OpenVINO's worker what is handed out. llama.cpp may draft 5 - 1 - 1 = 3 in the first
    and 5 - 4 - 1 = 0 in the second, which is then no draft. SGLang hands out 4 tokens in 2 calls.
    """
    text = one_text([2, 3], kept=5)
    assert tally_of(text, "whole", 3, 5) == Tally(2, 6, 5, (2, 2, 1))
    assert tally_of(text, "room", 3, 5) == Tally(1, 3, 2, (1, 1, 0))
    assert tally_of(text, "handed", 3, 5) == Tally(2, accepted=2)
    assert tally_of(text, "room", 3, 6) == Tally(2, 4, 3, (2, 1, 0))  # one more token: one draft in the second call
    stopped = one_text([3], kept=2)  # an end-of-turn token inside the first call
    assert tally_of(stopped, "whole", 3, 64) == Tally(1, 3, 3, (1, 1, 1))
    assert tally_of(stopped, "room", 3, 64) == Tally(1, 3, 0, (0, 0, 0))  # sampling ended at that token
    assert tally_of(one_text([3], kept=4), "room", 3, 64) == Tally(1, 3, 3, (1, 1, 1))  # unless it is the last draft
    assert tally_of(text, "cut", 3, 5) == Tally(2, 6, 2, (1, 1, 0))
    assert tally_of(stopped, "cut", 3, 64) == Tally(1, 3, 0, (0, 0, 0))
    assert tally_of(stopped, "handed", 3, 64) == Tally(1, accepted=0)
    assert pooled([Tally(2, 6, 5, (2, 2, 1)), Tally(1, 3, 0, (0, 0, 0))]) == Tally(3, 9, 5, (2, 2, 1))
    assert tally_of(one_text([], kept=1), "whole", 3, 5) == Tally(0, 0, 0, (0, 0, 0))


def texts_of(*tokens: int) -> list[client.Completion]:
    return [client.Completion("", None, count, "length") for count in tokens]


@pytest.mark.parametrize(
    "tally, generated, options, said",
    [
        (Tally(8, 24, 4, (3, 1, 0)), 14, {}, ""),
        (Tally(8, 24, 10, (5, 3, 2)), 14, {}, ""),  # 18 of 12: each last call may reach 3 past its end
        (Tally(8, 24, 11, (5, 3, 3)), 14, {}, "make 19, these answers 12"),
        (Tally(8, 24, 4, (3, 1, 0)), 20, {}, "the server counts 20 tokens, these answers have 14"),
        (Tally(4, 12, 2, (1, 1, 0)), 7, {}, "another replica"),
        (Tally(8, 24, 4, (3, 1, 0)), 14, {"quiet": False}, "kept moving"),
        (Tally(8, 24, 4, (3, 1, 0)), 14, {"retried": 2}, "2 requests were sent more than once"),
    ],
)
def test_counters_of_others(tally, generated, options, said):
    found = traffic(tally, generated, texts_of(7, 7), 3, **{"quiet": True, "retried": 0} | options)
    assert (said in found) if said else found == ""


def evidence(server, ours=(300, 200, 150), drafts=1000, **more) -> Evidence:
    """Of 20 prompts with equal shares of our counts."""
    mine = Tally(drafts, 3 * drafts, sum(ours), tuple(ours))
    each = [Tally(drafts // 20, accepted=sum(ours) // 20 + 10 * (n % 3 - 1)) for n in range(20)]
    theirs = Tally(drafts, more.pop("drafted", 3 * drafts), sum(server), tuple(server))
    return Evidence(theirs, mine, each, "float32", **more)


FAR = TextDifference("p1", 12, "a", "b", 4.0)
CLOSE_CALL = TextDifference("p1", 12, "a", "b", 0.05)
TIED = TextDifference("p1", 12, "a", "b", 1e-5)


@pytest.mark.parametrize(
    "server, more, same, by",
    [
        ((300, 200, 150), {}, True, "1 %"),
        ((295, 196, 146), {}, True, "1 %"),
        ((300, 200, 130), {}, False, "difference"),  # tau within 1.3 %, the last depth 0.02 lower
        ((330, 170, 150), {}, False, "difference"),  # the same tau by other positions
        ((290, 190, 140), {"drafts": 400, "ours": (300, 200, 150)}, False, "difference"),  # few, but the same texts
        ((290, 190, 134), {"drafts": 900, "texts": [TIED]}, True, "95 % interval"),
        ((150, 100, 75), {"drafts": 900, "texts": [TIED]}, False, "difference"),
    ],
)
def test_verdicts(server, more, same, by):
    verdict = judge(evidence(server, **more))
    assert (verdict.same, verdict.by) == (same, by), verdict.line


@pytest.mark.parametrize(
    "server, more, beginning",
    [
        ((10, 0, 0), {}, "captured layers one off, or the vocabulary map"),
        ((300, 60, 10), {}, "positions of later drafts"),
        ((270, 175, 128), {}, "dtype of verifier or head"),
        ((120, 80, 60), {}, "the head's inputs"),
        ((420, 300, 220), {}, "another head or other prompts"),
        ((100, 60, 40), {"traffic": "so"}, "the counters are not those of these requests alone: so"),
        ((100, 60, 40), {"texts": [FAR]}, "other verifier weights"),
        ((100, 60, 40), {"texts": [CLOSE_CALL]}, "dtype: 1 of 20 texts"),
        ((100, 60, 40), {"texts": [FAR], "wavers": True}, "temperature"),
        ((280, 90, 20), {"drafted": 2000}, "K: the server drafts 2.00 tokens"),
        ((280, 90, 20), {"trees": True}, "the server drafts trees"),
        ((10, 0, 0), {"faults": ["the captured layers are one too late"]}, "the captured layers are one too late"),
    ],
)
def test_the_likeliest_cause_comes_first(server, more, beginning):
    found = evidence(server, template=Template(False, "other ids"), **more)
    causes = likely_causes(found)
    assert causes[0].startswith(beginning), causes
    assert "other ids" in causes[-1] and "other ids" in remarks(found)[-1]


def test_nothing_is_made_up_where_nothing_shows():
    assert likely_causes(evidence((300, 200, 150))) == [
        "none that the counts show; python -m eval.serving.check runs the engine itself and compares each draft"
    ]
    assert judge(Evidence(Tally(0), Tally(0), [], "float32")).by == "none"
