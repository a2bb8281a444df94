"""Parts of the training bench: the naive step, the work that is counted, processes, and the peer if it is installed."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from bench_stand_in import InProcess
from conf.errors import UserError
from eval.training_bench import check, run
from eval.training_bench.naive import naive_losses, naive_pairs, naive_unroll
from eval.training_bench.profile import kind_of
from eval.training_bench.rival import OURS, Process, Rival, peer
from eval.training_bench.setting import Setting, read_setting, write_setting
from eval.training_bench.work import Product, attention_flops, pairs_of, products, rates
from eval.training_bench.worker import Ours
from models.heads.eagle3 import Eagle3Config
from models.states import label_rows
from models.supervision import supervised
from tiny import tiny_verifier
from toy_head import make_head, make_states

SETTING = Setting(64, 0.5, 3, 40, documents=2)
PACKED = [["ppABCuuDEFGu", "pABCDE", "ABC", "ppppAB"]]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("eval.training_bench.work.SQUARE", 64)


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier(layers=7, hidden=32, vocab=64)


@pytest.fixture
def file(tmp_path, verifier):
    def write(setting):
        write_setting(tmp_path / "s.safetensors", setting, verifier.head_geometry, verifier.aux_layers)
        return tmp_path / "s.safetensors"

    return write


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle3", "norms"])
def test_naive_rows_are_the_anchors_of_the_unroll_wherever_they_count(switches):
    head, states = make_head(**switches), make_states(PACKED)
    counted_KP, rows = supervised(states, 4), states.last_index_P - 1
    for k, (dense, ours) in enumerate(zip(naive_unroll(head, states, 4), head.unroll(states, 4), strict=True)):
        counted = counted_KP[k]
        torch.testing.assert_close(ours[counted], dense[rows[counted]], rtol=1e-10, atol=1e-12)
    naive = {(k, t) for k, t in naive_pairs(states, 4).nonzero().tolist()}
    assert naive == {(k, int(rows[p])) for k, p in counted_KP.nonzero().tolist()} and len(naive) > 10


def test_naive_pairs_of_one_answer_are_exact():
    states = make_states([["pppABCuu"]])
    assert {(t, k) for k, t in naive_pairs(states, 7).nonzero().tolist()} == {(2, 0), (2, 1), (3, 0)}


def test_naive_leaves_out_rows_whose_best_token_is_no_draft():
    head, states = make_head(), make_states([["ppABCD"]])
    target = torch.softmax(torch.randn(6, 13, dtype=torch.float64), -1)
    inside = torch.ones(6, dtype=torch.bool)
    (whole, three), *_ = naive_losses(head, states, (target, inside), 2)
    inside[3] = False  # the label row of anchor 2
    (part, two), (_, one) = naive_losses(head, states, (target, inside), 2)
    assert (int(three), int(two), int(one)) == (3, 2, 1) and part < whole
    (kl, _), *_ = naive_losses(head, states, (target, inside), 2, divergence=True)
    entropy = -(target * target.log()).sum(-1)[[2, 4]].sum()  # label rows of anchors 1 and 3
    torch.testing.assert_close((part - kl).detach(), entropy)


@pytest.mark.parametrize("answer_first", [False, True])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_setting_has_the_pairs_that_are_counted_and_a_best_token_inside(file, fraction, answer_first):
    setting = replace(SETTING, fraction=fraction, answer_first=answer_first)
    loaded = read_setting(file(setting))
    states = loaded.states
    assert supervised(states, 3).sum(1).tolist() == pairs_of(setting)
    assert torch.equal(states.last_index_P, label_rows(states.span_BT)) and states.span_BT.max() == 1
    assert (loaded.head.inverse_V[states.top_P] >= 0).all()
    logits = states.last_PD @ loaded.lm_VD.T
    torch.testing.assert_close(states.lse_P, logits.logsumexp(-1))
    keys = sum(int(states.position_BT.flatten()[row - 1] + 1 + k) for k, p in supervised(states, 3).nonzero().tolist()
               for row in [int(states.last_index_P[p])])  # fmt: skip
    config = loaded.head.config
    assert attention_flops(config, setting) == 12 * config.num_attention_heads * config.head_dim * keys


def test_products_are_what_a_step_multiplies_at_least(file, verifier):
    """Of one long answer nearly all rows count, so that a step multiplies little else (attention is counted apart)."""
    setting = Setting(260, 1.0, 2, 64)
    loaded = read_setting(file(setting))
    ours = Ours(loaded)
    with FlopCounterMode(display=False) as counter:
        ours.loss(ours.teach(), False).backward()
    found = counter.get_flop_counts()["Global"]
    done = sum(count for name, count in found.items() if "attention" not in str(name) and "bmm" not in str(name))
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, 64)
    useful = sum(product.flops for product in products(config, setting))
    assert 0.9 < useful / done < 1.02
    frozen = sum(product.flops for product in products(config, setting, lm_head=False))
    assert useful - frozen == 2 * round(sum(pairs_of(setting)) / 2) * 32 * 64 * 2


def test_rates_are_flops_over_seconds(monkeypatch):
    monkeypatch.setattr("eval.training_bench.work._seconds", lambda product, dtype: 0.5 if product.m == 64 else 2.0)
    found = rates([Product(1, 2, 3, 2), Product(4, 5, 6)], torch.float32)
    assert found == {"shapes": (2 * 12 + 240) / 6, "square": 4 * 64**3}
    assert Product(8, 8, 8).flops == 1024


@pytest.mark.parametrize(("name", "kind"), [("aten::addmm", "matrix products"), ("aten::_softmax", "softmax, exp, log"),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"), ("aten::mul", "other arithmetic"),
    ("aten::copy_", "copies, casts, gathers"), ("_TokenLoss", "autograd, Python")])  # fmt: skip
def test_kinds_of_operations(name, kind):
    assert kind_of(name) == kind


def test_the_worker_in_a_process_of_its_own(file, tmp_path):
    """Through the pipe: a step with its parts and its memory, and the peak of a step that holds a large tensor."""
    with Process(OURS, file(SETTING), 1, tmp_path / "log.txt") as process:
        step = process.ask(do="step")
        assert process.about["versions"]["torch"] == torch.__version__
        assert step["seconds"] == pytest.approx(sum(step["parts"][n] for n in ("verifier", "forward", "backward")))
        assert sys.platform != "linux" or 0 < step["growth"] < 2**30
        with pytest.raises(UserError, match="ours was ended with 1: ValueError: unknown question.*log.txt"):
            process.ask(do="nothing")


def test_memory_is_measured_from_what_is_there():
    from eval.training_bench.worker import forget_peak, peak_bytes

    if sys.platform != "linux":
        assert forget_peak() == peak_bytes() == 0
        return
    before = forget_peak()
    held = torch.ones(64 * 2**20 // 4)
    del held
    assert peak_bytes() - before >= 60 * 2**20
    assert peak_bytes() - forget_peak() >= 0


def stand_in(tmp_path, text, name="other"):
    script = tmp_path / "stand_in.py"
    script.write_text(text)
    return Rival(name, [sys.executable, str(script)], {"more": 1})


def test_a_process_is_told_its_setting_and_its_end_is_one_line(tmp_path):
    echo = stand_in(tmp_path, "import sys\nfor line in sys.stdin: print(line.strip(), flush=True)")
    with Process(echo, Path("FILE"), 3, tmp_path / "log.txt") as process:
        assert process.about == {"setting": "FILE", "threads": 3, "more": 1} and process.ask(do="x") == {"do": "x"}
    dead = stand_in(tmp_path, "import sys\nsys.exit('no such module')")
    with pytest.raises(UserError, match="other was ended with 1: no such module; see .*log.txt"):
        Process(dead, Path("FILE"), 1, tmp_path / "log.txt")


def test_a_rival_that_fails_or_is_too_large_leaves_a_row_that_says_so(tmp_path, verifier, monkeypatch):
    def process(rival, *rest):
        if rival.name == "broken":
            raise UserError("broken was ended with 1")
        return InProcess(rival, *rest)

    monkeypatch.setattr(run, "Process", process)
    bench = run.Bench(verifier.head_geometry, verifier.aux_layers, 1, 1, tmp_path, Rival("broken", [], lm_head=False))
    rows = {row["name"]: row for row in run.measure(bench, SETTING)}
    assert rows["broken"]["missing"] == "broken was ended with 1" and rows["naive"]["tokens_per_second"] > 0
    monkeypatch.setattr(run, "available", lambda: 2**20)
    rows = {row["name"]: row for row in run.measure(bench, SETTING)}
    assert rows["naive"]["missing"].startswith("not run: about 1 GB") and rows["ours"]["tokens_per_second"] > 0


def test_nothing_is_timed_where_gradients_differ(tmp_path, verifier, monkeypatch):
    class Wrong(InProcess):
        def ask(self, **question):
            return super().ask(**question | ({"by_step": False} if question.get("by_step") else {}))

    def process(rival, *rest):
        return (Wrong if rival.name == "wrong" else InProcess)(rival, *rest)

    monkeypatch.setattr(check, "Process", process)
    geometry = verifier.head_geometry, verifier.aux_layers
    rows = check.agreement(SETTING, *geometry, Rival("right", [], lm_head=False), 1, tmp_path)
    assert len(rows) == 3 and all(row["gradient"] < 1e-4 and (row["loss"] or 0) < 1e-5 for row in rows)
    with pytest.raises(UserError, match="wrong against naive: expected the same loss.*nothing was timed"):
        check.agreement(SETTING, *geometry, Rival("wrong", [], lm_head=False), 1, tmp_path)


def test_a_gradient_that_is_no_number_is_a_difference(tmp_path, verifier, monkeypatch):
    class Spoilt(InProcess):
        def ask(self, **question):
            answer = super().ask(**question)
            grads = {key: grad.clone() for key, grad in load_file(question["out"]).items()}
            grads["norm.weight"][0] = torch.nan
            save_file(grads, question["out"])
            return answer

    monkeypatch.setattr(check, "Process", lambda rival, *rest: (Spoilt if rival.dense else InProcess)(rival, *rest))
    with pytest.raises(UserError, match="ours against naive: .* of 0.000000 and nan .norm.weight.: nothing was timed"):
        check.agreement(SETTING, verifier.head_geometry, verifier.aux_layers, None, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("R", [40, 64])
def test_the_real_peer_agrees(tmp_path, verifier, R):
    setting = replace(SETTING, draft_vocab=R)
    found = peer(Path(__file__).parent.parent / ".engines", "speculators")
    if found is None:
        pytest.skip("make .engines/speculators/.done installs it")
    rows = check.agreement(setting, verifier.head_geometry, verifier.aux_layers, found, 1, tmp_path)
    assert [row["name"] for row in rows][1:] == ["speculators against naive", "ours against speculators, K = 1"]
    bench = run.Bench(verifier.head_geometry, verifier.aux_layers, 1, 1, tmp_path, found, naive=False)
    rows = {row["name"]: row for row in run.measure(bench, setting)}
    assert rows["speculators"]["tokens_per_second"] > 0 and rows["speculators"]["versions"]["speculators"] == "0.9.0"
