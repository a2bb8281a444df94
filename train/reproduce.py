"""A step whose loss or gradient was not finite, once more: python -m train.reproduce file=RUN/nonfinite/step-N.pt"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from conf.cli import Outcome, main
from conf.errors import UserError
from conf.schema import ReproduceCommandConf
from models import heads
from models.losses import head_loss
from models.objectives import Objective
from models.states import VerifierStates
from models.vocab import DraftVocab
from train import finish
from train.guard import FORMAT, not_finite, some
from train.module import check_verifier, labels_of
from train.resolve import resumed_config

log = logging.getLogger(__name__)


@main("reproduce")
def reproduce(cfg: ReproduceCommandConf) -> Outcome:
    """Says what is not finite this time, with the weights, states and seeds of that step."""
    if cfg.file is None:
        raise UserError("no file named: give file=RUN/nonfinite/step-N.pt, as the run's message has it")
    path = Path(cfg.file)
    kept = read(path)
    run = resumed_config(path.parents[1], [])
    if cfg.verifier_source:
        run.verifier.source = cfg.verifier_source
    verifier = finish.load_verifier(run, run.verifier.dtype, "cpu" if not torch.cuda.is_available() else "cuda")
    check_verifier(kept["verifier"], verifier)
    log.info(f"{path.name}, step {kept['step']} of {path.parents[1]}: {kept['what']}")
    found = replay(kept, verifier)
    bad = [*found["losses"], *found["gradients"]]
    log.info(
        f"now: {some(bad)} not finite" if bad else "now: everything is finite, so the machine or its kernels matter"
    )
    return Outcome(path, found | {"step": kept["step"], "reproduced": bool(bad)})


def read(path: Path) -> dict:
    """The file that a run left. UserError when it is none."""
    try:
        kept = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise UserError(f"expected a file that a run left in its nonfinite/ folder, found none at {path}") from None
    except Exception as error:  # of the zip, the unpickler or their contents
        raise UserError(f"{path} cannot be read ({type(error).__name__}): let the run write it again") from error
    if not isinstance(kept, dict) or kept.get("format") != FORMAT or "batches" not in kept:
        raise UserError(f"expected a file that a run left in its nonfinite/ folder, found another kind at {path}")
    return kept


def replay(kept: dict, verifier) -> dict:
    """{losses, gradients}: batches whose loss, and parameters whose gradient is not finite, in words."""
    config = heads.config_from_dict(kept["kind"], kept["config"])
    vocab = DraftVocab.from_d2t(kept["d2t"], config.vocab_size)
    head = heads.build(config, verifier, vocab).to(verifier.device).train()
    head.load_state_dict(kept["weights"])
    objective = Objective(**kept["objective"])
    logits = verifier.draft_logits(None if vocab.is_identity else vocab.ids_R)
    losses = []
    for batch in kept["batches"]:
        states = VerifierStates(**batch["states"]).to(verifier.device)
        with torch.autocast(verifier.device.type, torch.bfloat16, enabled=kept["precision"] == "bf16-mixed"):
            labels = labels_of(head, verifier, states, logits, objective)
            loss, _, _ = head_loss(head, states, labels, objective, batch["seed"])
        (loss / max(kept["weight"], 1e-12)).backward()
        if not bool(loss.isfinite()):
            losses.append(f"loss {loss.item()} of documents {some([str(index) for index in batch['documents']])}")
    gradients = [f"gradient of {name}" for name in not_finite((name, p.grad) for name, p in head.named_parameters())]
    return {"losses": losses, "gradients": gradients}


if __name__ == "__main__":
    reproduce()
