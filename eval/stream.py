"""One answer as it comes: the accepted drafts in green, what the verifier had to say itself plain.

    python -m eval.stream run=outputs/eagle3_llama/TIME prompt="Why do tides come twice a day?"
    echo "Write a haiku, then explain it." | python -m eval.stream draft=prompt_lookup verifier_source=smollm2

The words come from `eval.speculative.loop.speculate`, a generator of rounds; json=true prints all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from rich.text import Text

from conf.cli import Outcome, main
from conf.errors import UserError, printable
from conf.terminal import KEPT, TextConsole
from eval.command import load_candidate, settings_of
from eval.counts import Counts
from eval.measure import use_threads
from eval.speculative.loop import Round, cut, speculate
from models.chat import render

DRAFTED = "bold green"


def stream(cfg) -> Outcome:
    """cfg: conf.schema.StreamCommandConf. Writes to the terminal; no file.

    Raises UserError for an empty prompt, one that leaves no room for an answer, or a batch.
    """
    if cfg.decode.batch != 1:
        raise UserError(f"a stream is one answer: expected decode.batch=1, found {cfg.decode.batch}")
    settings = settings_of(cfg.decode, seed=cfg.seed, threads=cfg.threads, temperature=cfg.temperature)
    messages = [{"role": "user", "content": asked(cfg.prompt)}]
    verifier, candidate = load_candidate(cfg)
    ids = render(verifier.tokenizer, messages, add_generation_prompt=True)
    room = settings.prompt_room(verifier.head_geometry["max_position_embeddings"])
    if len(ids) > room:
        raise UserError(f"expected a prompt of at most {room} tokens, found {len(ids)}: lower decode.max_new_tokens")
    console, rounds, tokens = TextConsole(stderr=cfg.json), [], []
    with use_threads(settings.threads):
        calls = speculate(
            verifier,
            candidate.drafter(settings),
            [ids],
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            seed=settings.seed,
        )
        for call, kept in as_kept(calls, verifier.eos_ids, settings.max_new_tokens):
            rounds.append(call)
            for piece, drafted in pieces(verifier.tokenizer, tokens, kept, call.accepted):
                console.print(words(piece, drafted), end="", soft_wrap=True)
            tokens += kept
    counts, seconds = Counts(), sum(call.seconds for call in rounds[1:])
    for call in rounds[1:]:
        counts.add(call)
    rate = (len(tokens) - 1) / seconds if seconds else None
    console.print(f"\n\n{summary(len(tokens), counts, rate)}", style="dim")
    text = verifier.tokenizer.decode(tokens, skip_special_tokens=True)
    values = {"text": text, "tokens": tokens, "tau": counts.tau, "tokens_per_second": rate}
    return Outcome(None, values | {"rounds": [asdict(call) for call in rounds]})


def words(piece: str, drafted: bool) -> Text:
    """A piece of the answer as the terminal shows it: text, whatever codes or markup the model wrote."""
    return Text(printable(piece, KEPT), style=DRAFTED if drafted else "")


def asked(prompt: str | None) -> str:
    """The prompt as given, else what standard input holds."""
    if prompt is None:
        if sys.stdin.isatty():
            print("type a prompt, then Ctrl-D:", file=sys.stderr)
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise UserError('expected a prompt, found none: prompt="..." or words on standard input')
    return prompt.strip()


def as_kept(calls: Iterable[Round], eos_ids: tuple[int, ...], max_new_tokens: int) -> Iterator[tuple[Round, list[int]]]:
    """Each round of one sequence with those of its tokens that the text keeps."""
    left = max_new_tokens
    for call in calls:
        kept, finish = cut(list(call.emitted), eos_ids, left)
        left -= len(kept)
        yield call, kept
        if finish == "stop" or not left:
            return


def pieces(tokenizer, before: Sequence[int], new: Sequence[int], drafted: int) -> Iterator[tuple[str, bool]]:
    """The words that each new token adds, and whether it was drafted: the first `drafted` were.

    A character that takes several tokens appears with its last one.
    """

    def read(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")

    said = read(before)
    for n in range(len(new)):
        now = read([*before, *new[: n + 1]])
        yield now[len(said) :], n < drafted
        said = now


def summary(tokens: int, counts: Counts, rate: float | None) -> str:
    """One line on how the text came about."""
    if counts.tau is None:
        return f"{tokens} tokens, no verify call after the prompt's"
    drafts = f"{counts.accepted} of {counts.drafted} drafts accepted"
    return f"{tokens} tokens in {counts.verify_calls} verify calls: {drafts}, tau {counts.tau:.2f}, {rate:.1f} tokens/s"


if __name__ == "__main__":
    main("stream")(stream)()
