"""The HTTP side of a running server: what it serves, completions of token ids, its metrics, its chat template."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import httpx

from conf.errors import UserError
from data.http import address, chosen, client_options, models_of, said, values_of, words_of
from data.progress import Meter
from eval.serving.metrics import Snapshot, read

ANSWER = 600.0  # seconds to wait for one completion
TRIES, PAUSE = 3, 1.0  # of a request that the server couldn't take, with PAUSE, then twice PAUSE seconds between
BUSY = {429, 500, 502, 503, 504}
SETTLED, PATIENCE = 0.2, 10.0  # seconds between two equal looks at the metrics, and until we stop waiting for them
LARGEST = 2**31  # above every token id


@dataclass(frozen=True)
class Completion:
    """One answer. token_ids: None where the server gives text alone. tokens: how many it counted.

    fingerprint: what the server calls itself, if anything.
    """

    text: str
    token_ids: tuple[int, ...] | None
    tokens: int
    finish: str
    fingerprint: str | None = None


class Server:
    """A running OpenAI-compatible server. `connect` makes one after looking at it.

    model: its name there. longest: positions of a text, where the server says so.
    """

    def __init__(self, url: str, model: str | None = None, answer_seconds: float = ANSWER):
        self.url = address(url, "serve")
        self.model, self.longest, self.retried = model, None, 0
        self._lock = threading.Lock()
        self._http = httpx.Client(**client_options(self.url, answer_seconds))
        self.answer_seconds = answer_seconds

    @classmethod
    def connect(cls, url: str, model: str | None = None, answer_seconds: float = ANSWER) -> tuple[Server, Snapshot]:
        """The server and its counters. Raises UserError, one line, when it can't be compared with, before any prompt.

        model: its name; needed where several are served.
        """
        server = cls(url, model, answer_seconds)
        server._choose_model()
        snapshot = server.snapshot()
        if snapshot.speculates is False:
            raise server.undrafted(snapshot)
        return server, snapshot

    def undrafted(self, snapshot: Snapshot) -> UserError:
        """The error of a server that drafts nothing."""
        return UserError(
            f"{self.url} serves {self.model} without speculative decoding: {snapshot.engine.name} counts no drafts; "
            "start it with the exported head"
        )

    def close(self) -> None:
        self._http.close()

    def _choose_model(self) -> None:
        answer = self._get("/v1/models")
        try:
            listed = values_of(answer)
        except ValueError:
            listed = None
        served = models_of(listed, self.url)
        self.model = chosen(served, self.model, self.url, "serve_model")
        self.longest = served[self.model]

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._http.get(path)
        except httpx.HTTPError as error:
            raise UserError(f"no server answers at {self.url}: {said(error)}; is it running?") from error

    def snapshot(self) -> Snapshot:
        """The counters now."""
        answer = self._get("/metrics")
        if answer.status_code != 200:
            raise UserError(
                f"{self.url} has no /metrics (status {answer.status_code}): start SGLang with --enable-metrics, "
                "llama.cpp with --metrics; vLLM has it unless its log stats are disabled"
            )
        return read(answer.text, self.model)

    def settled(self) -> tuple[Snapshot, bool]:
        """The counters once two looks are the same, and whether they became so within PATIENCE seconds."""
        before, began = self.snapshot(), time.monotonic()
        while True:
            time.sleep(SETTLED)
            now = self.snapshot()
            if now == before:
                return now, True
            if time.monotonic() - began > PATIENCE:
                return now, False
            before = now

    def _post(self, path: str, body: dict) -> httpx.Response:
        """A request that is tried again while the server is busy; the last answer, whatever it is."""
        for left in reversed(range(TRIES)):
            try:
                answer = self._http.post(path, json=body)
                if answer.status_code not in BUSY or not left:
                    return answer
            except httpx.ReadTimeout as error:
                raise UserError(f"{self.url}{path} gave no answer within {self.answer_seconds:g} s") from error
            except httpx.HTTPError as error:
                if not left:
                    raise UserError(f"{self.url}{path} failed {TRIES} times: {said(error)}") from error
            with self._lock:
                self.retried += 1
            time.sleep(PAUSE * (TRIES - left))
        raise AssertionError("the last try returns or raises")

    def complete(self, ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]) -> Completion:
        """The greedy continuation of a prompt of token ids. Raises UserError when the server refuses it."""
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "stop_token_ids": list(stop_ids),
            "repetition_penalty": 1.0,
            "return_token_ids": True,  # vLLM; others leave it unread
            "cache_prompt": False,  # llama.cpp, which otherwise sums a prompt in another order the second time
        }
        answer = self._post("/v1/completions", body)
        if answer.status_code != 200:
            raise UserError(
                f"{self.url} refused a prompt of {len(ids)} token ids and {max_new_tokens} new tokens "
                f"(status {answer.status_code}): {words_of(answer)}"
            )
        try:
            values = values_of(answer)
            [choice] = values["choices"]
            given, count = choice.get("token_ids"), values["usage"]["completion_tokens"]
            if type(count) is not int or count < 0 or not isinstance(choice["text"], str):
                raise ValueError("no text with a number of tokens")
            return Completion(
                choice["text"],
                None if given is None else _ids(given),
                count,
                choice["finish_reason"],
                values.get("system_fingerprint"),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.url}/v1/completions: expected an OpenAI completion, found {answer.text[:80]!r}"
            ) from error

    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int], batch: int
    ) -> tuple[list[Completion], float]:
        """Every prompt's completion, `batch` under way at a time, and the seconds from first to last."""
        done: dict[int, Completion] = {}
        pool, began = ThreadPoolExecutor(batch), time.perf_counter()
        try:
            waiting = {
                pool.submit(self.complete, ids, max_new_tokens, stop_ids): index for index, ids in enumerate(prompts)
            }
            with Meter("server", len(prompts)) as meter:
                for future in as_completed(waiting):
                    text = done[waiting[future]] = future.result()
                    meter.step(text.tokens, min(batch, len(prompts) - len(done)), 1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            self.close()  # ends what is under way
            raise
        seconds = time.perf_counter() - began
        pool.shutdown()
        return [done[index] for index in range(len(prompts))], seconds

    def chat_prompt(self, messages: list[dict]) -> tuple[list[int] | None, int | None, str]:
        """(ids, count, what was asked) of these messages under the server's own chat template.

        vLLM's /tokenize gives ids; elsewhere one chat completion of a token says how many there were. None, None
        with the server's words when neither can be had.
        """
        body = {"model": self.model, "messages": messages}
        answer = self._post("/tokenize", body | {"add_generation_prompt": True})
        if answer.status_code == 200:
            values = _object(answer)
            if values.get("tokens") is not None:
                try:
                    ids = list(_ids(values["tokens"]))
                    return ids, len(ids), "/tokenize"
                except ValueError as error:
                    return None, None, f"/tokenize answers {error}"
        answer = self._post("/v1/chat/completions", body | {"max_tokens": 1, "temperature": 0})
        if answer.status_code != 200:
            return None, None, words_of(answer)
        usage = _object(answer).get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        count = count if type(count) is int else None
        return None, count, "/v1/chat/completions" if count else "its chat completion counts no prompt tokens"


def _ids(values: object) -> tuple[int, ...]:
    """Token ids; ValueError for anything else."""
    if not isinstance(values, list) or not all(type(token) is int and 0 <= token < LARGEST for token in values):
        raise ValueError(f"no token ids: {str(values)[:60]}")
    return tuple(values)


def _object(answer: httpx.Response) -> dict:
    """The JSON object in an answer; empty where there is none, as from a proxy's page."""
    try:
        values = values_of(answer)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
