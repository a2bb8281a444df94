"""The native head folder: `head.safetensors` and `config.json`, bound by hashes to the verifier it was trained for."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from conf.disk import sync, writing
from conf.errors import UserError
from conf.parse import json_file
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
        """Raises UserError on unknown or missing keys, and values of another type."""
        try:
            check_types(cls, values, "the head's verifier")
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
    """Write the native folder; returns it. An earlier head in it is replaced as a whole or stays."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "format": FORMAT,
        "version": VERSION,
        "head": stored.config.kind,
        "config": stored.config.to_dict(),
        "vocab_hash": stored.vocab.hash,
        "verifier": asdict(stored.verifier),
        "training": stored.training,
    }
    with whole(folder / WEIGHTS, folder / CONFIG) as (weights, config):
        save_file({**stored.tensors, "d2t": stored.vocab.d2t.clone()}, weights)
        config.write_text(json.dumps(values | {"file": _fingerprint(weights)}, indent=1) + "\n")
    return folder


def _fingerprint(path: Path) -> dict[str, int | str]:
    """What tells one flipped bit: safetensors has no checksum of its own."""
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


@contextmanager
def whole(*paths: Path) -> Iterator[list[Path]]:
    """Yields places to write; what was written there becomes `paths` at the end, in their order, and nothing does
    after an error. OSError that names the first of them when the disk is full or refuses."""
    parts = [path.with_name(f".{path.name}.part") for path in paths]
    try:
        with writing(paths[0]):
            yield parts
            for part in parts:
                sync(part)
            for part, path in zip(parts, paths, strict=True):
                part.replace(path)
            sync(paths[0].parent)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def read_head(source: Path | str) -> StoredHead:
    """Read a native folder, or the run folder that holds one.

    Raises UserError when it is no head, or its tensors are not those that its config was written with. A config that
    says nothing of the file, as those of older versions, is taken as it is.
    """
    folder = head_folder(source)
    values = read_config(folder / CONFIG)
    if values.get("format") != FORMAT or values.get("version") != VERSION:
        found = f"{values.get('format')!r} version {values.get('version')!r}"
        raise UserError(f"expected {FORMAT!r} version {VERSION} in {folder / CONFIG}, found {found}")
    parts = {"config": dict, "vocab_hash": str, "verifier": dict}
    if missing := [key for key, kind in parts.items() if not isinstance(values.get(key), kind)]:
        raise UserError(f"{folder / CONFIG}: missing {', '.join(missing)}; write the head again")
    tensors = read_tensors(folder / WEIGHTS)
    if "d2t" not in tensors:
        raise UserError(f"{folder / WEIGHTS}: missing d2t, the draft vocabulary; write the head again")
    kind = values.get("head", "eagle3")
    config = config_of(heads.kind_of(kind)[0], values["config"], folder / CONFIG)
    vocab = DraftVocab.from_d2t(tensors.pop("d2t"), config.vocab_size)
    if vocab.hash != values["vocab_hash"]:
        raise UserError(
            f"draft vocabulary of {folder} has hash {vocab.hash[:12]}, its config was written with "
            f"{values['vocab_hash'][:12]}: the two files are from different heads"
        )
    written = values.get("file")
    if written is not None and written != (found := _fingerprint(folder / WEIGHTS)):
        raise UserError(
            f"{folder / WEIGHTS} is not the file that {CONFIG} was written with (expected {written}, found {found}): "
            "take the head from a checkpoint (python -m train resume=RUN), or copy the folder again"
        )
    return StoredHead(config, vocab, tensors, VerifierCard.from_dict(values["verifier"]), values.get("training", {}))


def read_config(path: Path) -> dict:
    """The JSON object in `path`; UserError when it is none, or can't be read."""
    try:
        return json_file(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; UserError when it is damaged or quantised."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); write it again") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.itemsize < 2:
            raise UserError(
                f"{path}: expected {name} in 16 bits or more, found {tensor.dtype}: give an unquantised head"
            )
    return tensors


def config_of(kind: type[HeadConfig], values: dict, place: Path | str) -> HeadConfig:
    """The config of this kind of head. UserError for a missing or unknown key, or a value of another type."""
    check_types(kind, values, place)
    return kind.from_dict(values)


def check_types(kind: type, values: dict, place: Path | str) -> None:
    """UserError for a value of another type than the field of the dataclass `kind`.

    A plain int is a size, from 1 up; one in a tuple, or that may be None, is an id, from 0 up.
    """
    if not isinstance(values, dict):
        raise UserError(f"{place}: expected an object, found {values!r}; write it again")
    for name, hint in get_type_hints(kind).items():
        if name in values and not _fits(values[name], hint):
            said = str(getattr(hint, "__name__", hint)) if get_origin(hint) is None else str(hint)
            raise UserError(f"{place}: expected {name} of type {said}, found {values[name]!r}; write it again")


def _fits(value: object, hint, least: int = 1) -> bool:
    if isinstance(hint, UnionType):
        return any(_fits(value, part, 0) for part in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, get_args(hint)[0], 0) for item in value)
    if hint is int:
        return type(value) is int and value >= least
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


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
    """A running head from stored tensors and the verifier's embedding. UserError when the tensors are not its own."""
    try:
        with torch.device("meta"):  # sizes in a config may be any: no memory before they are the tensors'
            outline = heads.build(stored.config, verifier, stored.vocab)
            outline.load_state_dict(stored.tensors, strict=True, assign=True)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise UserError(f"the head's tensors are not those of its config: {error}") from error
    head = heads.build(stored.config, verifier, stored.vocab)
    head.load_state_dict(stored.tensors, strict=True)
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
