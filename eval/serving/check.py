"""make serve-check: real engines with our exports, against themselves without drafts and against our own loop.

python -m eval.serving.check runs=[outputs/eagle3_llama/TIME] engines=[vllm] depths=[3]

For each engine, head and draft length: whether the text is the engine's own, tau and acceptance by position as the
engine counts them beside our loop's on the same prompts, and the replay certificate. Chain, temperature 0.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import torch

from conf.cli import Outcome, main
from conf.errors import UserError
from conf.schema import DecodeConf, EvalCommandConf
from conf.terminal import TextConsole
from data.files import replacing, write_json
from eval.command import shown
from eval.measure import EvalSettings, PromptRun, run_prompts, use_threads
from eval.prompts import Prompt, load_prompts
from eval.serving.certificate import certify
from eval.serving.engine import Job, check_run, run_engine
from eval.serving.metrics import pooled, tally_of
from eval.serving.online import serve
from eval.serving.rows import BAR, HEADER, Row, cells, reason, record, row_of, row_of_server, table
from eval.serving.server import vllm_server
from eval.speculative.scorers import drafter_for
from eval.speculative.shapes import FixedTree
from eval.tables import markdown_table
from models import embedded
from models.export.formats import write_export
from models.export.native import StoredHead, VerifierCard, attach, check_verifier, read_head
from models.loading import FILE_DTYPES
from models.verifier import Verifier

log = logging.getLogger("eval.serving.check")  # not `__main__`, as which it is run
FILE_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Engine:
    """program: what must be there, below the engine's folder. formats: the export that it loads, by kind of head.

    worker: None is asked through its server. rule: how it counts a text's last call (eval.serving.metrics).
    """

    worker: str | None
    program: str
    formats: dict[str, str]
    rule: str = "whole"
    shows_drafts: bool = True


VLLM = {"eagle3": "vllm", "eagle1": "vllm", "medusa": "medusa"}
SERVER = "_server"  # behind the name of an engine that is asked over HTTP
ENGINES = {
    "vllm": Engine("vllm_worker.py", "bin/python", VLLM),
    "vllm_server": Engine(None, "bin/python", VLLM),
    "openvino": Engine("openvino_worker.py", "bin/python", {"eagle3": "openvino"}, "cut", shows_drafts=False),
    "llamacpp": Engine("llamacpp_worker.py", "build/bin/llama-server", {"eagle3": "gguf"}, "room"),
}


@main("serve_check")
def check(cfg) -> Outcome:
    """cfg: conf.schema.ServeCheckCommandConf. Raises UserError, with everything written, when a row does not pass."""
    if not cfg.runs:
        raise UserError("give the heads to check: runs=[outputs/eagle3_llama/TIME, ...]")
    if wrong := [depth for depth in cfg.depths if depth < 1]:
        raise UserError(f"depths must be 1 or more, found {wrong[0]}")
    if cfg.dtype != "float32":
        log.warning("in %s honest engines differ at near ties and may not pass: the check is for float32", cfg.dtype)
    homes = {name: home_of(name, Path(cfg.environments)) for name in cfg.engines}
    out = Path(cfg.out or f"outputs/serve-check/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    rows, file = [], out / "serve_check.json"
    for run in map(Path, [cfg.runs] if isinstance(cfg.runs, str) else cfg.runs):
        for row in check_head(cfg, run, homes, out):
            rows.append(row)
            write_json(file, {"rows": [record(row) for row in rows], "bar_percent": BAR})
            (out / "serve_check.md").write_text(markdown_table(HEADER, map(cells, rows)) + "\n")
    TextConsole(stderr=cfg.json, width=160).print(table(rows))
    if failed := [row for row in rows if not row.passes]:
        raise UserError(f"{len(failed)} of {len(rows)} rows do not pass, {reason(failed[0])}; all of it is in {file}")
    return Outcome(file, {"rows": [record(row) for row in rows], "serve_check_json": str(file)})


def home_of(name: str, environments: Path) -> Path:
    """The engine's folder. Raises UserError when there is no engine of that name, or it is not installed."""
    if name not in ENGINES:
        raise UserError(f"no engine '{name}'; there are: {', '.join(ENGINES)}")
    home = environments / name.removesuffix(SERVER)
    if not (home / ENGINES[name].program).is_file():
        raise UserError(f"expected {name} in {home}, found no {ENGINES[name].program}: make {home}/.done")
    return home.absolute()


