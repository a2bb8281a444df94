"""vLLM's OpenAI server, with an exported head or without, for as long as it is wanted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from conf.errors import UserError
from eval.serving.engine import Job, last_line

PATIENCE = 600  # seconds until it must answer
METHODS = {"eagle1": "eagle"}  # what vLLM calls it, where that is another name


@contextmanager
def vllm_server(python: Path, job: Job, folder: Path) -> Iterator[str]:
    """Yields the server's address once it is ready; its log is `folder`/server.txt.

    Raises UserError with the log's last line when it ends before that, or takes longer than PATIENCE.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log, url = folder / "server.txt", f"http://127.0.0.1:{port}"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command(python, job, port),
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment(job),
            start_new_session=True,  # so that its own processes end with it
        )
        try:
            _wait(process, url, log)
            yield url
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def command(python: Path, job: Job, port: int) -> list[str]:
    """The server's command line; `vllm serve` does the same where the package is called vllm."""
    longest = max(map(len, job.prompts)) + job.max_new_tokens + 2 * (job.depth + 1)
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", job.verifier]
    words += ["--dtype", job.dtype, "--enforce-eager"]
    if job.head is not None:
        drafting = {"model": job.head, "num_speculative_tokens": job.depth}
        drafting["method"] = METHODS.get(job.method, job.method)
        words += ["--speculative-config", json.dumps(drafting)]
    words += ["--max-model-len", str(longest), "--max-num-seqs", str(job.batch)]
    return [*words, "--host", "127.0.0.1", "--port", str(port)]


def environment(job: Job) -> dict[str, str]:
    """What vLLM on a CPU wants to be told; what is set already stays."""
    wanted = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    wanted |= {"VLLM_NO_USAGE_STATS": "1"}
    return wanted | os.environ | {"OMP_NUM_THREADS": str(job.threads)}


def _wait(process: subprocess.Popen, url: str, log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise UserError(f"vLLM's server ended with {process.returncode}: {last_line(log)}; see {log}")
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise UserError(f"vLLM's server was not ready within {PATIENCE} s: {last_line(log)}; see {log}")
