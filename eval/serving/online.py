"""A running server beside our loop: the same prompts, the acceptance that each gets, and what is likely wrong.

    python -m eval serve=http://HOST:PORT run=DIR prompts=FILE [serve_model=NAME] [serve_batch=8]

Prompts go as token ids at temperature 0. The server's counters are read before and after; the loop then drafts chains
of the server's length for the same prompts, and is counted by the server's rule (eval.serving.metrics).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Group
from rich.table import Table

from conf.cli import Outcome
from conf.errors import UserError
from conf.terminal import TextConsole
from data.files import write_json
from eval.command import Candidate, fresh_folder, load_candidate, settings_of
from eval.counts import ratio
from eval.measure import EvalSettings, PromptRun, replay_prompts, run_prompts, use_threads
from eval.prompts import Prompt, load_prompts, read_suite
from eval.serving.client import Completion, Server
from eval.serving.metrics import Snapshot, Tally, depth_of, difference, pooled, tally_of
from eval.serving.suspects import suspects
from eval.serving.verdict import Evidence, Template, Verdict, compare_texts, judge, likely_causes, remarks
from eval.speculative.shapes import FixedTree
from eval.tables import number, span
from models.chat import render

log = logging.getLogger(__name__)
WARM_UP = 32  # tokens of the request that is sent twice before anything is counted
DEFINITIONS = {
    "rule": "what is counted of the last call of a text. whole: all of it, as in alpha.json (vLLM). room: drafts no "
    "longer than what may be handed out (llama.cpp). handed: tokens handed out, what was cut was rejected (SGLang). "
    "`ours` is counted by the server's rule.",
    "tau": "1 + accepted / drafts: tokens per verify call that had a draft.",
    "alpha": "accepted / tested drafts; null where drafts differ in length.",
    "accepted_by_position": "P(draft n accepted), over all drafts.",
    "tokens_per_second": "tokens handed out / seconds from first request to last answer, `serve_batch` under way at a "
    "time; ours: of the loop, decode.batch at a time, prefills included in both.",
    "verdict.by": "1 %: tau within 1 % and each position within 0.01, or two drafts. 95 % interval: of the loop, where "
    "texts differ and drafts are few.",
}


def serve(cfg) -> Outcome:
    """cfg: conf.schema.EvalCommandConf with `serve`. Writes serve.json into a new folder.

    Raises UserError, one line, for a server that can't be reached or compared with, before any prompt is sent.
    """
    settings = checked_settings(cfg)
    server, snapshot = Server.connect(cfg.serve, cfg.serve_model)
    try:
        verifier, candidate = load_candidate(cfg)
        prompts = load_prompts(verifier, cfg.prompts, cfg.limit)
        template = ask_template(server, verifier, cfg.prompts)
        warm, wavers = warm_up(server, verifier, prompts, settings)
        depth = server_depth(warm, settings.depth)
        settings = replace(settings, shape=FixedTree.chain(depth))
        if (most := candidate.drafter(settings).depth) < depth:
            raise UserError(f"expected a head that drafts {depth} tokens as the server does, found {most} at the most")
        prompts = fitting(server, verifier, prompts, settings)
        texts, seconds, tally, traffic = measure_server(server, verifier, prompts, settings, cfg.serve_batch)
    finally:
        server.close()
    runs = our_runs(verifier, candidate, prompts, settings)
    each = [tally_of(run.speculative, snapshot.engine.rule, depth, settings.max_new_tokens) for run in runs]
    evidence = Evidence(
        server=tally,
        ours=pooled(each),
        each=each,
        dtype=str(verifier.dtype).removeprefix("torch."),
        texts=compare_texts(verifier, runs, texts),
        wavers=wavers,
        template=template,
        traffic=traffic,
        trees=bool(warm.steps and warm.draft_tokens and warm.draft_tokens > warm.steps + 1),
    )
    verdict = judge(evidence)
    if not verdict.same:
        evidence = replace(evidence, faults=known_faults(verifier, candidate, runs, tally))
    run = Path(cfg.run or cfg.draft).expanduser()
    record = {
        "server": server.url,
        "model": server.model,
        "engine": snapshot.engine.name,
        "fingerprint": texts[0].fingerprint,
        "rule": snapshot.engine.rule,
        "head": candidate.name,
        "head_hash": candidate.hash,
        "verifier": verifier.name,
        "verifier_hash": verifier.weights_hash,
        "dtype": evidence.dtype,
        "prompts": [prompt.id for prompt in prompts],
        "max_new_tokens": settings.max_new_tokens,
        "depth": depth,
        "decode_depth": cfg.decode.depth,
        "measured": "replay" if settings.replay else "loop",
        **report(evidence, verdict, texts, runs, seconds),
        "definitions": DEFINITIONS,
    }
    folder = Path(cfg.out) if cfg.out else fresh_folder(run if cfg.run else Path("outputs") / "draft")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "serve.json", record)
    TextConsole(stderr=cfg.json).print(tables(record))
    return Outcome(folder / "serve.json", record)


def checked_settings(cfg) -> EvalSettings:
    """Greedy chains: what a server's counters can be compared with."""
    settings = replace(
        settings_of(cfg.decode, seed=cfg.seed, threads=cfg.threads, temperature=cfg.temperature),
        baseline=False,
        replay=cfg.replay,
    )
    if cfg.decode.mode != "chain" or not settings.sampling.greedy:
        raise UserError(
            f"serve= compares greedy chains, found decode={cfg.decode.mode} at temperature "
            f"{settings.sampling.temperature:g}: leave decode= and temperature= out"
        )
    if cfg.serve_batch < 1:
        raise UserError(f"serve_batch must be 1 or more, found {cfg.serve_batch}")
    if cfg.draft in ("none", "lookahead"):
        raise UserError(f"serve= compares drafts of a chain, found draft={cfg.draft}: give run=DIR")
    return settings


