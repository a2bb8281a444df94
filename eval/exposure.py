"""Exposure bias of an EAGLE head: the same drafts made from its own features and from the verifier's true ones.

Counted on the verifier's own greedy text, where the next token is the verifier's argmax: a draft that hits is the
text's next token, so an unroll over the given tokens is a free run for as long as every draft before hits. At depth k
of such an anchor the head has read k of its own features; the anchor k rows later reads the same tokens with the true
ones, and its first draft has the same label. The difference between the two is exposure bias and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor, nn

from conf.errors import UserError
from data.batches import packed_rows
from data.documents import Document
from data.progress import LOG_EVERY, progress_bar
from eval.counts import Counts
from eval.measure import EvalSettings
from eval.prompts import Prompt
from eval.replay import Recording, record, replay, states_of
from eval.speculative.scorers import drafter_for
from models.states import VerifierStates
from models.supervision import supervised

log = logging.getLogger(__name__)

TOKENS = 2048  # of documents whose states exist at once
LOGITS = 2**24  # draft logits that exist at once
RESAMPLES = 2000
ENOUGH = 5  # documents for an interval over documents


@dataclass(frozen=True)
class Exposure:
    """Counts of every document at depths 0..K-1, int64 [N, K]; depth k is step k of `unroll`, with k own features read.

    counted: (anchor, depth) pairs whose label lies in the anchor's answer.
    forced:  hits among them with true features at every row: teacher forcing.
    given:   hits among them with own features and the text's tokens: what training logs as accuracy_k.
    tested:  those whose drafts 0..k-1 were all accepted, as in the greedy loop started at every anchor.
    own:     hits among the tested with own features: n-alpha of that loop.
    true:    hits among the tested with true features.
    """

    counted: np.ndarray
    forced: np.ndarray
    given: np.ndarray
    tested: np.ndarray
    own: np.ndarray
    true: np.ndarray

    def __add__(self, other: Exposure) -> Exposure:
        """The same documents under another head: counts of each document add up."""
        return Exposure(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def measure_exposure(
    verifier, heads: Mapping[str, nn.Module], documents: Sequence[Document], depth: int
) -> dict[str, Exposure]:
    """Counts of each EAGLE head (any with `unroll` and own features) on documents that the verifier wrote greedily.

    The verifier runs once over each document, whatever the number of heads.
    """
    parts: dict[str, list[Exposure]] = {name: [] for name in heads}
    for some in _portions(documents):
        rows = packed_rows(some)
        states = verifier.states(*(row.to(verifier.device) for row in rows))
        for name, head in heads.items():
            parts[name].append(exposure(head, states, depth))
    names = [f.name for f in fields(Exposure)]
    return {
        name: Exposure(*(np.concatenate([getattr(part, field) for part in of_head]) for field in names))
        for name, of_head in parts.items()
    }


def measure_heads(
    verifier, heads: Mapping[str, nn.Module], prompts: Sequence[Prompt], settings: EvalSettings
) -> dict[str, tuple[list[Counts], Exposure]]:
    """Of each head: counts of the greedy loop's rounds, and exposure on the answers, both prompt by prompt.

    The answers are the verifier's own whichever head drafts, so they are recorded once and replayed (eval.replay).
    Prompts that leave no room for one are left out, with a warning; UserError when none is left.
    """
    assert settings.sampling.greedy, "only greedy text can be replayed"
    room = settings.prompt_room(verifier.head_geometry["max_position_embeddings"])
    fitting = [prompt for prompt in prompts if len(prompt.input_ids) <= room]
    if not fitting:
        raise UserError(f"expected prompts of at most {room} tokens, found none: lower decode.max_new_tokens")
    if len(fitting) < len(prompts):
        log.warning(f"{len(prompts) - len(fitting)} prompts of more than {room} tokens are left out")
    recordings = record(verifier, fitting, settings.max_new_tokens, settings.depth)
    drafters = {name: drafter_for(head, settings.shape, settings.sampling) for name, head in heads.items()}
    loops: dict[str, list[Counts]] = {name: [] for name in heads}
    with progress_bar() as bar:
        task, said = bar.add_task("replaying", total=len(recordings), rate="prompts"), time.monotonic()
        for done, recording in enumerate(recordings):
            if bar.disable and time.monotonic() - said > LOG_EVERY:
                said = time.monotonic()
                log.info(f"replayed {len(heads)} heads on {done} of {len(recordings)} prompts")
            states = states_of(verifier, recording)
            for name, drafter in drafters.items():
                counts = Counts()
                for call in replay(drafter, recording, states).rounds:
                    counts.add(call)
                loops[name].append(counts)
            bar.update(task, advance=1)
    exposures = measure_exposure(verifier, heads, [answer(recording) for recording in recordings], settings.depth)
    return {name: (loops[name], exposures[name]) for name in heads}


def answer(recording: Recording) -> Document:
    """A prompt with what was handed out of its recorded answer."""
    return answered(recording.prompt, recording.tokens[: recording.length])


def answered(prompt: Prompt, text: Sequence[int]) -> Document:
    """A prompt with its text, which is the one span."""
    ids = [*prompt.input_ids, *text]
    return Document(prompt.id, ids, [(len(prompt.input_ids), len(ids))])


def _portions(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Neighbours of TOKENS tokens together, or one document."""
    portion: list[Document] = []
    for document in documents:
        if portion and sum(len(d.input_ids) for d in portion) + len(document.input_ids) > TOKENS:
            yield portion
            portion = []
        portion.append(document)
    if portion:
        yield portion


