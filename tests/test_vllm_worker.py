"""What we run of vLLM, with stand-ins for it: the look at its scheduler, and the server's beginning and end."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.errors import UserError
from eval.serving import server
from eval.serving.engine import Job
from eval.serving.engines.vllm_worker import watch
from eval.serving.rows import row_of_server

JOB = Job("VERIFIER", "HEAD", "eagle1", 3, [[1, 2, 3], [4]], 16, [2], threads=2, batch=4)


def test_the_drafts_of_every_verify_call_are_kept():
    """Two requests: the first is given drafts in its second and third step, the second is in its prefill meanwhile."""
    seen = []
    scheduler = SimpleNamespace(update_from_output=lambda scheduled, output: seen.append(output) or "updated")
    rounds = watch(scheduler)

    def step(drafts, sampled):
        scheduled = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
        rows = {name: row for row, name in enumerate(sampled)}
        output = SimpleNamespace(req_id_to_index=rows, sampled_token_ids=list(sampled.values()))
        assert scheduler.update_from_output(scheduled, output) == "updated"

    step({}, {"0-a": [7]})
    step({"0-a": [5, 6, 9]}, {"0-a": [5, 6, 8], "1-b": []})  # a chunk of a prompt samples nothing
    step({"0-a": [1, 1, 1]}, {"0-a": [4], "1-b": [3]})
    step({"1-b": [2, 2, 2]}, {"1-b": [2, 0]})
    assert rounds == {"0-a": [[1, [5, 6, 9]], [4, [1, 1, 1]]], "1-b": [[1, [2, 2, 2]]]}
    assert len(seen) == 4


def test_the_command_line_of_the_server():
    words = server.command(Path("PY"), JOB, 8000)
    assert words[:5] == ["PY", "-m", "vllm.entrypoints.openai.api_server", "--model", "VERIFIER"]
    settings = json.loads(words[words.index("--speculative-config") + 1])
    assert settings == {"method": "eagle", "model": "HEAD", "num_speculative_tokens": 3}
    assert words[words.index("--max-model-len") + 1] == str(3 + 16 + 8) and words[-1] == "8000"
    assert server.environment(JOB)["OMP_NUM_THREADS"] == "2"


STAND_IN = """
import http.server, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""


def test_a_server_is_started_waited_for_and_ended(tmp_path, monkeypatch):
    import httpx

    monkeypatch.setattr(server, "command", lambda python, job, port: [sys.executable, "-c", STAND_IN, str(port)])
    with server.vllm_server(Path("PY"), JOB, tmp_path) as url:
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health", trust_env=False)


def test_a_server_that_ends_at_once_says_why(tmp_path, monkeypatch):
    said = "import sys; print('loading'); sys.exit('no such model')"
    monkeypatch.setattr(server, "command", lambda python, job, port: [sys.executable, "-c", said])
    with (
        pytest.raises(UserError, match="ended with 1: no such model; see .*server.txt"),
        server.vllm_server(Path("PY"), JOB, tmp_path),
    ):
        raise AssertionError("it was never ready")


@pytest.mark.parametrize(("same", "texts", "passes"), [(True, 2, True), (False, 2, False), (True, 1, False)])
def test_a_servers_row(same, texts, passes):
    counts = {"tau": 1.5, "accepted_by_position": [0.4, 0.1]}
    values = {"server_counts": counts, "our_counts": counts, "fingerprint": None, "engine": "vLLM", "depth": 2}
    values |= {"prompts": ["a", "b"], "identical_texts": texts, "verdict": {"same": same}}
    row = row_of_server("vllm_server", "run", "eagle3", values | {"tokens_per_second": {"server": 9.0}})
    assert row.passes is passes and row.same_text is None and row.percent == 0
