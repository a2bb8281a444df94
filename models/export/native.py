"""The native head folder: `head.safetensors` and `config.json`, bound by hashes to the verifier it was trained for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from conf.errors import UserError
from models import heads
from models.heads.config import HeadConfig
from models.vocab import DraftVocab

FORMAT = "eyrie-head"
VERSION = 1
WEIGHTS, CONFIG = "head.safetensors", "config.json"


@dataclass(frozen=True)
class VerifierCard:
    """What a head must know of its verifier: who it is, and what an export writes about it."""

    name: str
    weights_hash: str
    tokenizer_hash: str
    template_hash: str
    num_layers: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    # None in heads that were written before these were kept.
    architecture: str | None = None  # the model's class in transformers
    dtype: str | None = None  # of its weights as stored: exports have it unless another is named

    @classmethod
    def of(cls, verifier) -> VerifierCard:
        """From a models.verifier.Verifier."""
        return cls(
            name=verifier.name,
            weights_hash=verifier.weights_hash,
            tokenizer_hash=verifier.tokenizer_hash,
            template_hash=verifier.template_hash,
            num_layers=verifier.num_layers,
            bos_token_id=getattr(verifier.config, "bos_token_id", None),
            eos_token_ids=tuple(verifier.eos_ids),
            architecture=type(verifier.model).__name__,
            dtype=verifier.stored_dtype,
        )

    @classmethod
    def from_dict(cls, values: dict) -> VerifierCard:
        """Raises UserError on unknown or missing keys."""
        try:
            return cls(**{**values, "eos_token_ids": tuple(values.get("eos_token_ids", ()))})
        except (TypeError, AttributeError) as error:
            raise UserError(f"the head's config does not describe its verifier ({error}); write it again") from error


@dataclass(frozen=True)
class StoredHead:
    """A head without its verifier: enough to export it, not to run it (the embedding is the verifier's).

    tensors: the head's state dict, exactly.  training: free notes (steps K, data hash, ...).
    """

    config: HeadConfig
    vocab: DraftVocab
    tensors: dict[str, Tensor]
    verifier: VerifierCard
    training: dict = field(default_factory=dict)

    @classmethod
    def of(cls, head: nn.Module, verifier, training: dict | None = None) -> StoredHead:
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in head.state_dict().items()}
        return cls(head.config, head.vocab, tensors, VerifierCard.of(verifier), training or {})


def save_head(folder: Path | str, stored: StoredHead) -> Path:
    """Write the native folder; returns it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**stored.tensors, "d2t": stored.vocab.d2t.clone()}, folder / WEIGHTS)
    values = {
        "format": FORMAT,
        "version": VERSION,
        "head": stored.config.kind,
        "config": stored.config.to_dict(),
        "vocab_hash": stored.vocab.hash,
        "verifier": asdict(stored.verifier),
        "training": stored.training,
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=1) + "\n")
    return folder


def read_head(source: Path | str) -> StoredHead:
    """Read a native folder, or the run folder that holds one.

    Raises UserError when it is no head, or its vocabulary map is not the one that its config was written with.
    """
    folder = head_folder(source)
    values = read_config(folder / CONFIG)
    if values.get("format") != FORMAT or values.get("version") != VERSION:
        found = f"{values.get('format')!r} version {values.get('version')!r}"
        raise UserError(f"expected {FORMAT!r} version {VERSION} in {folder / CONFIG}, found {found}")
    if missing := [key for key in ("config", "vocab_hash", "verifier") if key not in values]:
        raise UserError(f"{folder / CONFIG}: missing {', '.join(missing)}; write the head again")
    tensors = read_tensors(folder / WEIGHTS)
    if "d2t" not in tensors:
        raise UserError(f"{folder / WEIGHTS}: missing d2t, the draft vocabulary; write the head again")
    config = heads.config_from_dict(values.get("head", "eagle3"), values["config"])
    vocab = DraftVocab.from_d2t(tensors.pop("d2t"), config.vocab_size)
    if vocab.hash != values["vocab_hash"]:
        raise UserError(
            f"draft vocabulary of {folder} has hash {vocab.hash[:12]}, its config was written with "
            f"{values['vocab_hash'][:12]}: the two files are from different heads"
        )
    return StoredHead(config, vocab, tensors, VerifierCard.from_dict(values["verifier"]), values.get("training", {}))


def read_config(path: Path) -> dict:
    """The JSON object in `path`; UserError when it is none."""
    try:
        values = json.loads(path.read_text())
    except ValueError as error:  # of JSON or of UTF-8
        raise UserError(f"{path} is damaged ({error}); write it again") from error
    if not isinstance(values, dict):
        raise UserError(f"expected a JSON object in {path}, found {type(values).__name__}; write it again")
    return values


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; UserError when it is damaged."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); write it again") from error


def tensor_names(path: Path) -> list[str]:
    """The names in a safetensors file, of which its header alone is read; UserError when it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); write it again") from error


def load_head(source: Path | str, verifier, dtype: torch.dtype | None = None) -> nn.Module:
    """The head of a native or run folder, in eval mode on the verifier's device, checked against this verifier.

    dtype: of the parameters; None keeps the stored one. Raises UserError naming both sides of a mismatch.
    """
    stored = read_head(source)
    check_verifier(stored, verifier)
    return attach(stored, verifier, dtype)


def attach(stored: StoredHead, verifier, dtype: torch.dtype | None = None) -> nn.Module:
    """A running head from stored tensors and the verifier's embedding."""
    head = heads.build(stored.config, verifier, stored.vocab)
    try:
        head.load_state_dict(stored.tensors, strict=True)
    except RuntimeError as error:
        raise UserError(" ".join(str(error).split())) from error
    dtype = dtype or next(iter(stored.tensors.values())).dtype
    for parameter in head.parameters():  # not head.to(dtype): the embedding is the verifier's own tensor
        parameter.data = parameter.data.to(verifier.device, dtype)
    return head.to(verifier.device).eval()


def check_same(trained: VerifierCard, found: VerifierCard) -> None:
    """UserError when weights, tokenizer or chat template differ."""
    for what in ("weights_hash", "tokenizer_hash", "template_hash"):
        old, new = getattr(trained, what), getattr(found, what)
        if old != new:
            raise UserError(
                f"the head was trained for {trained.name} ({what} {old[:12]}), this is {found.name} ({what} "
                f"{new[:12]}): give the verifier it was trained for, or train a head for this one"
            )


def check_verifier(stored: StoredHead, verifier) -> None:
    """UserError when weights, tokenizer, chat template or captured layers differ from training."""
    check_same(stored.verifier, VerifierCard.of(verifier))
    if stored.config.aux_layers and tuple(verifier.aux_layers) != stored.config.aux_layers:
        raise UserError(
            f"the head reads layers {list(stored.config.aux_layers)}, the verifier captures "
            f"{list(verifier.aux_layers)}: set verifier.aux_layers to the head's"
        )


def head_folder(source: Path | str) -> Path:
    """`source` itself when it holds a native head, else its `head/`; UserError when neither does."""
    source = Path(source)
    for folder in (source / "head", source):
        if (folder / WEIGHTS).is_file() and (folder / CONFIG).is_file():
            return folder
    what = "holds no head (head.safetensors and config.json, in it or in its head/)" if source.is_dir() else "is absent"
    raise UserError(f"expected a run folder or a head folder, but {source} {what}")
