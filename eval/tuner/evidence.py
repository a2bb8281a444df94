"""What is known of a draft: acceptance and times of a run, or of a running server's counters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from conf.errors import UserError
from conf.parse import json_file
from conf.workload import WorkloadConf
from eval.compare import read_alpha
from eval.counts import ratio, wilson
from eval.serving.client import Server
from eval.serving.metrics import Snapshot, Tally, depth_of, difference, read
from eval.theory.model import equal_alpha
from eval.tuner.engines import FAMILIES
from eval.tuner.published import Profile
from eval.tuner.swept import Swept, read_sweep, remarks
from models.export.native import CONFIG

UNSURE = 0.05  # relative, of an acceptance that has no counts by position
ONE_WAY = "run=DIR, or metrics=FILE, or neither"


@dataclass(frozen=True)
class Evidence:
    """What was measured; all None where nothing was.

    lookup: prompt lookup on the same texts. record: the values of alpha.json. tree: level hit rates and nodes of a
    measured tree. card: verifier, as the head names it (weights_hash, tokenizer_hash). metrics_of: a server's name.
    swept: a sweep of the run's head. heated: profiles of that, by temperature. remarks: on what was read.
    """

    profile: Profile | None = None
    lookup: Profile | None = None
    record: dict | None = None
    tree: tuple[Profile, int] | None = None
    card: dict | None = None
    metrics_of: str | None = None
    swept: Swept | None = None
    heated: tuple[Profile, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def measured(self) -> dict[str, Profile]:
        """By family."""
        return {profile.family: profile for profile in (self.profile, self.lookup) if profile}

    def profiles(self, family: str) -> list[Profile]:
        """Of all measured temperatures; at its own the run's stands before the sweep's."""
        own = self.measured.get(family)
        some = [other for other in self.heated if other.family == family]
        return [own, *(other for other in some if other.temperature != own.temperature)] if own else some


def evidence_of(cfg) -> Evidence:
    """cfg: conf.schema.TunerCommandConf. Raises UserError."""
    if cfg.run is not None and cfg.metrics is not None:
        raise UserError(f"expected {ONE_WAY}, found both")
    if cfg.family is not None and cfg.family not in FAMILIES:
        raise UserError(f"no family '{cfg.family}'; there are: {', '.join(FAMILIES)}")
    if cfg.tree is not None and cfg.run is None:
        raise UserError("tree=DIR stands beside the run it is of: give run=DIR too, measured as a chain")
    if cfg.sweep is not None and cfg.run is None:
        raise UserError("sweep=FILE stands beside the run whose head it is of: give run=DIR too, measured as a chain")
    if cfg.metrics is not None:
        return _of_metrics(cfg)
    return Evidence() if cfg.run is None else _of_run(cfg)


def _of_run(cfg) -> Evidence:
    values = read_alpha(cfg.run)
    if values["nodes"] != values["depth"]:
        raise UserError(
            f"expected a measured chain in {cfg.run}, found a {values['decode']} of {values['nodes']} nodes: give it "
            "as tree=DIR, beside a run measured with decode=chain"
        )
    stored = _head_of(Path(cfg.run))
    profile = _profile(values, _family(cfg, values, stored), f"n-alpha of {cfg.run}")
    tree = None
    if cfg.tree is not None:
        other = read_alpha(cfg.tree)
        if (other["head_hash"], other["verifier_hash"]) != (values["head_hash"], values["verifier_hash"]):
            raise UserError(f"expected the same head and verifier in {cfg.run} and {cfg.tree}, found others")
        if other["nodes"] <= other["depth"]:
            raise UserError(f"expected a measured tree in {cfg.tree}, found a chain: measure it with decode=tree")
        tree = _profile(other, profile.family, f"level hit rates of {cfg.tree}"), other["nodes"]
    card = {"weights_hash": values["verifier_hash"]} | (stored["verifier"] if stored else {})
    evidence = Evidence(profile, _lookup(values, profile), values, tree, card)
    if cfg.sweep is not None:
        return _with_sweep(evidence, read_sweep(cfg.sweep, values), cfg.workload)
    beside = max(Path(cfg.run).glob("sweep-*/sweep.json"), key=lambda file: file.stat().st_mtime, default=None)
    said = () if beside is None else (f"a sweep lies beside the run: sweep={beside.parent} tunes by it too",)
    return replace(evidence, remarks=said)


def _with_sweep(evidence: Evidence, swept: Swept, load: WorkloadConf) -> Evidence:
    own, rows = evidence.profile, [row.alpha_values for row in swept.by_temperature(load)]
    heated = [_profile(row, own.family, f"n-alpha of {swept.file}, N={row['depth']}") for row in rows]
    if evidence.lookup:
        heated += filter(None, (_lookup(row, own) for row in rows))
    known = {(profile.family, profile.temperature): profile for profile in evidence.measured.values()}
    pairs = [(known[key], other) for other in heated if (key := (other.family, other.temperature)) in known]
    said = remarks(swept, evidence.record, pairs)
    return replace(evidence, swept=swept, heated=tuple(heated), remarks=tuple(said))


def _profile(values: dict, family: str, source: str) -> Profile:
    point = tuple(takewhile(lambda a: a is not None, values["alpha_by_depth"]))
    if not point:
        raise UserError(f"expected tested drafts for {source}, found none: measure it on more prompts")
    spans = values["intervals"]["alpha_by_depth"][: len(point)]
    low, high = (tuple(span[side] for span in spans) for side in (0, 1))
    tested = values["tested_by_depth"][0]
    return Profile(family, point, low, high, "measured", f"{source}, {tested} calls", values["temperature"])


def _lookup(values: dict, profile: Profile) -> Profile | None:
    """Prompt lookup as alpha.json has it: tau at the run's depth, on the same texts."""
    tau, depth = values["prompt_lookup_tau"], values["depth"]
    alpha = None if tau is None else equal_alpha(tau, depth)
    if profile.family == "prompt_lookup" or alpha is None:
        return None
    source = (
        f"prompt lookup on the same texts, tau {tau:.3f} at N={depth} (repetition {values['repetition_rate'] or 0:.0%})"
    )
    return _equal("prompt_lookup", alpha, depth, source, values["temperature"])


