"""Text of an OpenAI-compatible server (vLLM, SGLang) in place of the verifier's own batch: data.server=http://HOST:PORT.

Prompts go there as token ids, rendered here, and come back as token ids; text alone is tokenised again and counted. A
request that fails is tried again, at another server where there is one, until PATIENCE has run out.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import torch

from conf.errors import UserError
from data.fleet import Fault, Fleet, Server, urls_of
from data.generate import Generation, Request, Writes, generate, settled
from data.http import chosen, models_of
from data.progress import Meter
from models import chat

if TYPE_CHECKING:
    from conf.schema import DataConf
    from data.answers import Sampling
    from models.verifier import Verifier

log = logging.getLogger(__name__)

ANSWER, SLOWEST = 300.0, 2.0  # seconds for an answer, and for each so many of its tokens one more
PROBE, PROBE_TOKENS = "Name three rivers. Zähle bis fünf: 一, 二", 16  # what shows whose words a server speaks
TIE = 0.5  # by how much its greedy token may lie below ours, in logits


@contextmanager
def who_writes(
    cfg: DataConf, verifier: Verifier, model: str | None, sampling: Sampling
) -> Iterator[tuple[Writes, Sampling]]:
    """The verifier here or, by data.server, servers of `model`, whose rounds are large enough to keep them all busy."""
    if cfg.server is None:
        yield generate, sampling
        return
    urls = urls_of(cfg.server)
    wide = replace(sampling, batch_size=max(sampling.batch_size, cfg.concurrency * len(urls)))
    with ServerAnswers(urls, verifier, model, concurrency=cfg.concurrency, longest=cfg.max_length) as write:
        yield write, wide


class ServerAnswers:
    """A context manager whose call has the protocol of `data.generate.generate`.

    urls: of servers of one `model`; at each, `concurrency` requests are under way. longest: positions that a text of
    prompt and answer may need. Entering it looks at the servers and raises UserError, one line, when none answers, or
    one serves something else than the verifier. answer_seconds: for an answer without tokens. options: of `Fleet`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        verifier: Verifier,
        model: str,
        *,
        concurrency: int = 32,
        longest: int = 0,
        answer_seconds: float = ANSWER,
        **options,
    ):
        self.verifier, self.model, self.longest, self.answer_seconds = verifier, model, longest, answer_seconds
        self.fleet = Fleet(urls, concurrency, 2 * answer_seconds, **options)
        self._runner, self._known, self._warned = asyncio.Runner(), set(), False

    def __enter__(self) -> ServerAnswers:
        try:
            self._runner.run(self._look())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._runner.run(self.fleet.close())
        self._runner.close()

    def __call__(
        self,
        verifier: Verifier,
        requests: Iterable[Request | None],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        batch_size: int = 64,
        seed: int = 0,
        deadline: float | None = None,
        stop_ids: Iterable[int] | None = None,
        capacity: int | None = None,
        slots: int | None = None,
        capture: bool = False,
        meter: Meter | None = None,
    ) -> Iterator[Generation]:
        """As `generate`, but a server decides what shares a batch, and what the deadline finds unfinished is left out.

        batch_size, capacity, slots: of a batch here; unused. A sampled answer follows from (seed, request id) as far
        as the server keeps to a request's seed.
        """
        assert verifier is self.verifier and not capture, "a server gives text, of one verifier, and no states"
        stop = frozenset(verifier.eos_ids if stop_ids is None else stop_ids)
        whole = partial(settled, max_new_tokens=max_new_tokens, temperature=temperature, stop=stop)
        source = (request if request is None else whole(request) for request in requests)
        tasks: dict[asyncio.Task, Request] = {}

        def begin(request: Request) -> None:
            tasks[self._runner.get_loop().create_task(self._answer(request, seed))] = request

        try:
            with meter or Meter("answers") as meter:
                while deadline is None or time.monotonic() < deadline:
                    for request in takewhile(
                        lambda item: item is not None, islice(source, self.fleet.room - len(tasks))
                    ):
                        begin(request)
                    if not tasks:
                        return
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    self._runner.run(asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED))
                    finished = []
                    for task in [task for task in tasks if task.done()]:
                        request, generation = tasks.pop(task), task.result()
                        meter.step(len(generation.output_ids), len(tasks), request.then is None)
                        if request.then is None:
                            finished.append(generation)
                        elif following := request.then(generation):
                            begin(_after(request, generation, whole(following)))
                    yield from finished
        finally:
            self._end(tasks)

    def _end(self, tasks: Iterable[asyncio.Task]) -> None:
        async def end() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._runner.run(end())

    async def _answer(self, request: Request, seed: int) -> Generation:
        async def work(server: Server) -> Generation:
            await self._know(server)
            return await self._once(server, request, seed)

        return await self.fleet.do(work)

    async def _once(self, server: Server, request: Request, seed: int) -> Generation:
        body = {
            "model": self.model,
            "prompt": request.input_ids,
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "stop_token_ids": sorted(request.stop_ids),
            "seed": _seed(seed, request.id),
            "return_token_ids": True,
            # A server's defaults may come from the model's generation_config.json; here the law is the model's own.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        seconds = self.answer_seconds + request.max_new_tokens / SLOWEST
        return self._read(server, request, await server.ask("POST", "/v1/completions", body, seconds))

    def _read(self, server: Server, request: Request, values: object) -> Generation:
        """The answer as the batch here would give it: up to the first end-of-turn token, that token last."""
        try:
            [choice] = values["choices"]
            text, reason, ids = choice["text"], choice["finish_reason"], choice.get("token_ids")
            read, named = choice.get("prompt_token_ids"), choice.get("stop_reason", choice.get("matched_stop"))
            if not isinstance(text, str):
                raise TypeError("no text")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Fault(f"expected a completion, found {str(values)[:80]!r}") from error
        if reason not in ("stop", "length"):
            raise Fault(f"an answer that ended by {str(reason)[:40]!r}")
        if read is not None and read != request.input_ids:
            raise UserError(
                f"{server.url} read other token ids than it was sent ({len(request.input_ids)} of them), such as "
                f"{str(read)[:60]}: its answers are to another prompt"
            )
        exact, named = ids is not None, named if type(named) is int and named in request.stop_ids else None
        if not exact:
            self._warn_of_text(server)
            ids = self._tokenised(text, reason == "stop", request.max_new_tokens)
        elif not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise Fault(f"expected token_ids to be numbers, found {str(ids)[:80]!r}")
        elif reason == "stop" and named is not None and ids[-1:] != [named]:
            ids = [*ids, named]
        if outside := [token for token in ids if not 0 <= token < self.verifier.vocab_size]:
            raise UserError(
                f"{server.url} writes token {outside[0]}, beyond the {self.verifier.vocab_size} of "
                f"{self.verifier.name}: it serves another model"
            )
        end = next((place for place, token in enumerate(ids) if token in request.stop_ids), None)
        if end is not None:
            return Generation(request.id, ids[: end + 1], "stop", exact=exact)
        if reason == "stop":
            raise UserError(
                f"{server.url} ends an answer with token {ids[-1] if ids else None}, and a turn of "
                f"{self.verifier.name} ends with {sorted(request.stop_ids)}: start it without stop words of its own"
            )
        if not ids or (exact and len(ids) != request.max_new_tokens):
            raise Fault(f"an answer cut at {len(ids)} of {request.max_new_tokens} tokens")
        return Generation(request.id, ids, "length", exact=exact)

    def _tokenised(self, text: str, stopped: bool, limit: int) -> list[int]:
        """At most `limit` ids: the last the template's end of turn where the text stopped, else no half character."""
        if not stopped:
            return chat.encode(self.verifier.tokenizer, text.rstrip("\ufffd"))[:limit]
        end = (chat.answer_end_ids(self.verifier.tokenizer) or self.verifier.eos_ids)[-1]
        return [*chat.encode(self.verifier.tokenizer, text)[: limit - 1], end]

    def _warn_of_text(self, server: Server) -> None:
        if not self._warned:
            log.warning(
                f"{server.url} gives text and no token ids (return_token_ids): answers are tokenised again, and "
                "counted; that need not be how they were written"
            )
        self._warned = True

    async def _look(self) -> None:
        """Every server once; one that doesn't answer yet is looked at before its first request."""

        async def look(server: Server) -> str | None:
            try:
                await self._know(server)
            except Fault as fault:
                return f"{server.url}: {fault}"

        silent = [line for line in await asyncio.gather(*map(look, self.fleet.servers)) if line]
        if len(silent) == len(self.fleet.servers):
            raise UserError(f"no server answers ({'; '.join(silent)}): is it running?")
        for line in silent:
            log.warning(f"{line}; the others go on without it")

    async def _know(self, server: Server) -> None:
        """Once for each: does it serve the model, with room for the texts, by this tokenizer and in the same words?"""
        async with server.lock:
            if server.url in self._known:
                return
            served = models_of(await server.ask("GET", "/v1/models", None, self.answer_seconds), server.url)
            longest = served[chosen(served, self.model, server.url, "data.server_model")]
            if longest is not None and longest < self.longest:
                raise UserError(
                    f"{server.url} takes texts of {longest} tokens, data.max_length is {self.longest}: start it with "
                    f"--max-model-len {self.longest}, or set data.max_length={longest}"
                )
            text = chat.render_text(self.verifier.tokenizer, [{"role": "user", "content": PROBE}], True)
            ids = chat.encode(self.verifier.tokenizer, text)
            alike = await self._same_tokenizer(server, text, ids)
            request = Request("probe", ids, PROBE_TOKENS, 0.0, frozenset(self.verifier.eos_ids))
            generation = await self._once(server, request, 0)
            if generation.exact and self.verifier.whole:
                self._compare(server, ids, generation.output_ids)
            elif not alike:
                log.warning(
                    f"{server.url} could not be held to {self.verifier.name}: it shows no token ids of text, and here "
                    "are no layers to compare with"
                )
            self._known.add(server.url)

    async def _same_tokenizer(self, server: Server, text: str, ids: list[int]) -> bool:
        """Whether the server cuts text as the tokenizer here does; False where it doesn't tell. Raises UserError."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            found = (await server.ask("POST", "/tokenize", body, self.answer_seconds)).get("tokens")
        except (UserError, Fault, AttributeError):  # there is no such path, or it means something else
            return False
        if not isinstance(found, list) or not found:
            return False
        if found != ids:
            raise UserError(
                f"{server.url} cuts text into other tokens than the tokenizer of {self.verifier.name} ({len(found)} "
                f"and {len(ids)} of the same text): it serves another model"
            )
        return True

    @torch.no_grad()
    def _compare(self, server: Server, prompt: list[int], output_ids: list[int]) -> None:
        """UserError unless each token is the verifier's own choice after those before it, or as good as."""
        verifier = self.verifier
        ids_BT = torch.tensor([[*prompt, *output_ids[:-1]]], device=verifier.device)
        position_BT = torch.arange(ids_BT.shape[1], device=verifier.device)[None]
        last_BTD = verifier.capture(ids_BT, torch.zeros_like(ids_BT), position_BT).last_BTD
        logits_TV = verifier.logits(last_BTD[0, len(prompt) - 1 :])
        chosen_T1 = torch.tensor(output_ids, device=logits_TV.device)[:, None]
        below_T = logits_TV.max(-1).values - logits_TV.gather(1, chosen_T1)[:, 0]
        if not below_T.max() <= TIE:
            place = int((~(below_T <= TIE)).nonzero()[0])
            raise UserError(
                f"{server.url} goes on otherwise than {verifier.name} does here: token {place} of a greedy answer lies "
                f"{float(below_T[place]):.2g} below the best logit: another model, or quantised weights?"
            )


def _after(request: Request, generation: Generation, following: Request) -> Request:
    """`following` with all that was before it, less the token that ended it."""
    written = generation.output_ids[:-1] if generation.finish_reason == "stop" else generation.output_ids
    return replace(following, input_ids=[*request.input_ids, *written, *following.input_ids])


def _seed(seed: int, name: str) -> int:
    """31 bits, which every server takes."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4]) >> 1
