"""Loads an exported head with the `speculators` library and says whether it is the one in the folder.

PYTHON eval/serving/engines/speculators_load.py FOLDER VERIFIER [OUT]

PYTHON has the library (seen: 0.9.0 with transformers 5.19 and torch 2.13 on CPU). VERIFIER: the verifier's folder, in
place of the name that config.json gives. Nothing of ours is imported. The last line of the output is one JSON object:

equal: tensors of the file that the loaded model holds bit for bit; different, unread: names of those that it doesn't.
new: names that the model made itself; the library takes `verifier_*` from the verifier, and nothing else may be there.
not_finite: names of weights with NaN, which is how the library marks what was never loaded.

OUT gets `logits.safetensors`, the draft logits [K, T, R] for random states and tokens that lie beside them (K drafts
from each of T rows, the library's own unrolled forward pass with the tokens given), and `saved/`, the head as the
library itself writes it. Exit status 1 when anything is amiss.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig

STEPS, ROWS = 3, 24


def load(folder: str, verifier: str):
    """The model, with an attention that a CPU computes; the library's own default is for GPUs."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.speculators_config.verifier.name_or_path = verifier
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(folder, config=config).eval()


def compare(folder: str, model) -> dict:
    """The model's tensors beside the file's."""
    written, held = load_file(Path(folder) / "model.safetensors"), model.state_dict()
    same = {
        name: name in held and held[name].dtype == tensor.dtype and torch.equal(held[name], tensor)
        for name, tensor in written.items()
    }
    floats = {name: tensor for name, tensor in held.items() if tensor.is_floating_point()}
    return {
        "equal": sum(same.values()),
        "different": sorted(name for name, equal in same.items() if not equal and name in held),
        "unread": sorted(written.keys() - held.keys()),
        "new": sorted(held.keys() - written.keys()),
        "not_finite": sorted(name for name, tensor in floats.items() if not bool(tensor.isfinite().all())),
    }


@torch.no_grad()
def draft(model) -> dict[str, torch.Tensor]:
    """Random states [T, A * D], token ids [T + K], and the draft logits [K, T, R] of each row and step."""
    numbers = torch.Generator().manual_seed(7)
    states = torch.randn(ROWS, model.fc.in_features, generator=numbers)
    tokens = torch.randint(0, model.verifier_vocab_size, (ROWS + STEPS,), generator=numbers)
    seen = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    # Row t takes the token after it. The pass reads further ones from the same row of ids and zeros past its end: the
    # rows of the last STEPS tokens are there for those, and are left out.
    rows = ROWS + STEPS
    padded = torch.cat([states, torch.zeros(STEPS, states.shape[1])]).to(model.fc.weight.dtype)
    model(
        hidden_states=padded[None],
        input_ids=torch.cat([tokens[1:], tokens[:1]])[None],
        document_ids=torch.zeros(1, rows, dtype=torch.long),
        ttt_steps=STEPS,
    )
    hook.remove()
    return {"states": states, "tokens": tokens, "logits": torch.stack(seen)[:, :ROWS].float().contiguous()}


def main(folder: str, verifier: str, out: str | None = None) -> int:
    model = load(folder, verifier)
    report = {name: version(name) for name in ("speculators", "transformers", "torch")}
    report |= {"class": type(model).__name__, "dtype": str(model.fc.weight.dtype).removeprefix("torch.")}
    report |= {"aux_layers": model.target_layer_ids, "notes_kept": hasattr(model.config, "eyrie")}
    report |= compare(folder, model)
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        tensors = draft(model)
        save_file(tensors, Path(out) / "logits.safetensors")
        report["logits_finite"] = bool(tensors["logits"].isfinite().all())
        model.save_pretrained(Path(out) / "saved")
    foreign = [name for name in report["new"] if not name.startswith("verifier_")]
    amiss = report["different"] + report["unread"] + foreign + report["not_finite"]
    report["ok"] = not amiss and report.get("logits_finite", True)
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 4:
        sys.exit("usage: PYTHON speculators_load.py FOLDER VERIFIER [OUT]")
    sys.exit(main(*sys.argv[1:]))
