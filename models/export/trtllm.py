"""What TensorRT-LLM reads, by its sources alone: it needs a GPU to install, and nothing of this was run.

EAGLE-3, by the PyTorch backend (NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/models/modeling_speculative.py at commit
00679c66c3e3, modeling_auto.py at 01bffee125e2): the SafeAI names without `t2d`. Unknown tensors are passed over, and so
is a module of which no tensor is there. The embedding is the verifier's. Which layers are captured is an option of the
engine, `eagle3_layers_to_capture` of its speculative_config, and never read from a checkpoint; it counts the outputs of
layers, so that each is one lower than ours, and left out it means our default.

Medusa, by the TensorRT backend (tensorrt_llm/models/medusa/model.py at 024997657505, config.py at 084a8843ce92,
examples/medusa/convert_checkpoint.py at b93e14ca093e): `medusa_lm_head.safetensors` with FasterDecoding's names, biases
required, and an LM head of V rows for every head; no vocabulary map, so that for R < V rows are added as in medusa.py.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError
from models.export import medusa, safeai
from models.export.folder import EMBEDDING, MEDUSA_WEIGHTS, NOTES, head_tensors, notes_of, write_folder
from models.export.native import StoredHead
from models.introspect import default_layers
from models.verifier import Verifier

log = logging.getLogger(__name__)

BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
CAPTURE = "eagle3_layers_to_capture"
MEDUSA_VERIFIERS = ("LlamaForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM")


def write_eagle3(
    stored: StoredHead, out: Path | str, dtype: torch.dtype = torch.float32, verifier: Verifier | None = None
) -> Path:
    """Write the folder and return it. verifier: checked to be the head's; its embedding isn't written.

    Raises UserError for a head that TensorRT-LLM would compute otherwise.
    """
    config = stored.config
    if config.hidden_act != "silu":
        raise UserError(f"expected an MLP with silu, found {config.hidden_act}: TensorRT-LLM's EAGLE-3 always has silu")
    if len(config.aux_layers) == 1:
        raise UserError("expected 2 or more captured layers, found 1: TensorRT-LLM then reads no fc")
    if list(config.aux_layers) != sorted(set(config.aux_layers)) or config.aux_layers[0] == 0:
        raise UserError(
            f"expected captured layers that ascend from 1, found {list(config.aux_layers)}: TensorRT-LLM sorts a set "
            "of layers' outputs"
        )
    tensors = head_tensors(stored, dtype, verifier)
    tensors.pop(EMBEDDING, None)
    maps = safeai.maps_of(stored.vocab)
    safeai.check(tensors | maps, config, "export")
    maps.pop("t2d", None)
    values = safeai.config_json(stored, dtype)
    for key in (safeai.LAYER_IDS, "eagle_config", "norm_before_residual", "norm_before_fc"):
        values.pop(key, None)
    capture = [layer - 1 for layer in config.aux_layers]
    values[NOTES] |= {CAPTURE: capture}
    if config.aux_layers != default_layers(stored.verifier.num_layers):
        log.warning(f"this head needs {CAPTURE}: {capture} in TensorRT-LLM's speculative_config")
    if config.fc_norm or config.norm_output:
        log.warning("releases of TensorRT-LLM that don't read fc_norm and norm_output compute this head without them")
    return write_folder(out, tensors | maps, values)


def write_medusa(
    stored: StoredHead, out: Path | str, dtype: torch.dtype = torch.float32, verifier: Verifier | None = None
) -> Path:
    """Write the folder and return it; medusa.read reads it, and a `token_map` in it, for R < V, is for that alone."""
    config = stored.config
    if stored.verifier.architecture not in (None, *MEDUSA_VERIFIERS):
        log.warning(
            f"TensorRT-LLM's Medusa is for {', '.join(MEDUSA_VERIFIERS)}; this head's verifier is a "
            f"{stored.verifier.architecture}"
        )
    tensors = medusa.named_tensors(stored, dtype, verifier)
    lm_head = tensors.pop(medusa.LM_HEAD)
    named: dict[str, Tensor] = {BLOCK.sub(r"\1.\2.linear.\3", name): tensor for name, tensor in tensors.items()}
    named |= {f"{head}.{config.blocks}.weight": lm_head.clone() for head in range(config.heads)}
    values = {
        "medusa_num_heads": config.heads,  # for medusa/model.py
        "num_medusa_heads": config.heads,  # for medusa/config.py
        "medusa_num_layers": config.blocks,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        NOTES: notes_of(stored),
    }
    return write_folder(out, named, values, MEDUSA_WEIGHTS)
