"""Plans of verifiers that nobody has downloaded yet: a folder with a config.json is enough."""

import re

import pytest
import torch
from transformers import AutoConfig

from conf.cli import load
from train.main import verifier_device
from train.plan import plan_rows, sizes

LLAMA_70B = {
    "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def plan(tmp_path):
    def rows(kind, values, *words):
        AutoConfig.for_model(kind, **values).save_pretrained(tmp_path)
        common = [
            "experiment=eagle3_llama",
            "verifier=folder",
            f"verifier.source={tmp_path}",
            "trainer=gpu",
            "plan=true",
        ]
        cfg = load("train", [*common, "budget=full", "trainer.tflops=400", *words])
        return dict(plan_rows(cfg, verifier_device(cfg))), sizes(cfg)

    return rows


def test_a_llama_of_70b_from_its_config_alone(plan):
    rows, size = plan("llama", LLAMA_70B, "data.max_documents=60000", "trainer.devices=8", "data.store_dtype=bfloat16",
                      "data.store=true")  # fmt: skip
    assert "70.6G parameters, 80 layers on cuda" in rows["verifier"]
    assert size.head.body + size.head.lm_head == pytest.approx(3 * 8192**2 + 2 * 8192 * 10240 + 8192**2
                                                               + 3 * 8192 * 28672 + 32000 * 8192)  # fmt: skip
    assert "120TFLOP/s a device: 30% of 400TFLOP/s, as given" in rows["rate"] and "8 ranks" in rows["of a step"]
    assert re.search(r"verifier 139GFLOP", rows["of a token"])  # two for each of the layers' 68.5G, and some LM head
    assert "259M tokens, 10 epochs" in rows["training"]  # whatever the number of ranks
    assert "GB of states" in rows["disk"] and "bfloat16" in rows["states"]
    assert "verifier 141.1 GB" in rows["memory"]


def test_experts_at_work_and_in_all(plan):
    rows, size = plan("deepseek_v3", {}, "verifier.device_map=auto", "head.start=random")
    assert "671G parameters (35.7G in layers for a token)" in rows["verifier"] and "several devices" in rows["verifier"]
    assert size.verifier.capture(1, 0, 1) == pytest.approx(2 * 35.7e9, rel=0.01)
    assert "verifier 1342.1 GB over its devices" in rows["memory"]
    rows, _ = plan("deepseek_v3", {}, "verifier.whole=false", "trainer.validate_every=0")
    assert "verifier 3.7 GB" in rows["memory"] and "no layers" in rows["evaluation"]


def test_cost_of_a_token_is_linear_and_online_states_add_a_pass(plan):
    stored, _ = plan("llama", LLAMA_70B, "data.store=true")
    online, size = plan("llama", LLAMA_70B, "data.store=false")

    def flops(rows):
        number, unit = re.match(r"([\d.]+)([TP])FLOP", rows["of a step"]).groups()
        return float(number) * {"T": 1e12, "P": 1e15}[unit]

    step = load("train", ["trainer=gpu", "verifier=folder", "verifier.source=x"]).trainer.tokens_per_step
    assert flops(online) - flops(stored) == pytest.approx(step * size.verifier.capture(1, 0.75, 200), rel=0.05)
    assert size.head.step(2 * step, step, 200) == pytest.approx(2 * size.head.step(step, step / 2, 200))


def test_the_rate_is_this_machines_unless_given(tmp_path):
    AutoConfig.for_model("llama", num_hidden_layers=8).save_pretrained(tmp_path)
    words = ["verifier=folder", f"verifier.source={tmp_path}", "trainer.accelerator=cpu", "data=synthetic"]
    cfg = load("train", [*words, "data.store=false", "trainer.max_steps=3"])
    rows = dict(plan_rows(cfg, torch.device("cpu")))
    assert "a matrix product's here" in rows["rate"] and rows["training time"].startswith("about")