def ask_template(server: Server, verifier, names) -> Template:
    """Whether the server's chat template makes the ids of the first dialogue that ours makes of it."""
    suite = names if isinstance(names, str) else next(iter(names))
    messages = read_suite(suite)[0]["messages"]
    mine = render(verifier.tokenizer, messages, add_generation_prompt=True, today=True)  # as the server does
    theirs, count, asked = server.chat_prompt(messages)
    if count is None:
        return Template(None, f"the chat template could not be asked: {asked}")
    if theirs is not None and not all(token < verifier.vocab_size for token in theirs):
        return Template(False, f"{asked} makes token ids that are none of {verifier.name}'s: another tokenizer")
    if theirs is None:
        said = f"{asked} counts {count} prompt tokens, the head was trained with {len(mine)} for the same dialogue"
        return Template(count == len(mine), said)
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    decode = verifier.tokenizer.decode
    said = (
        f"{asked} makes {len(theirs)} tokens of a dialogue that was {len(mine)} in training; the first other one is "
        f"number {at}: {decode(theirs[at : at + 4])!r} for {decode(mine[at : at + 4])!r}"
    )
    return Template(list(theirs) == mine, "the same ids" if list(theirs) == mine else said)


def warm_up(server: Server, verifier, prompts: Sequence[Prompt], settings: EvalSettings) -> tuple[Snapshot, bool]:
    """The shortest prompt, twice: the counters after it, and whether the two texts differ.

    Raises UserError when nothing was drafted.
    """
    shortest = min(prompts, key=lambda prompt: len(prompt.input_ids)).input_ids
    length = min(WARM_UP, settings.max_new_tokens)
    one, other = (server.complete(shortest, length, verifier.eos_ids) for _ in range(2))
    snapshot, _ = server.settled()
    if not snapshot.speculates or not (snapshot.drafts or snapshot.accept_length):
        raise server.undrafted(snapshot)
    return snapshot, (one.text, one.token_ids) != (other.text, other.token_ids)


def server_depth(warm: Snapshot, wanted: int) -> int:
    """The server's draft length, with a line when it isn't the loop's setting."""
    depth = depth_of(warm)
    if depth is None:
        log.warning("the server doesn't tell how long its drafts are: the loop drafts decode.depth=%d", wanted)
    elif depth != wanted:
        log.info("the server drafts %d tokens, decode.depth is %d: the loop drafts %d as well", depth, wanted, depth)
    return depth or wanted


def fitting(server: Server, verifier, prompts: list[Prompt], settings: EvalSettings) -> list[Prompt]:
    """The prompts that leave room for a whole answer with its last draft, here and on the server."""
    positions = verifier.head_geometry["max_position_embeddings"]
    room = settings.prompt_room(min(positions, server.longest or positions))
    short = [prompt for prompt in prompts if len(prompt.input_ids) <= room]
    if not short:
        raise UserError(
            f"expected a prompt of at most {room} tokens ({room + settings.room} positions less the answer), found "
            f"{len(prompts)} prompts, none that short: lower decode.max_new_tokens or give other prompts"
        )
    if len(short) < len(prompts):
        log.info("left out %d prompts that leave no room for an answer", len(prompts) - len(short))
    return short


def measure_server(
    server: Server, verifier, prompts: Sequence[Prompt], settings: EvalSettings, batch: int
) -> tuple[list[Completion], float, Tally, str]:
    """(texts, seconds, what the server counted meanwhile, why that is not of these prompts alone or "")."""
    log.info("sending %d prompts to %s, %d at a time", len(prompts), server.url, batch)
    before, quiet = server.settled()
    retried = server.retried
    ids = [prompt.input_ids for prompt in prompts]
    texts, seconds = server.complete_all(ids, settings.max_new_tokens, verifier.eos_ids, batch)
    after, still = server.settled()
    tally, generated = difference(before, after)
    depth = depth_of(after) or settings.depth
    return texts, seconds, tally, traffic(tally, generated, texts, depth, quiet and still, server.retried - retried)


