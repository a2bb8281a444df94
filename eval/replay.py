"""A drafter on the verifier's recorded greedy text: the loop's rounds without the loop's verify calls.

At temperature 0 the loop's text is the verifier's own, whoever drafts. So the text is recorded once, and each drafter
is then led along it: it drafts, what equals the text is accepted, and it is handed the states of the rows that a verify
call would have accepted. tau and n-alpha are the loop's, up to numerical ties.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from conf.paths import cache_dir
from data.files import key_of, only_writer, read_json, replacing, write_json
from data.generate import Generation, Request, generate
from data.progress import Meter
from eval.prompts import Prompt
from eval.speculative.acceptance import accept_points
from eval.speculative.drafter import Drafter, Features
from eval.speculative.loop import Decoded, cut, round_of

BATCH = 64  # texts written at once


@dataclass(frozen=True)
class Recording:
    """tokens: the greedy text, with enough behind its end for the last draft. length: how many are handed out."""

    prompt: Prompt
    tokens: tuple[int, ...]
    length: int
    finish: str


def record(verifier, prompts: Sequence[Prompt], max_new_tokens: int, depth: int) -> list[Recording]:
    """The verifier's greedy text of each prompt, from the cache where it is there, and `depth` + 1 tokens past its end.

    The loop drafts and tests whole drafts even where the text is cut inside one, so the last round asks what the
    verifier says behind an end-of-turn token or the length: up to `depth` drafts and its own token.
    Written in batches, whose sums have another order than a single row's: near a tie it may be another greedy text
    than `plain_decode` gives. Texts are kept, so every drafter meets the same.
    """
    folder, spare = _folder(verifier), depth + 1
    with only_writer(folder):
        files = [_text_file(folder, prompt, max_new_tokens) for prompt in prompts]
        missing = {file: prompt for file, prompt in zip(files, prompts, strict=True) if _spare(file) < spare}

        def keep(index: int, text: list[int]) -> None:
            write_json(list(missing)[index], {"verifier": verifier.name, "spare": spare, "tokens": text})

        write_greedily(verifier, [list(p.input_ids) for p in missing.values()], max_new_tokens, spare, keep)
        texts = [read_json(file)["tokens"] for file in files]
    recordings = []
    for prompt, text in zip(prompts, texts, strict=True):
        handed_out, finish = cut(text, verifier.eos_ids, max_new_tokens)
        recordings.append(Recording(prompt, tuple(text[: len(handed_out) + spare]), len(handed_out), finish))
    return recordings


def write_greedily(
    verifier, prompts: Sequence[list[int]], max_new_tokens: int, spare: int, done: Callable[[int, list[int]], None]
) -> None:
    """Greedy tokens after each prompt until an end-of-turn token or the length, and `spare` or more past that end.

    done: told the index of each prompt and its text, as soon as there is one.
    """
    if not prompts:
        return
    begun: dict[str, list[int]] = {}

    def go_on(written: Generation) -> Request | None:
        """Past an end-of-turn token."""
        begun[written.id] = written.output_ids
        if written.finish_reason == "stop":
            return Request(written.id, written.output_ids[-1:], spare, stop_ids=frozenset())
        done(int(written.id), written.output_ids)
        return None

    longest = max_new_tokens + spare
    rest = generate(
        verifier,
        [Request(str(index), ids, then=go_on) for index, ids in enumerate(prompts)],
        max_new_tokens=longest,
        batch_size=min(BATCH, len(prompts)),
        capacity=max(map(len, prompts)) + longest + spare,
        meter=Meter("verifier's text", len(prompts), lambda: (len(begun), f"{len(begun)} of {len(prompts)} texts")),
    )
    for spares in rest:
        done(int(spares.id), begun[spares.id] + spares.output_ids)


@torch.no_grad()
def states_of(verifier, recording: Recording) -> Features:
    """The verifier's states at every row of prompt and text: one forward, or none where they are in the cache.

    They are kept for each choice of captured layers, unless they would fill the disk.
    """
    ids, folder = [*recording.prompt.input_ids, *recording.tokens], _folder(verifier)
    layers = list(verifier.aux_layers)
    file = folder / f"{key_of({'ids': ids, 'aux_layers': layers})[:16]}.safetensors"
    if file.is_file():
        states = load_file(file, device=str(verifier.device))
        return Features(states["aux"][None], states["last"][None])
    ids_1T = torch.tensor([ids])
    captured = verifier.capture(ids_1T, torch.zeros_like(ids_1T), torch.arange(len(ids))[None])
    states = Features(captured.aux_BTAD, captured.last_BTD)
    if 2 * (states.aux_BTAD.nbytes + states.last_BTD.nbytes) < shutil.disk_usage(folder).free:
        with replacing(file) as temporary:
            save_file({"aux": states.aux_BTAD[0].contiguous(), "last": states.last_BTD[0].contiguous()}, temporary)
    return states


def _folder(verifier) -> Path:
    """Where this verifier's recordings are kept."""
    settings = {
        "verifier": verifier.weights_hash,
        "tokenizer": verifier.tokenizer_hash,
        "eos_ids": sorted(verifier.eos_ids),
        "dtype": str(verifier.dtype),
    }
    return cache_dir("recordings", key_of(settings)[:16])


def _text_file(folder: Path, prompt: Prompt, max_new_tokens: int) -> Path:
    return folder / f"{key_of({'prompt': list(prompt.input_ids), 'max_new_tokens': max_new_tokens})[:16]}.json"


def _spare(file: Path) -> int:
    """How many tokens past its end the kept text has; 0 without one."""
    return read_json(file).get("spare", 0)


def replay(drafter: Drafter, recording: Recording, states: Features) -> Decoded:
    """The rounds that `speculate` would have had at temperature 0, with this drafter and this text.

    Of the times, only those of the drafts are there.
    """
    prompt, text, rows = list(recording.prompt.input_ids), list(recording.tokens), len(recording.prompt.input_ids)
    assert len(text) > recording.length + drafter.depth, "the recording is too short for drafts of this depth"

    def between(start: int, stop: int) -> Features:
        return Features(states.aux_BTAD[:, start:stop], states.last_BTD[:, start:stop])

    drafter.start([prompt], text[:1], between(0, rows), rows + len(text))
    rounds, emitted = [], 1
    while emitted < recording.length:
        draft = drafter.draft(None)
        rest = text[emitted:]
        [verdict] = accept_points(draft.nodes_B, lambda at, level, rest=rest: [rest[level]])
        new = rest[: len(verdict.nodes) + 1]
        done = rows + emitted - 1  # rows that the verifier had processed
        drafter.accepted([new], between(done, done + len(new)), None)
        emitted += len(new)
        times = {"draft_first_seconds": draft.first_seconds, "draft_step_seconds": draft.step_seconds}
        rounds.append(round_of(draft.nodes_B[0], verdict, new, **times))
    return Decoded(text[: recording.length], recording.finish, 0.0, 0.0, rounds=rounds)
