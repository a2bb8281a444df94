"""A small OpenAI-compatible server whose model is a tiny verifier, honest or with faults. Nothing here sleeps.

with Stub(verifier) as stub:
    stub.faults += ["500", "cut"]      # of the next two completions
"""

import asyncio
import json
import threading
from collections import deque
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from data.generate import Request, generate

MODELS = threading.Lock()  # one at a time


@cache
def continued(verifier, prompt, limit, temperature, seed, stop):
    """What the batch here would give, once for all tests."""
    with MODELS:
        options = {"max_new_tokens": limit, "temperature": temperature, "seed": seed, "stop_ids": stop}
        [found] = generate(verifier, [Request("r", list(prompt))], **options)
    return found.output_ids, found.finish_reason


class Stub(ThreadingHTTPServer):
    """verifier: one that nobody else calls meanwhile. asked: bodies of the completions so far.

    faults: of completions to come, "" for none; always: of each one. after: every one fails once so many were asked.

    busiest: how many were under way at once. changed: keys of a choice that are replaced, or by None taken away.
    """

    daemon_threads = True

    def __init__(self, verifier, models=("tiny",), longest=4096, tokenizes=True, always="", after=None, **changed):
        super().__init__(("127.0.0.1", 0), Handler)
        self.verifier, self.longest, self.tokenizes, self.changed = verifier, longest, tokenizes, changed
        self.models, self.always, self.after = list(models), always, after
        self.faults, self.asked, self.under_way, self.busiest = deque(), [], 0, 0
        self.lock, self.over = threading.Lock(), threading.Event()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.die()

    def die(self):
        """From now on nobody listens."""
        self.over.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        pass  # clients that went away

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def complete(self, body):
        """The answer of an honest server."""
        seed = body["seed"] if body["temperature"] else 0
        rest = body["max_tokens"], body["temperature"], seed, tuple(body["stop_token_ids"])
        ids, reason = continued(self.verifier, tuple(body["prompt"]), *rest)
        stopped = reason == "stop"
        choice = {
            "text": self.verifier.tokenizer.decode(ids[:-1] if stopped else ids),
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": list(ids),
            "prompt_token_ids": body["prompt"],
        }
        for key, value in self.changed.items():
            choice[key] = value(choice) if callable(value) else value
        return {"choices": [{key: value for key, value in choice.items() if value is not None}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, values, status=200, headers=None):
        body = values if isinstance(values, bytes) else json.dumps(values).encode()
        self.send_response(status)
        for name, value in ({"content-length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        rows = [{"id": name, "max_model_len": self.server.longest} for name in self.server.models]
        self.answer({"data": rows})

    def do_POST(self):
        stub, body = self.server, json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            if not stub.tokenizes:
                return self.answer({"detail": "Not Found"}, 404)
            ids = stub.verifier.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            return self.answer({"tokens": ids, "count": len(ids)})
        with stub.lock:
            stub.asked.append(body)
            fault = stub.faults.popleft() if stub.faults else stub.always
            if stub.after is not None and len(stub.asked) > stub.after:
                fault = "500"
            stub.under_way += 1
            stub.busiest = max(stub.busiest, stub.under_way)
        try:
            self.complete(fault, body)
        finally:
            with stub.lock:
                stub.under_way -= 1

    def complete(self, fault, body):
        stub = self.server
        if fault == "hang":
            stub.over.wait(60)
            self.close_connection = True
        elif fault == "trickle":  # a byte now and then, so that no read ever waits long
            self.send_response(200)
            self.send_header("content-length", "1000000")
            self.end_headers()
            while not stub.over.wait(0.02):
                self.wfile.write(b" ")
                self.wfile.flush()
        elif fault == "cut":
            self.answer(b'{"choices": [{"te', headers={"content-length": "500"})
            self.close_connection = True
        elif fault == "garbage":
            self.answer(b"<html>bad gateway</html>")
        elif fault == "shape":
            self.answer({"error": None, "choices": []})
        elif fault.startswith("429"):
            self.answer({"error": {"message": "slow down"}}, 429, {"retry-after": fault.removeprefix("429 ")})
        elif fault == "400":
            self.answer({"error": {"message": "this model's maximum context length is 8"}}, 400)
        elif fault == "500":
            self.answer({"error": {"message": "out of memory"}}, 500)
        else:
            values = stub.complete(body)
            if fault == "abort":
                values["choices"][0]["finish_reason"] = "abort"
            elif fault == "truncated":
                values["choices"][0] |= {"token_ids": values["choices"][0]["token_ids"][:-1], "finish_reason": "length"}
            self.answer(values)


class Time:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.seconds, self.slept = 0.0, []

    def now(self):
        return self.seconds

    async def sleep(self, seconds):
        self.slept.append(seconds)
        self.seconds += seconds
        await asyncio.sleep(0)
