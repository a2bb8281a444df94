"""docs/tuner.md and docs/skill-eagle3-tuner.md: their commands run, their figures are those of the code."""

import re
import shlex
from pathlib import Path

import pytest
from counter_page import serving, vllm_page
from test_theory_page import SHORT, measured, rewritten  # noqa: F401 - a fixture
from test_tuner_sweep import row, sweep_of

from conf.explain import options
from eval.command import evaluate_run
from eval.sweep.command import run as sweeping
from eval.theory.command import run as theory
from eval.tuner import families, gates, rules
from eval.tuner.choices import LEVELS, NODES, WORTH
from eval.tuner.command import run
from eval.tuner.costs import LAUNCH, LEAST, MULTIPLIED, READ
from eval.tuner.engines import ENGINES
from eval.tuner.published import CHAIN_SHARE, CHAINS, SPREAD, TRAINED, WIDER, WIDER_HIGH, published

ONE_POINT = ["limit=1", "decode.max_new_tokens=4", "decode.depth=2", "repeats=1", "plots=false", "temperatures=[]",
             "batches=[]", "contexts=[]", "depths=[]"]  # fmt: skip
DOCS = Path(__file__).parent.parent / "docs"
PAGE, SKILL = ((DOCS / name).read_text() for name in ("tuner.md", "skill-eagle3-tuner.md"))
FOUND = [match for text in (PAGE, SKILL) for match in re.findall(r"(?:^    |`)(python -m [^#`\n]+)", text, re.M)]
COMMANDS = sorted({" ".join(line.split()) for line in FOUND})


def test_the_pages_have_commands_of_each_kind():
    assert {line.split()[2] for line in COMMANDS} == {"eval", "eval.sweep", "eval.theory", "eval.tuner"} and len(
        COMMANDS
    ) >= 9


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(line, measured, tmp_path, command):  # noqa: F811
    _, _, module, *words = shlex.split(line)
    tree = rewritten(tmp_path / "tree", measured, decode="tree", nodes=9)
    sweep = sweep_of(measured, row())
    for name, calls in (("BEFORE", 100), ("AFTER", 10_100)):
        (tmp_path / name).write_text(vllm_page(calls, [calls * 7 // 10, calls // 2, calls // 3]))
    with serving((tmp_path / "AFTER").read_text()) as address:
        put = {r"\bDIR\b": measured, r"\bTREE\b": tree, r"\bSWEEP\b": sweep, "http://HOST:PORT": address,
               r"\bNAME\b": "chat_8b_h100", r"\bBEFORE\b": tmp_path / "BEFORE",
               r"\bAFTER\b": tmp_path / "AFTER"}  # fmt: skip
        for name, value in put.items():
            words = [re.sub(name, str(value), word) for word in words]
        if module == "eval":
            words += [f"prompts={measured}/prompts.jsonl", *SHORT]
        if module == "eval.sweep":
            words += [f"prompts={measured}/prompts.jsonl", *ONE_POINT]
        words += [] if module == "eval.theory" else [f"out={tmp_path}/out"]
        function = {"eval": evaluate_run, "eval.sweep": sweeping, "eval.theory": theory, "eval.tuner": run}[module]
        code, out, err = command(module.removeprefix("eval.") if module != "eval" else "eval", function, *words)
    assert code == 0 and out, err
    if module == "eval.tuner":
        assert (tmp_path / "out" / "tuner.md").is_file() and (tmp_path / "out" / "tuner.json").is_file()


def short(number):
    return f"{number:.2f}".removeprefix("0")


def percent(share):
    return f"{share:.0%}".replace("%", " %")


def test_figures_are_those_of_the_code():
    for family, name in (("eagle3", "EAGLE-3"), ("eagle1", "EAGLE-1")):
        point, low, high, _ = map(lambda x: short(x) if isinstance(x, float) else x, CHAINS[family])
        assert f"{name} {point} ({low} to {high})" in PAGE and f"{name} {point}" in SKILL
    for family, name in (("independent", "independent"), ("medusa", "Medusa"), ("prompt_lookup", "prompt lookup")):
        assert f"{name} {short(published(family, {'chat': 1}).point[0])}" in SKILL
    for amount, (alpha, _) in TRAINED.items():
        assert f"{amount:,} dialogues {short(alpha)}" in PAGE or f"{amount:,} {short(alpha)}" in PAGE
    assert f"±{percent(SPREAD)}" in PAGE and f"a chain gets {short(CHAIN_SHARE)}" in PAGE
    assert f"{percent(READ)} of the bandwidth" in PAGE and f"{percent(MULTIPLIED)} of the peak" in PAGE
    assert f"{LAUNCH * 1000:.1f} ms" in PAGE and f"{percent(LEAST)} at the least" in PAGE
    assert f"w^−{short(WIDER)}" in PAGE and f"high: {short(WIDER_HIGH)}" in PAGE and f"(M/L)^−{WIDER:g}" in SKILL
    assert f"levels {LEVELS[0]} to {LEVELS[-1]}, {NODES[0]} to {NODES[-1]} nodes" in PAGE
    assert f"{percent(WORTH - 1)} more than the chain" in PAGE and f"the chain by {percent(WORTH - 1)}" in SKILL
    assert rules.CREATIVE == 0.5 and f"temperature of {rules.HOT}" in PAGE and f"T ≥ {rules.HOT}" in SKILL
    assert f"for {gates.BATCHES[0]} to {gates.BATCHES[-1]} sequences" in PAGE


def test_the_rules_are_those_of_the_code():
    source = Path(rules.__file__).read_text()
    assert set(re.findall(r'Refusal\(\s+"(\w+)"', source)) == set(re.findall(r"`(\w+)`", "".join(
        line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)))) - {"eval"}  # fmt: skip
    assert len(options("workload")) == 9 and "has nine" in PAGE


def test_the_table_of_engines_is_the_codes():
    columns = ("eagle3", "eagle1", "medusa", "independent", "prompt_lookup")
    names = {"vLLM 0.32": "vllm", "SGLang": "sglang", "llama.cpp 11434": "llamacpp", "OpenVINO 2026.4": "openvino",
             "TensorRT-LLM": "tensorrt_llm"}  # fmt: skip
    rows = {cells[0]: cells[1:] for cells in (
        [cell.strip() for cell in line.strip("|").split("|")] for line in SKILL.splitlines() if line.startswith("| ")
    ) if cells[0] in names}  # fmt: skip
    assert set(rows) == set(names)
    for name, cells in rows.items():
        engine = ENGINES[names[name]]
        assert [cell != "-" for cell in cells[:5]] == [family in engine.families for family in columns], name
        assert (cells[5] != "no") == any(support.tree for support in engine.families.values()), name
        assert (cells[6] == "not verified") == (engine.rollback is None), name


def test_the_skill_is_one_page():
    assert len(SKILL.splitlines()) <= 80 and SKILL.startswith("---\nname: eagle3-tuner\ndescription: ")
    assert families.ALONE == ("prompt_lookup", "lookahead")
