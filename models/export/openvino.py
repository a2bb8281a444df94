"""EAGLE-3 heads for OpenVINO GenAI: the folder that optimum-cli converts, and in its `ir/` what the engine loads.

The converter names no captured layers, and the engine's default ones are each a layer late: they are written into the
IR afterwards, as outputs of layers, with the notes that bind the head to its verifier.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import torch

from conf.errors import UserError
from models.export import safeai
from models.export.folder import CONFIG, IR, NOTES, WEIGHTS, head_tensors, write_folder
from models.export.native import StoredHead, read_config, whole
from models.verifier import Verifier

log = logging.getLogger(__name__)

MODEL = "openvino_model.xml"
CONVERTER = "optimum-cli"
MODE, LAYERS = "eagle3_mode", "hidden_layers_list"  # runtime info that the engine reads
HEAD_HASH = "head_hash"  # in our notes: the hash of model.safetensors
TAPS = 3  # the engine joins that many states


def write(
    stored: StoredHead, out: Path | str, dtype: torch.dtype = torch.float32, verifier: Verifier | None = None
) -> Path:
    """Write the folder and return it; converted as well when optimum-cli is on the PATH, or has made `ir/` before.

    Without either the log says what to run; this command then finishes `ir/`.
    UserError for a head that the engine would compute otherwise, without the verifier, for an `ir/` of another head,
    and when the conversion fails.
    """
    if verifier is None:
        raise UserError("expected the verifier, whose embedding is part of this layout, found none: pass it")
    check_portable(stored)
    out = Path(out)
    tensors = head_tensors(stored, dtype, verifier)
    tensors |= safeai.maps_of(stored.vocab)
    safeai.check(tensors, stored.config, "export")
    values = safeai.config_json(stored, dtype)
    write_folder(out, tensors, values, keep_ir=True)
    digest = hashlib.sha256((out / WEIGHTS).read_bytes()).hexdigest()
    values[NOTES] |= {HEAD_HASH: digest}
    with whole(out / CONFIG) as (file,):
        file.write_text(json.dumps(values, indent=2) + "\n")
    command = convert_command(out, dtype)
    if shutil.which(CONVERTER) and not converted_from(out, digest):
        run(command)
    if (out / IR / MODEL).is_file():
        finish(out / IR, values[NOTES])
    else:
        log.warning(
            f"not finished: no {CONVERTER} on the PATH. Run `{shlex.join(command)}` where optimum-intel is "
            f"(make .engines/openvino/.done), then this command again, which writes the captured layers into {out / IR}"
        )
    return out


def check_portable(stored: StoredHead) -> None:
    """UserError for a head of other captured layers, norms or vocabulary than the engine computes with."""
    config = stored.config
    for switch in ("fc_norm", "norm_output"):
        if getattr(config, switch):
            raise UserError(f"expected {switch} false, found True: OpenVINO's converter drops it without a word")
    if len(config.aux_layers) != TAPS or min(config.aux_layers) < 1:
        raise UserError(f"expected {TAPS} captured layers from 1 up, found {list(config.aux_layers)}")
    if stored.vocab.is_identity:
        raise UserError(
            f"expected a draft vocabulary smaller than the verifier's {config.vocab_size} tokens, found all of them: "
            "OpenVINO's converter would fill the absent map with noise"
        )


def convert_command(folder: Path, dtype: torch.dtype) -> list[str]:
    """What turns `folder` into its `ir/`. Weights are kept as they are, never compressed to integers."""
    weights = "fp16" if dtype == torch.float16 else "fp32"
    options = ["--task", "text-generation-with-past", "--trust-remote-code", "--weight-format", weights]
    return [CONVERTER, "export", "openvino", "--model", str(folder), *options, str(folder / IR)]


def run(command: list[str]) -> None:
    """Converts beside the last word of `command`, which is replaced once all of it is there.

    UserError with the last line of what it said when the conversion fails.
    """
    log.info(f"converting with {CONVERTER} (about a minute) ...")
    ir = Path(command[-1])
    part = ir.with_name(f".{ir.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    call = [*command[:-1], str(part)]
    done = subprocess.run(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    said = [line for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
    if not done.returncode and (part / MODEL).is_file():
        shutil.rmtree(ir, ignore_errors=True)
        part.rename(ir)
    else:
        raise UserError(
            f"{CONVERTER} ended with {done.returncode} and no {MODEL}: {said[-1][:300] if said else 'no output'}; "
            f"to see all of it: {shlex.join(command)}"
        )


def converted_from(out: Path, digest: str) -> bool:
    """Whether `ir/` is there and was converted from the weights of that hash."""
    place = out / IR / CONFIG
    return (
        (out / IR / MODEL).is_file()
        and place.is_file()
        and (read_config(place).get(NOTES) or {}).get(HEAD_HASH) == digest
    )


def finish(ir: Path, notes: dict) -> None:
    """Writes the captured layers and `notes` into the runtime info of the IR in `ir`.

    UserError for an IR of another head than the notes', of no EAGLE-3 head, or one that is damaged.
    """
    found = read_config(ir / CONFIG).get(NOTES) if (ir / CONFIG).is_file() else None
    if (written := (found or {}).get(HEAD_HASH)) != notes[HEAD_HASH]:
        raise UserError(
            f"{ir}: converted from the head {str(written)[:12]}, found {notes[HEAD_HASH][:12]} beside it: delete {ir} "
            "and convert again"
        )
    place = ir / MODEL
    try:
        tree = ElementTree.parse(place)
    except ElementTree.ParseError as error:
        raise UserError(f"{place} is damaged ({error}): delete {ir} and convert again") from error
    info = tree.getroot().find("rt_info")
    mode = None if info is None else info.find(MODE)
    if mode is None or mode.get("value") != "True":
        raise UserError(f"expected {MODE} in the runtime info of {place}, found none: not an EAGLE-3 head's IR")
    entries = {LAYERS: " ".join(str(layer - 1) for layer in notes["aux_layers"]), NOTES: json.dumps(notes)}
    for name, value in entries.items():
        entry = info.find(name)
        if entry is None:
            entry = ElementTree.SubElement(info, name)
        entry.set("value", value)
    part = place.with_name(f".{MODEL}.part")
    tree.write(part, encoding="utf-8", xml_declaration=True)
    part.replace(place)
