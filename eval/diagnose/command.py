"""What `python -m eval.diagnose` does: replays the verifier's recorded text and asks why each call ended there."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path

from conf.cli import Outcome
from conf.errors import UserError
from conf.terminal import TextConsole
from data.files import write_json
from data.progress import progress_bar
from eval.command import Candidate, candidate_of, load_candidate, load_verifier, settings_of
from eval.diagnose.evidence import examine
from eval.diagnose.record import Traced, diagnosis
from eval.diagnose.show import lines, plot, tables
from eval.diagnose.templates import Templates, templates_of
from eval.measure import EvalSettings, use_threads
from eval.prompts import Prompt, questions
from eval.replay import Recording, record, states_of
from models.chat import render
from models.export.native import load_head, read_head
from models.export.warm import is_published
from models.verifier import Verifier

log = logging.getLogger(__name__)


def run(cfg) -> Outcome:
    """cfg: conf.schema.DiagnoseCommandConf. Writes diagnose.json and diagnose.png into a new folder.

    Raises UserError for trees, for Lookahead, for a threshold that is none, and as `python -m eval` does.
    """
    if cfg.decode.mode != "chain":
        raise UserError(f"misses are followed along a chain: expected decode=chain, found {cfg.decode.mode}")
    if cfg.draft in ("lookahead", "none"):
        raise UserError(f"expected a drafter whose drafts can be replayed, found draft={cfg.draft}")
    if not 0 <= cfg.unlikely <= 1:
        raise UserError(f"expected unlikely, a probability, in [0, 1], found {cfg.unlikely}")
    settings = settings_of(cfg.decode, seed=cfg.seed, threads=cfg.threads, temperature=0.0)
    verifier, candidate, templates = load(cfg)
    with use_threads(cfg.threads):
        traced = trace(verifier, candidate, templates, settings, cfg)
    values = diagnosis(cfg, verifier, candidate, templates, traced, candidate.drafter(settings).depth)
    folder = Path(cfg.out) if cfg.out else _new_folder(Path(cfg.run).expanduser() if cfg.run else Path("outputs/draft"))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "diagnose.json", values)
    TextConsole(stderr=cfg.json).print(*tables(values), *lines(values), sep="\n")
    if cfg.plots:
        plot(values, folder / "diagnose.png")
    return Outcome(folder / "diagnose.json", values)


def load(cfg) -> tuple[Verifier, Candidate, Templates]:
    """As eval.command.load_candidate, but a head whose chat template isn't the verifier's is taken with `template`."""
    run = Path(cfg.run).expanduser() if cfg.run else None
    if run is None or is_published(run):
        verifier, candidate = load_candidate(cfg)
        return verifier, candidate, templates_of(verifier.tokenizer, None, cfg.template)
    given = {name: getattr(cfg, f"verifier_{name}") for name in ("source", "device", "revision", "trust_remote_code")}
    stored = read_head(run)
    verifier = load_verifier(run, stored, cfg.decode.dtype, given)
    named = stored.verifier.template_hash if stored.verifier.weights_hash == verifier.weights_hash else None
    templates = templates_of(verifier.tokenizer, named, cfg.template)
    if templates.training is not None:
        verifier.tokenizer = templates.training  # the one that the head's hashes are of
    return verifier, candidate_of(load_head(run, verifier, verifier.dtype), run), templates


def trace(verifier, candidate: Candidate, templates: Templates, settings: EvalSettings, cfg) -> Traced:
    """Replays every prompt's recorded text."""
    rows = questions(cfg.prompts, cfg.limit)
    served = [_prompt(row, templates.serving) for row in rows]
    meant = [_prompt(row, templates.training) if templates.training is not None else None for row in rows]
    room = settings.prompt_room(verifier.head_geometry["max_position_embeddings"])
    fits = [max(len(p.input_ids) for p in pair if p) <= room for pair in zip(served, meant, strict=True)]
    skipped = [prompt.id for prompt, ok in zip(served, fits, strict=True) if not ok]
    if skipped:
        log.info(f"skipped {len(skipped)} prompts that leave no room for an answer: {skipped[:5]}")
    served, meant = ([p for p, ok in zip(prompts, fits, strict=True) if ok] for prompts in (served, meant))
    if not served:
        raise UserError(f"expected prompts of at most {room} tokens, found none: lower decode.max_new_tokens")
    drafter = candidate.drafter(settings)
    temperature = cfg.temperature or cfg.decode.temperature or 1.0
    tested, calls, undrafted = [], 0, 0
    recordings = record(verifier, served, settings.max_new_tokens, drafter.depth)
    with progress_bar() as bar:
        task = bar.add_task("diagnosing", total=len(recordings), rate="prompts")
        for recording, prompt in zip(recordings, meant, strict=True):
            other = None
            if prompt is not None:
                again = Recording(prompt, recording.tokens, recording.length, recording.finish)
                other = (again, states_of(verifier, again))
            states = states_of(verifier, recording)
            found, of_text = examine(verifier, drafter, candidate.head, recording, states, temperature, other)
            tested += found
            calls += len(of_text.starts)
            undrafted += of_text.undrafted
            bar.update(task, advance=1)
    return Traced(tested, calls, undrafted, len(served), skipped)


def _prompt(row: dict, tokenizer) -> Prompt:
    return Prompt(row["id"], row["category"], tuple(render(tokenizer, row["messages"], add_generation_prompt=True)))


def _new_folder(run: Path) -> Path:
    base = run / f"diagnose-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    return next(path for n in range(10**6) if not (path := Path(f"{base}-{n}" if n else base)).exists())