def _equal(family: str, alpha: float, depth: int, source: str, temperature: float) -> Profile:
    spread = [min(1.0, alpha * (1 + sign * UNSURE)) for sign in (0, -1, 1)]
    return Profile(family, *((a,) * depth for a in spread), "measured", source, temperature)


def _head_of(run: Path) -> dict | None:
    """The head's own config.json: of the run, or of the one that an evaluation lies in."""
    folder = run if run.is_dir() else run.parent
    for file in (folder / "head" / CONFIG, folder.parent / "head" / CONFIG):
        if file.is_file():
            values = json_file(file)
            if values.get("head") in FAMILIES and isinstance(values.get("verifier"), dict):
                return values
    return None


def _family(cfg, values: dict, stored: dict | None) -> str:
    name = cfg.family or (stored["head"] if stored else values["head"])
    if name not in FAMILIES:
        raise UserError(f"{cfg.run} doesn't say what kind of draft it is: give family={'|'.join(FAMILIES)}")
    return name


def _of_metrics(cfg) -> Evidence:
    places = [cfg.metrics] if isinstance(cfg.metrics, str) else list(cfg.metrics)
    if not 1 <= len(places) <= 2 or not all(isinstance(place, str) for place in places):
        raise UserError(f"expected metrics=FILE|URL, or metrics=[before,after], found {cfg.metrics}")
    load = cfg.workload
    family = cfg.family or (load.heads[0] if len(load.heads) == 1 else None)
    if family is None:
        raise UserError(f"metrics don't say what drafts: give family={'|'.join(FAMILIES)}")
    *earlier, last = [_snapshot(place) for place in places]
    if earlier and earlier[0].engine != last.engine:
        raise UserError(f"expected two pages of one engine, found {earlier[0].engine.name} and {last.engine.name}")
    tally, depth = _tally(last, earlier[0] if earlier else None), depth_of(last)
    span = "between the two pages" if earlier else "since the server's start"
    source = f"{last.engine.name}'s counters {span}"
    return Evidence(_from_tally(tally, depth, last, family, source, load.temperature), metrics_of=last.engine.name)


def _snapshot(place: str) -> Snapshot:
    if place.startswith(("http://", "https://")):
        server = Server(place.removesuffix("/metrics"))
        try:
            return server.snapshot()
        finally:
            server.close()
    path = Path(place)
    if not path.is_file():
        raise UserError(
            f"expected a /metrics page in {place}, found no such file: curl http://HOST:PORT/metrics > FILE"
        )
    return read(path.read_text(errors="replace"))


def _tally(last: Snapshot, earlier: Snapshot | None) -> Tally:
    if earlier is not None:
        return difference(earlier, last)[0]
    zero = Snapshot(last.engine, 0, 0, 0, None, 0, 0)
    return difference(zero, last)[0]


def _from_tally(
    tally: Tally, depth: int | None, page: Snapshot, family: str, source: str, temperature: float
) -> Profile:
    if not tally.drafts and tally.tau is None:
        raise UserError(f"expected drafts in {source}, found none: is speculation on, and was anything asked?")
    if (page.draft_tokens or 0) > (page.steps or 0) + 1 and page.steps:
        raise UserError(
            f"expected chains, found trees of {page.draft_tokens} rows and {page.steps} levels: measure with "
            "--speculative-eagle-topk 1"
        )
    source += f", {tally.drafts or 'unknown'} calls, taken at the workload's temperature"
    hits = [h for h in tally.by_position or ()]
    if hits and tally.drafts and tally.drafts >= hits[0]:
        tested = [tally.drafts, *hits[:-1]]
        known = list(takewhile(lambda pair: pair[1], zip(hits, tested, strict=True)))
        spans = [wilson(h, t) for h, t in known]
        if tally.alpha is None:
            source += "; drafts differ in length: a lower bound by depth"
        low, high = (tuple(span[side] for span in spans) for side in (0, 1))
        return Profile(family, tuple(ratio(h, t) for h, t in known), low, high, "measured", source, temperature)
    if depth is None or (alpha := equal_alpha(tally.tau, depth)) is None:
        raise UserError(f"{source} give no acceptance: neither positions nor a draft length with tau {tally.tau}")
    return _equal(family, alpha, depth, source + f"; tau {tally.tau:.3f} at N={depth}, no positions", temperature)