def traffic(
    tally: Tally, generated: int | None, texts: Sequence[Completion], depth: int, quiet: bool, retried: int
) -> str:
    """Why the counters can't be those of these answers alone, "" when they can.

    A call emits its accepted drafts and a token; a text has its prefill's token besides, and its last call may reach
    `depth` tokens past its end. An answer of one token has no call.
    """
    received = sum(text.tokens for text in texts)
    if not quiet:
        return "they kept moving while nothing was asked"
    if generated is not None and generated != received:
        return f"the server counts {generated} tokens, these answers have {received}" + (
            " (is there another replica behind this address?)" if generated < received else ""
        )
    if tally.drafts and tally.accepted is not None:
        emitted, rest = tally.drafts + tally.accepted, received - len(texts)
        if emitted > rest + depth * len(texts):
            return f"drafts and accepted tokens make {emitted}, these answers {rest} after their first tokens"
    return f"{retried} requests were sent more than once" if retried else ""


def our_runs(verifier, candidate: Candidate, prompts: Sequence[Prompt], settings: EvalSettings) -> list[PromptRun]:
    """The loop on the same prompts, or with `settings.replay` the same rounds along recorded texts."""
    decode = replay_prompts if settings.replay else run_prompts
    with use_threads(settings.threads):
        return decode(verifier, candidate.drafter(settings), prompts, settings, True)


def known_faults(verifier, candidate: Candidate, runs: Sequence[PromptRun], tally: Tally) -> list[str]:
    """The known faults of engines that would give the server's acceptance by position; none where it doesn't tell."""
    head = candidate.head
    if head is None or head.config.kind == "independent" or not tally.by_position:
        return []
    log.info("acceptance differs: running the known faults over the same texts")
    near = {layer + step for layer in head.config.aux_layers for step in (-1, 0, 1)}
    layers = sorted(layer for layer in near if 0 <= layer <= verifier.num_layers)
    around = verifier.capturing(layers)
    prompts, texts = [run.prompt.input_ids for run in runs], [run.speculative.tokens for run in runs]
    return suspects(around, head, prompts, texts, tally.rates)


def report(
    evidence: Evidence,
    verdict: Verdict,
    texts: Sequence[Completion],
    runs: Sequence[PromptRun],
    seconds: float,
) -> dict:
    """The part of serve.json that is measured."""
    ours = sum(run.speculative.prefill_seconds + run.speculative.seconds for run in runs)
    return {
        "verdict": asdict(verdict),
        "causes": [] if verdict.same else likely_causes(evidence),
        "remarks": remarks(evidence) if verdict.same else [],
        "server_counts": evidence.server.to_dict(),
        "our_counts": evidence.ours.to_dict(),
        "intervals": {"tau": evidence.tau_interval, "accepted_by_position": evidence.rate_intervals},
        "tokens_per_second": {
            "server": ratio(sum(text.tokens for text in texts), seconds),
            "ours": ratio(sum(len(run.speculative.tokens) for run in runs), ours),
        },
        "template": asdict(evidence.template),
        "identical_texts": len(texts) - len(evidence.texts),
        "differences": [asdict(text) for text in evidence.texts],
    }


def tables(record: dict) -> Group:
    """serve.json for the terminal: the numbers side by side, the verdict, and what may be wrong."""
    title = (
        f"{record['engine']} at {record['server']} beside our {record['measured']}: {len(record['prompts'])} prompts, "
        f"chain of {record['depth']}, greedy"
    )
    table = Table(title=title)
    for name in ("", "server", "ours", "difference", "95 % of ours"):
        table.add_column(name, justify="right" if name else "left")
    theirs, ours, spans = record["server_counts"], record["our_counts"], record["intervals"]

    def row(name: str, a: float | None, b: float | None, interval=None, digits: int = 3) -> None:
        apart = "-" if a is None or b is None else f"{a - b:+.{digits}f}"
        table.add_row(name, number(a, digits), number(b, digits), apart, span(interval))

    row("tau", theirs["tau"], ours["tau"], spans["tau"])
    row("alpha", theirs["alpha"], ours["alpha"])
    row("accepted / drafted", theirs["accepted_share"], ours["accepted_share"])
    rates = [counts["accepted_by_position"] or [] for counts in (theirs, ours)]
    for k, interval in enumerate(spans["accepted_by_position"]):
        row(f"draft {k + 1} accepted", *(rate[k] if k < len(rate) else None for rate in rates), interval)
    row("drafts", theirs["drafts"], ours["drafts"], digits=0)
    row("tokens per second", *(record["tokens_per_second"][name] for name in ("server", "ours")), digits=1)
    same, total = record["identical_texts"], len(record["prompts"])
    lines = [f"{same} of {total} texts are the verifier's own", record["verdict"]["line"]]
    lines += [f"  {place}. {cause}" for place, cause in enumerate(record["causes"], start=1)]
    lines += [f"but {remark}" for remark in record["remarks"]]
    if record["template"]["same"] is None:
        lines.append(record["template"]["said"])
    return Group(table, *lines)
