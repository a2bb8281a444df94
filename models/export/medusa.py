"""Medusa heads (2401.10774) as vLLM reads them, up to 0.32: `model.safetensors` and `config.json`.

Written are vLLM's own names and the one LM head that all our heads share. It has V rows also where a head drafts only
R < V tokens, since vLLM 0.32 stops at a smaller one ("not initialized from checkpoint: {'token_map'}"). The row of a
token that is never drafted is the mean of the R rows: its logit is then the mean of theirs, below the largest, so that
the drafts stay what they were. `token_map` names the R tokens; vLLM reads past it, `read` drops the other rows by it.

Read are also the names of FasterDecoding, which give each head an LM head of its own: these must then be equal.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError
from models.export.folder import (
    CONFIG,
    EMBEDDING,
    MEDUSA_WEIGHTS,
    NOTES,
    WEIGHTS,
    Shapes,
    bind,
    card_of,
    check_tensors,
    head_tensors,
    notes_of,
    read_folder,
    write_folder,
)
from models.export.native import StoredHead, VerifierCard, check_types, config_of, read_config, read_tensors
from models.heads.medusa import MedusaConfig
from models.verifier import Verifier
from models.vocab import DraftVocab

TOKEN_MAP, LM_HEAD = "token_map", "lm_head.weight"
MAPS = {TOKEN_MAP: torch.int64}
OURS = re.compile(r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)")
BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
PUBLISHED_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
HEADS_LM = re.compile(r"lm_heads\.(\d+)\.weight")
PUBLISHED_LM = re.compile(r"(\d+)\.(\d+)\.weight")


def expected_shapes(config: MedusaConfig) -> Shapes:
    """Every tensor by vLLM's names, the LM head with its R rows, and the map when R < V."""
    D, R = config.hidden_size, config.draft_vocab_size
    shapes: Shapes = {}
    for head in range(config.heads):
        for layer in range(config.blocks):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (D, D)
            shapes[f"blocks.{head}.layers.{layer}.bias"] = (D,)
    shapes[LM_HEAD] = (R, D)
    return shapes | ({TOKEN_MAP: (R,)} if config.vocab_size > R else {})


def write(
    stored: StoredHead, out: Path | str, dtype: torch.dtype = torch.float32, verifier: Verifier | None = None
) -> Path:
    """Write the folder and return it. verifier: checked to be the head's; no embedding is written, none is read."""
    return write_folder(out, named_tensors(stored, dtype, verifier), config_json(stored, dtype))


def named_tensors(stored: StoredHead, dtype: torch.dtype, verifier: Verifier | None) -> dict[str, Tensor]:
    """The head's weights in `dtype` by vLLM's names, the LM head with V rows. UserError for a broken head."""
    tensors = head_tensors(stored, dtype, verifier)
    tensors.pop(EMBEDDING, None)
    tensors = {OURS.sub(r"blocks.\1.layers.\2.\3", name): tensor for name, tensor in tensors.items()}
    if not stored.vocab.is_identity:
        tensors[TOKEN_MAP] = stored.vocab.ids_R.clone()
    check_tensors(tensors, expected_shapes(stored.config), {}, "export", MAPS)
    if not stored.vocab.is_identity:
        rows = mean_row(tensors[LM_HEAD]).repeat(stored.config.vocab_size, 1)
        tensors[LM_HEAD] = rows.index_copy(0, stored.vocab.ids_R, tensors[LM_HEAD])
    return tensors


def mean_row(rows_RD: Tensor) -> Tensor:
    """[D], in the rows' dtype: its logit is the mean of theirs, to rounding, whatever the hidden state."""
    return rows_RD.double().mean(0).to(rows_RD.dtype)


def config_json(stored: StoredHead, dtype: torch.dtype) -> dict:
    """config.json as vLLM reads it, which takes any key with "num" and "heads" in it for the number of heads."""
    config = stored.config
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.heads,
        "num_hidden_layers": config.blocks,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "truncated_vocab_size": config.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
        NOTES: notes_of(stored),
    }


