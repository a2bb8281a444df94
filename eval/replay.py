"""A drafter on the verifier's recorded greedy text: the loop's rounds without the loop's verify calls.

At temperature 0 the loop's text is the verifier's own, whoever drafts. So the text is recorded once, and each drafter
is then led along it: it drafts, what equals the text is accepted, and it is handed the states of the rows that a verify
call would have accepted. tau and n-alpha are the loop's, up to numerical ties; the verifier's times are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from conf.paths import cache_dir
from data.files import key_of, read_json, write_json
from data.progress import progress_bar
from eval.prompts import Prompt
from eval.speculative.drafter import Drafter, Features
from eval.speculative.loop import Decoded, Round, cut

BATCH = 64  # prompts whose text is written at once


@dataclass(frozen=True)
class Recording:
    """tokens: the greedy text, with enough behind its end for the last draft. length: how many are handed out."""

    prompt: Prompt
    tokens: tuple[int, ...]
    length: int
    finish: str


def record(verifier, prompts: Sequence[Prompt], max_new_tokens: int, depth: int) -> list[Recording]:
    """The verifier's greedy text of each prompt and `depth` + 1 tokens past its end, from the cache if it is there.

    Written in one batch, whose sums have another order than a single row's: near a tie it may be another greedy text
    than `plain_decode` gives.
    """
    settings = {
        "verifier": verifier.weights_hash,
        "tokenizer": verifier.tokenizer_hash,
        "dtype": str(verifier.dtype),
        "prompts": [list(prompt.input_ids) for prompt in prompts],
        "tokens": max_new_tokens + depth + 1,
    }
    file = cache_dir("recordings") / f"{key_of(settings)[:16]}.json"
    texts = read_json(file).get("texts")
    if texts is None:
        texts = []
        with progress_bar() as bar:
            task = bar.add_task("verifier's text", total=len(prompts), rate="")
            for first in range(0, len(prompts), BATCH):
                some = prompts[first : first + BATCH]
                texts += greedy_texts(verifier, [list(p.input_ids) for p in some], settings["tokens"])
                bar.update(task, advance=len(some))
        write_json(file, {"name": verifier.name, "texts": texts})
    recordings = []
    for prompt, text in zip(prompts, texts, strict=True):
        handed_out, finish = cut(text, verifier.eos_ids, max_new_tokens)
        recordings.append(Recording(prompt, tuple(text[: len(handed_out) + depth + 1]), len(handed_out), finish))
    return recordings


@torch.no_grad()
def greedy_texts(verifier, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """`tokens` greedy tokens after each prompt, end-of-turn or not, all prompts in one batch."""
    cache = verifier.new_cache(len(prompts), max(map(len, prompts)) + tokens)
    cache.length_B = []
    last_B = []
    for row, ids in enumerate(prompts):
        alone = verifier.new_cache(1, len(ids))
        prompt_1T = torch.tensor([ids], device=verifier.device)
        last_B.append(verifier.decode(alone, prompt_1T, logits="last", capture=False).logits[0].argmax(-1))
        cache.place(row, alone)
    chosen = [torch.stack(last_B)]
    for _ in range(tokens - 1):
        decoded = verifier.decode(cache, chosen[-1][:, None], logits="last", capture=False)
        chosen.append(decoded.logits.argmax(-1))
    return torch.stack(chosen, dim=1).tolist()


@torch.no_grad()
def states_of(verifier, recording: Recording) -> Features:
    """The verifier's states at every row of prompt and text."""
    ids_1T = torch.tensor([[*recording.prompt.input_ids, *recording.tokens]])
    captured = verifier.capture(ids_1T, torch.zeros_like(ids_1T), torch.arange(ids_1T.shape[1])[None])
    return Features(captured.aux_BTAD[0], captured.last_BTD[0])


def replay(drafter: Drafter, recording: Recording, states: Features, depth: int, seed: int = 0) -> Decoded:
    """The rounds that `speculate` would have had at temperature 0, with this drafter and this text."""
    prompt, text, rows = list(recording.prompt.input_ids), list(recording.tokens), len(recording.prompt.input_ids)

    def between(start: int, stop: int) -> Features:
        return Features(states.aux_TAD[start:stop], states.last_TD[start:stop])

    generator = torch.Generator().manual_seed(seed)
    drafter.start(prompt, text[0], between(0, rows), rows + len(text) + 2 * (depth + 1))
    rounds, emitted = [], 1
    while emitted < recording.length:
        draft = drafter.draft(depth, generator)
        drafted = draft.tokens_N.tolist()
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == text[emitted + accepted]:
            accepted += 1
        new = text[emitted : emitted + accepted + 1]
        done = rows + emitted - 1  # rows that the verifier had processed
        drafter.accepted(new, between(done, done + len(new)))
        emitted += len(new)
        spent = (draft.first_seconds or 0.0) + (draft.step_seconds or 0.0) * max(0, len(drafted) - 1)
        rounds.append(
            Round(
                tuple(drafted),
                draft.depth,
                accepted,
                tuple(new),
                draft_seconds=spent,
                draft_first_seconds=draft.first_seconds,
                draft_step_seconds=draft.step_seconds,
                seconds=spent,
            )
        )
    return Decoded(text[: recording.length], recording.finish, 0.0, sum(r.seconds for r in rounds), rounds=rounds)