@torch.no_grad()
def exposure(head: nn.Module, states: VerifierStates, depth: int) -> Exposure:
    """Counts of each document of a batch; documents are numbered from 0.

    A label outside the draft vocabulary is a miss at every depth. Where the text is not the verifier's argmax (a
    numerical tie, a sampled or foreign text) the draft before it still counts, but no run goes on across it: the tokens
    that follow are no longer the ones that were drafted.
    """
    P = len(states.last_index_P)
    documents = int(states.document_BT.max()) + 1
    counted_KP = supervised(states, depth)
    device = counted_KP.device
    # Label of (anchor p, depth k): the law of label row p + k; past the end nothing is counted.
    label_KP = (torch.arange(depth, device=device)[:, None] + torch.arange(P, device=device)).clamp_max(max(P - 1, 0))
    top_P = head.inverse_V[states.top_P]  # -1 outside the draft vocabulary
    greedy_P = states.top_P == states.input_ids_BT.flatten()[states.last_index_P + 1]

    choice_KP = torch.stack([_choices(head, out_PD) for out_PD in head.unroll(states, depth)])
    hit_KP = counted_KP & (choice_KP == top_P[label_KP])
    goes_on_KP = (hit_KP & greedy_P[label_KP]).cumprod(0).bool()
    tested_KP = torch.cat([counted_KP[:1], counted_KP[1:] & goes_on_KP[:-1]])
    true_KP = counted_KP & hit_KP[0][label_KP]  # the first draft of the anchor k rows later

    of_P = states.document_BT.flatten()[states.last_index_P]

    def by_document(what_KP: Tensor) -> np.ndarray:
        counts_NK = torch.zeros(documents, depth, dtype=torch.int64, device=device)
        return counts_NK.index_add_(0, of_P, what_KP.T.long()).cpu().numpy()

    return Exposure(
        counted=by_document(counted_KP),
        forced=by_document(true_KP),
        given=by_document(hit_KP),
        tested=by_document(tested_KP),
        own=by_document(tested_KP & hit_KP),
        true=by_document(tested_KP & true_KP),
    )


def _choices(head: nn.Module, out_PD: Tensor) -> Tensor:
    """Draft id of the best logit of each row, [P]."""
    rows = max(1, LOGITS // head.config.draft_vocab_size)
    return torch.cat([head.logits(part).argmax(-1) for part in out_PD.split(rows)])


# --- intervals over documents ---------------------------------------------------------------------------------


def draws(documents: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """How often each document is in each resample with replacement, [S, N]: one for all that is to be paired."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(documents, np.full(documents, 1 / documents), size=resamples)


def shares(hits_NK: np.ndarray, trials_NK: np.ndarray, draws_SN: np.ndarray | None = None) -> np.ndarray:
    """Pooled hits / trials of all documents, [1, K], or of each resample, [S, K]; nan without trials."""
    if draws_SN is None:
        draws_SN = np.ones((1, len(hits_NK)), dtype=np.int64)
    hits_SK, trials_SK = draws_SN @ hits_NK, draws_SN @ trials_NK
    return np.where(trials_SK > 0, hits_SK / np.maximum(trials_SK, 1), np.nan)


def intervals(samples_SK: np.ndarray) -> list[list[float] | None]:
    """95 % interval of each column over the resamples.

    None where one resample in a hundred has no value: then fewer than about five documents had anything to count, and
    drawing those few anew would show a spread that is far too small.
    """
    found = []
    for column in samples_SK.T:
        kept = column[~np.isnan(column)]
        enough = len(kept) > 0.99 * len(column)
        found.append([float(x) for x in np.percentile(kept, [2.5, 97.5])] if enough else None)
    return found


def accuracies(seen: Exposure, draws_SN: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The shares that the counts are counted for, [1, K], or of each resample, [S, K]."""
    return {
        "true_accuracy": shares(seen.true, seen.tested, draws_SN),
        "own_accuracy": shares(seen.own, seen.tested, draws_SN),
        "gap": shares(seen.true - seen.own, seen.tested, draws_SN),
        "teacher_forced": shares(seen.forced, seen.counted, draws_SN),
        "own_given_tokens": shares(seen.given, seen.counted, draws_SN),
    }


def described(values: dict[str, np.ndarray], samples: dict[str, np.ndarray]) -> dict[str, list]:
    """Each quantity as a list by depth, with its intervals under NAME_interval."""
    found = {}
    for name, value in values.items():
        spans = intervals(samples[name])
        found[name] = listed(value)
        found[f"{name}_interval"] = [None if x is None else both for x, both in zip(found[name], spans, strict=True)]
    return found


def listed(value_1K: np.ndarray) -> list[float | None]:
    """None where there was nothing to count."""
    return [None if np.isnan(x) else float(x) for x in value_1K[0]]


def exposure_record(seen: Exposure) -> dict:
    """One head's exposure bias as alpha.json has it: shares by depth with intervals over documents."""
    documents = len(seen.counted)
    draws_SN = draws(documents, RESAMPLES if documents >= ENOUGH else 0)
    shown = described(accuracies(seen), accuracies(seen, draws_SN))
    return {"counted": seen.counted.sum(0).tolist(), "tested": seen.tested.sum(0).tolist(), **shown}