def read(folder: Path | str, verifier: VerifierCard | None = None, embedding_VD: Tensor | None = None) -> StoredHead:
    """Read such a folder, our own or another trainer's, and check it all.

    verifier: needed for folders written elsewhere, which say nothing about theirs.  embedding_VD: not used.
    Absent biases are zero, and a map in another order is sorted, with the rows of the LM head.
    """
    folder = Path(folder)
    if weights_file(folder).name == MEDUSA_WEIGHTS and (folder / CONFIG).is_file():
        values, tensors = read_config(folder / CONFIG), read_tensors(folder / MEDUSA_WEIGHTS)
    else:
        values, tensors = read_folder(folder)
    card = card_of(values, verifier, folder)
    if values.get("logit_scale", 1.0) != 1.0:
        raise UserError(
            f"{folder / CONFIG}: expected no logit_scale, found {values['logit_scale']}: it isn't supported"
        )
    heads, layers = _count(values, "heads", folder), _count(values, "layers", folder)
    tensors = _with_biases(_by_name(tensors, heads, layers, folder))
    D, V = _sizes(values, tensors, folder)
    rows = tensors[LM_HEAD]
    vocab = _take_map(tensors, values, V, folder)
    fields = {"hidden_size": D, "vocab_size": V, "draft_vocab_size": len(vocab), "heads": heads, "blocks": layers}
    config = config_of(MedusaConfig, fields | {"aux_layers": (card.num_layers,)}, folder / CONFIG)
    check_tensors(tensors, expected_shapes(config), {}, str(folder), MAPS)
    if not vocab.is_identity and values.get("truncated_vocab_size") in (None, V):
        _check_undrafted(rows, vocab, folder)
    weights = {BLOCK.sub(r"blocks.\1.\2.linear.\3", name): x for name, x in tensors.items() if name != TOKEN_MAP}
    notes = values.get(NOTES) or {}
    return bind(StoredHead(config, vocab, weights, card, notes.get("training", {})), notes, folder)


def weights_file(folder: Path) -> Path:
    """Where a folder's weights lie: by the other name only where there is no `model.safetensors`."""
    return folder / (
        MEDUSA_WEIGHTS if (folder / MEDUSA_WEIGHTS).is_file() and not (folder / WEIGHTS).is_file() else WEIGHTS
    )


def is_medusa(names: list[str], values: dict) -> bool:
    """Whether a folder with these tensors and this config.json holds Medusa heads."""
    blocks = any(BLOCK.fullmatch(_plain(name)) or PUBLISHED_BLOCK.fullmatch(_plain(name)) for name in names)
    return values.get("model_type") == "medusa" or blocks


def _plain(name: str) -> str:
    return name.removeprefix("medusa_heads.")


def _count(values: dict, what: str, folder: Path) -> int:
    """The number of heads, or of layers in each (1 where it isn't said), under whichever key, as vLLM reads it."""
    found = {key: value for key, value in values.items() if "num" in key and what in key}
    if what == "layers" and not found:
        return 1
    counts = list({str(count): count for count in found.values()}.values())
    if len(counts) != 1 or not all(type(count) is int and count > 0 for count in counts):
        raise UserError(f"{folder / CONFIG}: expected one number of {what}, found {found or 'none'}")
    return counts.pop()


def _by_name(tensors: dict[str, Tensor], heads: int, layers: int, folder: Path) -> dict[str, Tensor]:
    """The same tensors by the names that `write` gives, with one LM head; unknown names stay as they are.

    UserError when the tensors are of more or fewer heads than the config says, or the LM heads differ.
    """
    named, lm_heads = {}, {}
    for name, tensor in tensors.items():
        plain = PUBLISHED_BLOCK.sub(r"blocks.\1.layers.\2.\3", _plain(name))
        if (match := PUBLISHED_LM.fullmatch(plain)) and int(match[2]) == layers:
            plain = f"lm_heads.{match[1]}.weight"
        if match := HEADS_LM.fullmatch(plain):
            lm_heads[int(match[1])] = tensor
        elif plain in named:
            raise UserError(f"{folder}: two tensors for {plain}, one of them {name}; keep one layout")
        else:
            named[plain] = tensor
    found = {int(match[1]) for name in named if (match := BLOCK.fullmatch(name))}
    if len(found) != heads or found != set(range(heads)):
        raise UserError(
            f"{folder}: the config says {heads} heads, the tensors are of heads {sorted(found)}; set num_heads"
        )
    if layers > len(named):
        raise UserError(
            f"{folder}: the config says {layers} layers a head, there are {len(named)} tensors; set num_hidden_layers"
        )
    if lm_heads and LM_HEAD in named:
        raise UserError(f"{folder}: expected {LM_HEAD} or lm_heads.*, found both; keep one")
    if lm_heads:
        if set(lm_heads) not in ({0}, found):
            raise UserError(f"{folder}: expected one LM head or {heads}, found those of heads {sorted(lm_heads)}")
        first = lm_heads[0]
        if other := [head for head, tensor in lm_heads.items() if not torch.equal(tensor, first)]:
            raise UserError(
                f"{folder}: expected one LM head for all heads, found head {other[0]}'s unlike head 0's: our Medusa "
                "heads share theirs, such a checkpoint is not supported"
            )
        named[LM_HEAD] = first
    return named


