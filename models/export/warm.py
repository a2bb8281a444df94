"""A head from wherever it lies: our own run or head folder, or a published EAGLE-1, EAGLE-3 or Medusa checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

from conf.errors import UserError
from models.export import eagle1, gguf, medusa, safeai, speculators
from models.export.folder import CONFIG, notes_in
from models.export.native import (
    StoredHead,
    VerifierCard,
    check_verifier,
    head_folder,
    read_config,
    read_head,
    tensor_names,
)

log = logging.getLogger(__name__)

# A head that learnt anything passes far more first drafts than this; one that reads the wrong states doesn't.
CHANCE, ENOUGH = 0.02, 100


def is_published(source: Path | str) -> bool:
    """Whether `source` holds a serving layout and no head of our own."""
    source = Path(source).expanduser()
    try:
        head_folder(source)
    except UserError:
        return is_gguf(source) or ((source / CONFIG).is_file() and "format" not in read_config(source / CONFIG))
    return False


def is_gguf(source: Path) -> bool:
    """Whether a folder holds a GGUF file and nothing else that may be a head."""
    return not (source / CONFIG).is_file() and gguf.gguf_file(source) is not None


def weights_file(source: Path) -> Path:
    """The file with the tensors of a published head."""
    return gguf.gguf_file(source) if is_gguf(source) else medusa.weights_file(source)


def peek(source: Path | str) -> str:
    """The kind of a published head, "eagle1", "eagle3" or "medusa", from its tensors' names and its config's
    model_type. UserError when it is none of them."""
    source = Path(source).expanduser()
    if is_gguf(source):
        return gguf.kind(source)
    weights = medusa.weights_file(source)
    if not weights.is_file() or not (source / CONFIG).is_file():
        safeai.read_folder(source)  # says what is missing
    names, values = tensor_names(weights), read_config(source / CONFIG)
    if speculators.TYPE in values:
        speculators.check_type(values, source)
        return "eagle3"
    if medusa.is_medusa(names, values):
        return "medusa"
    if any(name.startswith("midlayer.") for name in names):
        return "eagle3"
    if any(name.startswith("layers.0.") for name in names) and "fc.weight" in names:
        return "eagle1"
    raise UserError(
        f"expected an EAGLE-3 (midlayer.*), EAGLE-1 (fc, layers.0.*) or Medusa (blocks.*) head in {source}, found "
        f"tensors {', '.join(sorted(names)[:4])}, ..."
    )


def layers_wanted(source: Path | str) -> list[int] | None:
    """`verifier.aux_layers` for a published head: what it names, or the default of its kind."""
    if peek(source) in ("eagle1", "medusa"):
        return [-1]
    if is_gguf(Path(source).expanduser()):
        return gguf.named_layers(source)
    layers = safeai.named_layers(read_config(Path(source).expanduser() / CONFIG))
    return None if layers is None else list(layers)


def named_verifier(source: Path | str) -> str | None:
    """The verifier that a serving layout of our own was exported for; None for one from elsewhere."""
    source = Path(source).expanduser()
    notes = gguf.read_notes(source) if is_gguf(source) else notes_in(read_config(source / CONFIG), source)
    return notes.get("verifier", {}).get("name")


def read_any(source: Path | str, verifier) -> StoredHead:
    """The head in `source`, checked against this verifier: hashes for our own, exports of them included; geometry and
    layers for one from elsewhere, which says no more.

    Raises UserError naming both sides of a mismatch.
    """
    source = Path(source).expanduser()
    if not is_published(source):
        stored = read_head(source)
        check_verifier(stored, verifier)
        return stored
    layout = {"eagle1": eagle1, "eagle3": safeai, "medusa": medusa}[peek(source)]
    if is_gguf(source):
        layout = gguf
    elif speculators.TYPE in read_config(source / CONFIG):
        layout = speculators
    stored = layout.read(source, VerifierCard.of(verifier), verifier.embedding_VD)
    config, geometry = stored.config, verifier.head_geometry
    for name in ("hidden_size", "vocab_size"):
        if getattr(config, name) != geometry[name]:
            raise UserError(
                f"{source}: the head has {name} {getattr(config, name)}, the verifier {verifier.name} has "
                f"{geometry[name]}: is it another verifier's head?"
            )
    check_verifier(stored, verifier)
    for name in ("rope_parameters", "max_position_embeddings", "rms_norm_eps", "final_logit_softcapping"):
        if (found := getattr(config, name, geometry[name])) != geometry[name]:
            log.warning(f"{source}: the head has {name} {found}, the verifier {geometry[name]}")
    log.info(
        f"{source}: {config.kind}, layers {list(config.aux_layers)}, vocabulary map {stored.vocab.hash[:12]} of "
        f"{len(stored.vocab):,} tokens, fc_norm {getattr(config, 'fc_norm', False)}, norm_output "
        f"{getattr(config, 'norm_output', False)}"
    )
    return stored


def chance_warning(share: float, tested: int, head, verifier) -> str | None:
    """What to say when hardly a first draft is right: then a trained head reads other states than it was trained on."""
    if tested < ENOUGH or share >= CHANCE:
        return None
    layers = f"layers {list(head.config.aux_layers)} (one off is enough), " if head.config.aux_layers else ""
    return (
        f"only {share:.1%} of {tested} first drafts were right, no better than chance: check that the head was trained "
        f"with {layers}the vocabulary map {head.vocab.hash[:12]} ({len(head.vocab)} of {head.vocab.vocab_size} "
        f"tokens), the same norm switches, and for the verifier {verifier.name}"
    )
