"""What a running engine counts of its drafts, read from its /metrics, and our own rounds counted as it does.

A verify call of a sequence whose draft has K tokens accepts a of them and emits a + 1. The prefill emits one token and
is no verify call. Engines differ in what they count of the last call, which the length or an end-of-turn token cuts:

whole    vLLM: the scheduler counts a call when its result arrives, before the text is cut, and drafts K tokens even
         where fewer may still be handed out. So do our own `Counts`. Calls without a draft are not counted.
room     llama.cpp: a draft is no longer than what may still be handed out, less the verifier's own token. With max
         tokens M and e emitted, M - e - 1 drafts at the most; with none left the call is an ordinary step and not
         counted. An end-of-turn token ends the sampling of a call: unless it is the last draft, it isn't accepted.
cut      OpenVINO GenAI, as eval/serving/engines counts it: a call's tokens as they are handed out.
handed   SGLang: no counter of accepted drafts. Its counters of finished requests give the tokens handed out; without
         the prefill's, and one a verify call, the rest was accepted: what was cut counts as rejected. No positions.

vLLM: vllm/v1/core/sched/scheduler.py; llama.cpp: tools/server/server-context.cpp; SGLang: observability/
metrics_collector.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from prometheus_client.parser import text_string_to_metric_families

from conf.errors import UserError
from eval.counts import ratio
from eval.speculative.loop import Decoded

MOST_POSITIONS = 1000  # no draft is longer


@dataclass(frozen=True)
class CounterNames:
    """Names of an engine's counters and gauges, without a counter's `_total`; None for what it doesn't have."""

    name: str
    rule: str
    drafts: str
    generated: str
    requests: str | None = None
    drafted: str | None = None
    accepted: str | None = None
    positions: str | None = None
    accept_length: str | None = None
    steps: str | None = None
    draft_tokens: str | None = None


def _counters(prefix: str) -> dict[str, str]:
    return {
        "drafts": f"{prefix}:spec_decode_num_drafts",
        "drafted": f"{prefix}:spec_decode_num_draft_tokens",
        "accepted": f"{prefix}:spec_decode_num_accepted_tokens",
        "positions": f"{prefix}:spec_decode_num_accepted_tokens_per_pos",
    }


COUNTERS = {
    "vllm": CounterNames(
        "vLLM", "whole", generated="vllm:generation_tokens", requests="vllm:request_success", **_counters("vllm")
    ),
    "llamacpp": CounterNames("llama.cpp", "room", generated="llamacpp:tokens_predicted", **_counters("llamacpp")),
    "sglang": CounterNames(
        "SGLang",
        "handed",
        "sglang:spec_verify_calls",
        "sglang:generation_tokens",
        "sglang:num_requests",
        accept_length="sglang:spec_accept_length",
        steps="sglang:spec_num_steps",
        draft_tokens="sglang:spec_num_draft_tokens",
    ),
}


@dataclass(frozen=True)
class Tally:
    """Counts of verify calls that had a draft; None for what isn't known.

    by_position: how often the draft at each position was accepted. accept_length: tau as the engine's gauge has it,
    where there are no counters.
    """

    drafts: int | None
    drafted: int | None = None
    accepted: int | None = None
    by_position: tuple[int, ...] | None = None
    accept_length: float | None = None

    @property
    def tau(self) -> float | None:
        """Tokens a verify call, the verifier's own included."""
        if self.accepted is None or not self.drafts:
            return self.accept_length
        return 1 + self.accepted / self.drafts

    @property
    def rates(self) -> list[float | None]:
        """P(draft n accepted) of all calls, by position."""
        return [ratio(hits, self.drafts or 0) for hits in self.by_position or ()]

    @property
    def alpha(self) -> float | None:
        """Accepted over tested drafts: one is tested when all before it passed. None where drafts differ in length."""
        if not self.by_position or not self.drafts or self.drafted != len(self.by_position) * self.drafts:
            return None
        return ratio(sum(self.by_position), self.drafts + sum(self.by_position[:-1]))

    @property
    def accepted_share(self) -> float | None:
        """Accepted over drafted tokens."""
        return None if self.accepted is None or not self.drafted else self.accepted / self.drafted

    def to_dict(self) -> dict:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {
            "tau": self.tau,
            "alpha": self.alpha,
            "accepted_share": self.accepted_share,
            "accepted_by_position": self.rates or None,
        }


@dataclass(frozen=True)
class Snapshot:
    """An engine's counters at one moment, over all its replicas that /metrics shows; None where there is no such one.

    generated, requests: tokens handed out and requests that ended, whoever sent them.
    """

    engine: CounterNames
    drafts: int | None
    drafted: int | None
    accepted: int | None
    by_position: tuple[int, ...] | None
    generated: int | None
    requests: int | None
    accept_length: float | None = None
    steps: int | None = None
    draft_tokens: int | None = None

    @property
    def speculates(self) -> bool | None:
        """Whether the engine drafts; None: it has these metrics in any case, and shows it at work only."""
        if self.drafts or self.accept_length:
            return True
        return (self.drafts is not None) if self.engine.name == "vLLM" else None


