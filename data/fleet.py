"""Servers of one kind: requests dealt among them, failures waited out, a dead one's work goes to the others."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from conf.errors import UserError
from data.http import address, chosen, client_options, models_of, said, values_of, words_of

log = logging.getLogger(__name__)

PATIENCE = 600.0  # seconds that a request may go on failing: a server takes minutes to load a large model
FIRST, LONGEST = 1.0, 60.0  # seconds that a failing server is left alone, doubled each time
LATER = {408, 425, 429}  # beside 5xx: to be tried again
SAID_EVERY = 30.0  # seconds between two warnings about one server


class Fault(Exception):
    """What may pass. after: seconds that the server asks for."""

    def __init__(self, words: str, after: float = 0.0):
        super().__init__(words)
        self.after = after


@dataclass
class Server:
    """One of a fleet. load: requests given to it.

    failures: in a row. failed: when the last of them came; until `rests` nothing new is begun here.
    """

    url: str
    http: httpx.AsyncClient
    places: asyncio.Semaphore
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    load: int = 0
    failures: int = 0
    failed: float = float("-inf")
    rests: float = float("-inf")
    warned: float = float("-inf")

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One of those that may be under way here at a time."""
        self.load += 1
        try:
            async with self.places:
                yield
        finally:
            self.load -= 1

    async def ask(self, method: str, path: str, body: dict | None, seconds: float) -> Any:
        """The JSON of an answer. Raises Fault for what may pass, UserError for a refusal."""
        try:
            async with asyncio.timeout(seconds):
                answer = await self.http.request(method, path, json=body)
        except TimeoutError as error:
            raise Fault(f"no answer within {seconds:g} s (data.concurrency says how many share it)") from error
        except httpx.HTTPError as error:
            raise Fault(said(error)) from error
        if answer.status_code in LATER or answer.status_code >= 500:
            raise Fault(f"status {answer.status_code}: {words_of(answer)}", retry_after(answer))
        if answer.status_code != 200:
            raise UserError(f"{self.url}{path} refused (status {answer.status_code}): {words_of(answer)}")
        try:
            return values_of(answer)
        except ValueError as error:
            raise Fault(f"expected JSON from {path}, found {answer.text[:60]!r}") from error


class Fleet:
    """`concurrency` requests under way at each server. sleep, now: of tests, which wait for nothing.

    Raises UserError for a concurrency below 1.
    """

    def __init__(
        self,
        urls: Sequence[str],
        concurrency: int,
        answer_seconds: float,
        patience: float = PATIENCE,
        sleep: Callable[[float], Awaitable] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ):
        if concurrency < 1:
            raise UserError(f"expected data.concurrency of 1 or more, found {concurrency}")
        self.room, self.patience, self._sleep, self._now = concurrency * len(urls), patience, sleep, now
        self._random = random.Random(0)
        self.servers = [
            Server(url, httpx.AsyncClient(**client_options(url, answer_seconds)), asyncio.Semaphore(concurrency))
            for url in urls
        ]

    async def close(self) -> None:
        for server in self.servers:
            await server.http.aclose()

    async def do(self, work: Callable[[Server], Awaitable[Any]]) -> Any:
        """What `work` gives at the server with the least to do, tried again elsewhere or later when it raises Fault.

        Raises UserError when patience is at its end.
        """
        since = None
        while True:
            server = min(self.servers, key=lambda one: (max(0.0, one.rests - self._now()), one.load))
            if (rest := server.rests - self._now()) > 0:
                await self._sleep(rest)
                continue
            async with server.place():
                if server.rests > (began := self._now()):
                    continue  # it has failed meanwhile
                try:
                    found = await work(server)
                except Fault as fault:
                    since = began if since is None else since
                    self._leave_alone(server, began, fault)
                    self._check_patience(since, server, fault)
                    continue
                server.failures = 0
                return found

    def _leave_alone(self, server: Server, began: float, fault: Fault) -> None:
        """Longer each time; the failure of what began before the last one tells nothing new."""
        now = self._now()
        if began >= server.failed:
            pause = min(LONGEST, FIRST * 2**server.failures) * self._random.uniform(0.5, 1.0)
            server.failures, server.failed, server.rests = server.failures + 1, now, now + pause
        server.rests = max(server.rests, now + fault.after)
        if now - server.warned > SAID_EVERY:
            server.warned = now
            log.warning(f"{server.url}: {fault}; tried again, for {self.patience:g} s at the most")

    def _check_patience(self, since: float, server: Server, fault: Fault) -> None:
        soonest = max(self._now(), min(one.rests for one in self.servers))
        if soonest - since > self.patience:
            raise UserError(
                f"no answer within {self.patience:g} s from {', '.join(one.url for one in self.servers)}; last, "
                f"{server.url}: {fault}; what is written is kept: run the same command again once that is mended"
            ) from fault


def urls_of(server: object) -> list[str]:
    """data.server as addresses; UserError for what is none."""
    given = server if isinstance(server, (list, tuple)) else [server]
    found = list(dict.fromkeys(address(url, "data.server") for url in given))
    if not found:
        raise UserError("expected data.server=http://HOST:PORT, or a list of such, found an empty one")
    return found


def served_model(urls: Sequence[str], name: str | None) -> str:
    """`name`, or without one the only model that the first server serves which answers. Raises UserError."""
    for url in urls if name is None else ():
        try:
            with httpx.Client(**client_options(url, 30.0)) as client:
                listed = values_of(client.get("/v1/models").raise_for_status())
        except (httpx.HTTPError, ValueError) as error:
            problem = said(error)
            continue
        return chosen(models_of(listed, url), None, url, "data.server_model")
    if name is None:
        raise UserError(
            f"no answer from {', '.join(urls)} ({problem}): is it running? With data.server_model=NAME, what it has "
            "written before is found without it"
        )
    return name


def retry_after(answer: httpx.Response) -> float:
    """Seconds, given as such or as a date; 0 without."""
    given = answer.headers.get("retry-after", "")
    try:
        return max(0.0, float(given))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(given) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
