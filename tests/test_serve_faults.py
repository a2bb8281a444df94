"""What a server, an engine or a head may answer that can't be compared: one line each, and nothing taken for equal."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from conf.errors import UserError
from eval.serving.certificate import Pair
from eval.serving.client import Server
from eval.serving.metrics import Tally
from eval.serving.online import ask_template
from eval.serving.rows import Row
from eval.serving.suspects import suspects
from eval.serving.verdict import Evidence, TextDifference, judge
from models.verifier import Verifier
from tiny import tiny_model, tiny_tokenizer

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize("gap", [NAN, INFINITE, -INFINITE, None])
def test_a_gap_that_is_no_number_is_no_tie(gap):
    for ours in (1, 2):  # the engine drafts 1
        pair = Pair(0, 0, 1, 1, ours, gap)
        assert not pair.tie and not pair.equal
    assert Pair(0, 0, 1, 1, 2, 1e-5).tie and Pair(0, 0, 1, 1, 1, 0.0).equal


def test_a_text_without_a_gap_is_no_tie():
    other = TextDifference("p", 1, "a", "b", NAN)
    assert Evidence(Tally(9), Tally(9), [], "float32", texts=[other]).moved == [other]


def test_where_nothing_passed_nothing_was_tested():
    """SGLang's counters of texts of two tokens: the prefill's, and the verifier's own."""
    none = Tally(4, accepted=0)
    verdict = judge(Evidence(none, none, [Tally(1, accepted=0)] * 4, "float32"))
    assert not verdict.same and "nothing was tested" in verdict.line


def test_faults_of_no_rates():
    assert suspects(None, None, [[1, 2]], [[3, 4]], Tally(0, 0, 0, (0, 0, 0)).rates) == []


@pytest.mark.parametrize("positions", [[0.5], [0.5, 0.2, 0.1]])
def test_another_number_of_positions(positions):
    with pytest.raises(UserError, match=f"expected acceptance of 2 positions from toy, found {len(positions)}"):
        Row("toy", "h", "eagle3", 2, 1, 1, 1, 1.5, 1.5, positions, [0.5, 0.2], None, 1.0, 1.0)


@pytest.mark.parametrize("url", ["http://[::1", "http://h:abc", "http://h:99999999", "http://"])
def test_urls_that_are_none(url):
    with pytest.raises(UserError, match="expected serve=http://HOST:PORT"):
        Server(url)


@pytest.fixture
def answers():
    """A server that says what is put into the dict, by path."""
    said: dict[str, object] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(said[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield said, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("data", [[], [{"id": None}], [{"id": 3}], [{"id": ["a"]}], None])
def test_models_without_names(answers, data):
    said, url = answers
    said["/v1/models"] = {"data": data}
    with pytest.raises(UserError, match="/v1/models lists none"):
        Server.connect(url)


@pytest.mark.parametrize("tokens", [["a", "b"], [10**20], [-1], [True], 7, [99999]])
def test_a_template_that_is_no_token_ids(answers, tokens, tmp_path):
    said, url = answers
    said["/tokenize"] = {"count": 1, "tokens": tokens}
    tiny_model(layers=3, hidden=32).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    verifier = Verifier.load(str(tmp_path), dtype="float32", device="cpu", aux_layers=[])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "What is it?"}) + "\n")
    server = Server(url)
    found = ask_template(server, verifier, str(prompts))
    server.close()
    assert found.same is not True and "token ids" in found.said


@pytest.mark.parametrize("ids", [["a"], [10**20], "ab"])
def test_a_completion_of_no_token_ids(answers, ids):
    said, url = answers
    choice = {"text": "x", "token_ids": ids, "finish_reason": "stop"}
    said["/v1/completions"] = {"choices": [choice], "usage": {"completion_tokens": 1}}
    server = Server(url)
    with pytest.raises(UserError, match="expected an OpenAI completion"):
        server.complete([1, 2], 4, [0])
    server.close()
