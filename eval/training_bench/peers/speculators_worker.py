"""The EAGLE-3 training step of the `speculators` library, run by its own Python, that takes turns with ours.

Asked and answering as eval.training_bench.worker, without `rates` and `profile`. The batch goes through the library's
own shift and collation, the model and loss are called as its trainer does (autocast, gradients clipped to 1, AdamW),
with attention by SDPA and the eager loss: its defaults are for GPUs (seen: 0.9.0, transformers 5.19, torch 2.13).
Nothing of ours is imported.

A gradient's names are ours. `by_step` is the only mean it knows: each draft step's sum over its own number of rows.
"""

import ctypes
import json
import os
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.data import CollateFn
from transformers import LlamaConfig

OURS, THEIRS = "midlayer.", "layers.0."
DECAY = 0.8
LAYER = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "rope_parameters",
]


def build(config, tensors, attention="sdpa"):
    """The library's model with the weights of a setting file; `config` is our head's."""
    layer = LlamaConfig(**{name: config[name] for name in LAYER}, num_hidden_layers=1, attention_bias=False)
    layer._attn_implementation = attention
    proposal = GreedyTokenProposalConfig(speculative_tokens=3)
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=config["draft_vocab_size"],
            norm_before_residual=False,
            fc_norm=config["fc_norm"],
            norm_output=config["norm_output"],
            eagle_aux_hidden_state_layer_ids=config["aux_layers"],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[proposal],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
    )
    ids = tensors["ids_R"]
    head = {name.removeprefix("head."): tensor for name, tensor in tensors.items() if name.startswith("head.")}
    weights = {name.replace(OURS, THEIRS): tensor for name, tensor in head.items()}
    weights["embed_tokens.weight"] = tensors["embedding"]
    weights["verifier_lm_head.weight"] = tensors["lm_head"][ids]
    weights["verifier_norm.weight"] = torch.ones(config["hidden_size"])
    if model.use_draft_vocab:
        marked = torch.zeros(config["vocab_size"], dtype=torch.bool)
        marked[ids] = True
        model.load_vocab_mappings(marked, ids - torch.arange(len(ids)))
    missing, unknown = model.load_state_dict(weights, strict=False)
    left = [name for name in missing if name not in ("d2t", "t2d")]
    if left or unknown:
        sys.exit(f"weights left out: {left}, weights unknown: {unknown}")
    return model.train()


def batch_of(tensors, setting, dtype):
    """One packed row by the library's own shift and collation, padded to the rows that it was made from."""
    length = setting["tokens"] // setting["documents"]
    samples = []
    for first in range(0, len(tensors["input_ids"]), length):
        rows = slice(first, first + length)
        samples.append(
            {
                "input_ids": tensors["input_ids"][rows],
                "hidden_states": tensors["aux"][rows].flatten(1),
                "verifier_last_hidden_states": tensors["last"][rows],
                "loss_mask": mask_of(tensors["span"][rows], setting["answer_first"]),
                "lengths": torch.tensor([length]),
                "position_ids": tensors["position"][rows],
            }
        )
    aux, hidden = tensors["aux"].shape[1:]
    batch = CollateFn(len(tensors["input_ids"]), hidden, aux, dtype, shift_batch)(samples)
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def mask_of(span, answer_first):
    """The answer's tokens. In the check alone (answer_first) only those whose successor is in the answer as well.

    The library counts a row by the token before the label, so that it also learns what follows an answer.
    """
    inside = span >= 0
    if answer_first:
        inside[:-1] &= span[:-1] == span[1:]
        inside[-1] = False
    return inside


class Trainer:
    def __init__(self, ask):
        torch.set_num_threads(ask["threads"])
        with safe_open(ask["setting"], "pt") as file:
            about = file.metadata()
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no dict
        self.setting = json.loads(about["setting"])
        self.dtype = getattr(torch, self.setting["dtype"])
        self.model = build(json.loads(about["config"]), tensors)
        self.batch = batch_of(tensors, self.setting, self.dtype)
        settings = {"ttt_steps": self.setting["steps"], "ttt_step_loss_decay": DECAY}
        self.settings = self.model.get_trainer_kwargs(loss_fn="kl_div", loss_implementation="eager", **settings)[0]
        self.learnt = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.learnt, lr=1e-5)
        self.teaching = 0.0
        self.model.verifier_norm.register_forward_pre_hook(self.teacher_begins)
        self.model.verifier_lm_head.register_forward_hook(self.teacher_ends)

    def teacher_begins(self, *_):
        self.teaching -= time.perf_counter()

    def teacher_ends(self, *_):
        self.teaching += time.perf_counter()

    def loss(self):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype != torch.float32):
            return self.model(**self.batch, **self.settings)[1]

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.teaching = 0.0
        before, begun = forget_peak(), time.perf_counter()
        loss = self.loss()
        lossy = time.perf_counter()
        loss.backward()
        done = time.perf_counter()
        growth = peak_bytes() - before
        after = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(self.learnt, 1.0)
        self.optimizer.step()
        parts = {
            "verifier": self.teaching,
            "forward": lossy - begun - self.teaching,
            "backward": done - lossy,
            "optimizer": time.perf_counter() - after,
        }
        return {"seconds": done - begun, "parts": parts, "growth": growth}

    def gradients(self, out, by_step):
        if not by_step:
            sys.exit("this library divides each draft step by its own number of rows")
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        save_file({name.replace(THEIRS, OURS): grad for name, grad in found.items()}, out)
        return {"loss": loss.item()}


def status(name):
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) * 1024


def give_back():
    """What loading freed goes back to the system: a step would hide its growth in it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def forget_peak():
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return status("VmRSS:")
    return 0


def peak_bytes():
    with suppress(OSError):
        return status("VmHWM:")
    return 0


def main():
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    trainer = None
    for line in sys.stdin:
        ask = json.loads(line)
        if trainer is None:
            trainer = Trainer(ask)
            give_back()
            found = {"versions": {name: version(name) for name in ("speculators", "transformers", "torch")}}
        else:
            found = getattr(trainer, ask.pop("do"))(**ask)
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