def _with_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Zero biases where no block has one (`medusa_fc_bias` false)."""
    blocks = {name: tensor for name, tensor in tensors.items() if BLOCK.fullmatch(name)}
    if any(name.endswith(".bias") for name in blocks):
        return tensors
    return tensors | {f"{name.removesuffix('.weight')}.bias": tensor.new_zeros(tensor.shape[0])
                      for name, tensor in blocks.items()}  # fmt: skip


def _sizes(values: dict, tensors: dict[str, Tensor], folder: Path) -> tuple[int, int]:
    """(D, V), from the config or else, in published folders, from the LM head."""
    if LM_HEAD not in tensors:
        raise UserError(f"{folder}: missing tensors {LM_HEAD}, or one for each head")
    if tensors[LM_HEAD].dim() != 2:
        raise UserError(f"{folder}: expected {LM_HEAD} with two axes, found {tuple(tensors[LM_HEAD].shape)}")
    rows, width = tensors[LM_HEAD].shape
    if "vocab_size" not in values and TOKEN_MAP in tensors:
        raise UserError(f"{folder / CONFIG}: missing vocab_size, which a {TOKEN_MAP} needs")
    sizes = {"hidden_size": values.get("hidden_size", width), "vocab_size": values.get("vocab_size", rows)}
    check_types(MedusaConfig, sizes, folder / CONFIG)
    return sizes["hidden_size"], sizes["vocab_size"]


def _take_map(tensors: dict[str, Tensor], values: dict, V: int, folder: Path) -> DraftVocab:
    """The draft vocabulary. Sorts the map in `tensors` and leaves the LM head the R rows that it names."""
    said = values.get("truncated_vocab_size") or V
    if TOKEN_MAP not in tensors:
        if said != V:
            raise UserError(f"{folder}: missing tensors {TOKEN_MAP}: the config says {said} of {V} tokens")
        return DraftVocab.identity(V)
    ids, rows = tensors[TOKEN_MAP], tensors[LM_HEAD]
    if ids.dtype != torch.int64 or ids.dim() != 1 or said not in (V, len(ids)):
        raise UserError(
            f"{folder}: expected {TOKEN_MAP} int64 of shape ({said},), found {ids.dtype} {tuple(ids.shape)}"
        )
    order = ids.argsort()
    vocab = DraftVocab(ids[order], V)
    if said == V and len(rows) != V:
        raise UserError(f"{folder}: expected {LM_HEAD} of shape ({V}, ...), found {tuple(rows.shape)}")
    tensors[TOKEN_MAP] = vocab.ids_R
    if len(rows) in (V, len(ids)):  # any other number is refused later
        tensors[LM_HEAD] = rows[vocab.ids_R if len(rows) == V else order]
    return vocab


def _check_undrafted(rows_VD: Tensor, vocab: DraftVocab, folder: Path) -> None:
    """UserError for rows of other tokens that could win in an engine that reads past the map."""
    mean, eps = mean_row(rows_VD[vocab.ids_R]).float(), 4 * torch.finfo(rows_VD.dtype).eps
    for part in rows_VD[vocab.inverse_V < 0].split(8192):  # float32 copies of a part
        if not torch.allclose(part.float(), mean.expand_as(part), rtol=eps, atol=1e-7):
            raise UserError(
                f"{folder}: expected the rows of {LM_HEAD} outside {TOKEN_MAP} to be the mean of those inside, "
                "found others, which engines may draft: export again"
            )