def read(text: str, model: str | None = None) -> Snapshot:
    """The counters in a /metrics page, those of `model` where a server counts by model.

    Raises UserError for a page that is no Prometheus text or that none of `COUNTERS` wrote.
    """
    samples: dict[str, list] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name.removesuffix("_total"), []).append(sample)
    except ValueError as error:
        raise UserError(f"expected Prometheus text from /metrics, found something else ({error})") from error
    engine = next((e for key, e in COUNTERS.items() if any(name.startswith(f"{key}:") for name in samples)), None)
    if engine is None:
        raise UserError(
            f"expected metrics of vLLM, SGLang or llama.cpp (vllm:, sglang:, llamacpp:) from /metrics, found "
            f"{', '.join(sorted(samples)[:3]) or 'none'}"
        )

    def of(name: str | None) -> list:
        found = samples.get(name, [])
        mine = [s for s in found if s.labels.get("model_name") == model]
        return mine or found

    def total(name: str | None) -> int | None:
        return round(sum(s.value for s in of(name))) if of(name) else None

    def gauge(name: str | None) -> float | None:
        return max((s.value for s in of(name) if s.value == s.value), default=None)  # NaN: nothing was drafted yet

    for name in (engine.drafts, engine.drafted, engine.accepted, engine.positions, engine.generated, engine.requests):
        for sample in of(name):
            if not 0 <= sample.value < float("inf"):
                raise UserError(f"expected a count of {sample.name} from /metrics, found {sample.value}")
    places: dict[int, float] = {}
    for sample in of(engine.positions):
        label = sample.labels.get("position", "")
        if not label.isdecimal() or int(label) > MOST_POSITIONS:
            raise UserError(f"expected positions of {sample.name} from 0 to {MOST_POSITIONS}, found '{label}'")
        place = int(label)
        places[place] = places.get(place, 0) + sample.value
    return Snapshot(
        engine,
        total(engine.drafts),
        total(engine.drafted),
        total(engine.accepted),
        tuple(round(places.get(k, 0)) for k in range(max(places) + 1)) if places else None,
        total(engine.generated),
        total(engine.requests),
        gauge(engine.accept_length),
        *(None if (value := gauge(name)) is None else round(value) for name in (engine.steps, engine.draft_tokens)),
    )


def difference(before: Snapshot, after: Snapshot) -> tuple[Tally, int | None]:
    """What was counted between two moments, and how many tokens were handed out meanwhile.

    Raises UserError when a counter fell: the server was started anew.
    """

    def grown(name: str) -> int | None:
        now = getattr(after, name)
        grown = None if now is None else now - (getattr(before, name) or 0)
        if grown is not None and grown < 0:
            raise UserError(f"the server's counters fell ({name} by {-grown}): it was started anew meanwhile")
        return grown

    drafts, accepted, generated, requests = map(grown, ("drafts", "accepted", "generated", "requests"))
    if after.engine.rule == "handed" and None not in (drafts, generated, requests):
        accepted = generated - requests - drafts
    places = after.by_position
    if places is not None:
        earlier = before.by_position or ()
        places = tuple(n - (earlier[k] if k < len(earlier) else 0) for k, n in enumerate(places))
    return Tally(drafts, grown("drafted"), accepted, places, after.accept_length), generated


def depth_of(snapshot: Snapshot) -> int | None:
    """The server's K: as many positions as it counts, or its own word; else the mean draft rounded up."""
    if snapshot.by_position:
        return len(snapshot.by_position)
    if snapshot.steps:
        return snapshot.steps
    return -(-snapshot.drafted // snapshot.drafts) if snapshot.drafts and snapshot.drafted else None


def tally_of(text: Decoded, rule: str, depth: int, max_new_tokens: int) -> Tally:
    """The rounds of one of our texts, chains of up to `depth`, counted by an engine's rule (above)."""
    if rule == "handed":
        calls = len(text.rounds)
        return Tally(calls, accepted=len(text.tokens) - 1 - calls)
    drafts, drafted, by_position, emitted = 0, 0, [0] * depth, 1
    for call in text.rounds:
        drawn = len(call.drafted)
        accepted = call.accepted
        if rule == "cut":
            accepted = min(accepted, len(text.tokens) - emitted - 1)
        if rule == "room":
            drawn = min(drawn, max_new_tokens - emitted - 1)
            if (handed := len(text.tokens) - emitted) < drawn:
                accepted = min(accepted, handed - 1)
        emitted += len(call.emitted)
        if drawn:
            drafts += 1
            drafted += drawn
            for k in range(min(accepted, drawn)):
                by_position[k] += 1
    return Tally(drafts, drafted, sum(by_position), tuple(by_position))


def pooled(tallies: Iterable[Tally]) -> Tally:
    """The sum of tallies that were counted by the same rule."""
    tallies = list(tallies)

    def total(name: str) -> int | None:
        values = [getattr(t, name) for t in tallies]
        return None if None in values else sum(values)

    places = None
    if all(t.by_position is not None for t in tallies):
        places = tuple(map(sum, zip(*(t.by_position for t in tallies), strict=True)))
    return Tally(total("drafts"), total("drafted"), total("accepted"), places)