def check_head(cfg, run: Path, homes: dict[str, Path], out: Path) -> Iterator[Row]:
    """All engines that load this kind of head, at every draft length; a row as soon as there is one."""
    stored = read_head(run)
    kind, card = stored.config.kind, stored.verifier
    homes = {name: home for name, home in homes.items() if kind in ENGINES[name].formats}
    if not homes:
        raise UserError(f"none of the engines {', '.join(cfg.engines)} loads a head of kind {kind}: leave {run} out")
    verifier = Verifier.load(card.name, dtype=cfg.dtype, device="cpu", aux_layers=list(stored.config.aux_layers))
    check_verifier(stored, verifier)
    head, prompts = attach(stored, verifier, verifier.dtype), load_prompts(verifier, cfg.prompts, cfg.limit)
    ours = {depth: our_loop(cfg, verifier, head, prompts, depth) for depth in cfg.depths}
    near = {layer + step for layer in stored.config.aux_layers for step in (-1, 0, 1)}
    layers = sorted(layer for layer in near if 0 <= layer <= card.num_layers)
    around = verifier.capturing(layers)
    job = Job(
        verifier=engine_source(card.name),
        head=None,
        method=kind,
        depth=max(cfg.depths),
        prompts=[list(prompt.input_ids) for prompt in prompts],
        max_new_tokens=cfg.max_new_tokens,
        stop_ids=list(verifier.eos_ids),
        dtype=cfg.dtype,
        threads=cfg.threads or 1,
        batch=cfg.batch,
    )
    for name, home in homes.items():
        engine, place = ENGINES[name], out / f"{name}-{kind}-{stored_hash(stored)}"
        with programs_of(home):
            write_export(stored, place / "head", engine.formats[kind], FILE_DTYPES[cfg.dtype], verifier)
        job = replace(job, head=str((place / "head").absolute()))
        if engine.worker is None:
            for depth in cfg.depths:
                log.info("%s: drafts of %d by %s", name, depth, shown(run))
                yield served(cfg, name, run, home / engine.program, replace(job, depth=depth), place / f"depth-{depth}")
            continue
        command = [str(home / engine.program)] if engine.program == "bin/python" else [sys.executable]
        more = {"verifier": verifier_gguf(home, job, card, out)} if name == "llamacpp" else {}
        more |= {"program": str(home / engine.program)}
        log.info("%s: %d prompts without drafts", name, len(prompts))
        plain = run_engine(command, engine.worker, replace(job, head=None), place / "plain", **more)
        check_run(plain, job, verifier.vocab_size, place / "plain")
        for depth in cfg.depths:
            log.info("%s: the same with drafts of %d by %s", name, depth, shown(run))
            job = replace(job, depth=depth)
            drafted = run_engine(command, engine.worker, job, place / f"depth-{depth}", **more)
            check_run(drafted, job, verifier.vocab_size, place / f"depth-{depth}")
            if engine.shows_drafts and drafted.rounds is None:
                raise UserError(f"expected {name} to tell its drafts, found none in {place / f'depth-{depth}'}")
            certificate = certify(around, head, job.prompts, drafted) if engine.shows_drafts else None
            by_rule = [tally_of(one.speculative, engine.rule, depth, cfg.max_new_tokens) for one in ours[depth]]
            texts = [one.speculative.tokens for one in ours[depth]]
            yield row_of(name, shown(run), job, plain, drafted, pooled(by_rule), texts, certificate)


def served(cfg, name: str, run: Path, python: Path, job: Job, place: Path) -> Row:
    """The same through the engine's OpenAI server, as `python -m eval serve=URL` sees it."""
    decode = DecodeConf(depth=job.depth, batch=cfg.batch, max_new_tokens=cfg.max_new_tokens, dtype=cfg.dtype)
    with vllm_server(python, job, place) as url:
        asked = EvalCommandConf(run=str(run), serve=url, serve_batch=cfg.batch, prompts=cfg.prompts, limit=cfg.limit,
                                decode=decode, out=str(place), threads=cfg.threads, json=cfg.json)  # fmt: skip
        return row_of_server(name, shown(run), job.method, serve(asked).values)


@contextmanager
def programs_of(home: Path) -> Iterator[None]:
    """An engine's own programs come first meanwhile: an export may need its converter."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(home / "bin"), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def verifier_gguf(home: Path, job: Job, card: VerifierCard, out: Path) -> str:
    """The verifier as a GGUF file, made by llama.cpp's converter in our own environment, which has what it imports."""
    file = out / f"verifier-{card.weights_hash[:12]}-{job.dtype}.gguf"
    if file.is_file():
        return str(file.absolute())
    out.mkdir(parents=True, exist_ok=True)
    [converter] = home.glob("*/llama.cpp/convert_hf_to_gguf.py")
    log.info("llama.cpp's converter reads the verifier")
    with replacing(file) as part:
        call = [sys.executable, str(converter), job.verifier, "--outfile", str(part), "--outtype"]
        done = subprocess.run([*call, FILE_TYPES[job.dtype]], capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise UserError(f"llama.cpp's converter refused the verifier: {last[:300]}")
    return str(file.absolute())


def our_loop(cfg, verifier, head, prompts: Sequence[Prompt], depth: int) -> list[PromptRun]:
    """The same prompts through our speculative loop."""
    settings = EvalSettings(FixedTree.chain(depth), max_new_tokens=cfg.max_new_tokens, batch=cfg.batch, baseline=False)
    drafter = drafter_for(head, settings.shape, settings.sampling)
    if drafter.depth < depth:
        raise UserError(f"expected {depth} or more heads, found {drafter.depth}: give depths=[{drafter.depth}]")
    with use_threads(cfg.threads):
        return run_prompts(verifier, drafter, prompts, settings, progress=True)


def stored_hash(stored: StoredHead) -> str:
    """Some letters that tell heads of one kind apart."""
    digest = hashlib.sha256()
    for name, tensor in sorted(stored.tensors.items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]


def engine_source(verifier: str) -> str:
    """The verifier as an engine finds it: a folder, or a hub name."""
    folder = embedded.folder() if verifier == embedded.NAME else Path(verifier).expanduser()
    return str(folder.absolute()) if folder.is_dir() else verifier


if __name__ == "__main__":
    check()
