"""The worker for llama.cpp's server, against a stand-in that answers and logs as the server does."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SERVER = '''
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[1:]
drafts = "-md" in words
LOG = """print_info: EOG token             = 2 '<|im_end|>'
slot launch_slot_: id  0 | task -1 | launching slot : {}
spec  draft:  - seq_id 0, draft candidate   0, pos   0:   7 (   0.270) ' a'
spec  draft:  - seq_id 0, draft candidate   1, pos   0:   9 (   0.167) ' b'
spec  draft:  - seq_id 0, draft candidate   0, pos   1:   8 (   0.648) ' c'
slot handle_last_: id  0 | task 0 | generate_draft: id=5, #tokens=3, #draft=2, pos_next=3
slot operator(): id  0 | task 0 | add accepted tokens: sampled=6, ids.size=2, n_draft=2
spec  draft:  - seq_id 0, draft candidate   0, pos   0:   3 (   0.270) ' a'
spec  draft:  - seq_id 0, draft candidate   0, pos   1:   4 (   0.270) ' a'
slot handle_last_: id  0 | task 0 | generate_draft: id=6, #tokens=5, #draft=1, pos_next=5
slot operator(): id  0 | task 0 | add accepted tokens: sampled=2, ids.size=1, n_draft=1"""
METRICS = """# HELP llamacpp:spec_decode_num_drafts_total Speculative: ...
llamacpp:spec_decode_num_drafts_total 2
llamacpp:spec_decode_num_draft_tokens_total 3
llamacpp:spec_decode_num_accepted_tokens_total 1
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 1
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 0
"""
class Handler(BaseHTTPRequestHandler):
    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())
    def do_GET(self):
        own = METRICS if drafts else ""
        self.answer({"/metrics": own, "/props": '{"build_info": "b1"}'}.get(self.path, "{}"))
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["temperature"] == 0 and body["cache_prompt"] is False, body
        print(LOG if drafts else LOG[:50], flush=True)
        self.answer(json.dumps({"tokens": [5, 7, 6, 2], "words": words}))
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
'''


def worker():
    file = Path("eval/serving/engines/llamacpp_worker.py")
    spec = importlib.util.spec_from_file_location("llamacpp_worker", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("with_head", [True, False])
def test_the_worker_collects_texts_counters_and_drafts(tmp_path, with_head):
    binary = tmp_path / "llama-server"
    binary.write_text(f"#!{sys.executable}\n{SERVER}")
    binary.chmod(0o755)
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "head.gguf").touch()
    job = {"program": str(binary), "verifier": "v.gguf", "head": str(tmp_path / "head") if with_head else None}
    job |= {"method": "eagle3", "depth": 2, "dtype": "float32", "threads": 1, "prompts": [[1, 2, 3]]}
    job |= {"max_new_tokens": 4, "stop_ids": [2]}
    (tmp_path / "job.json").write_text(json.dumps(job))
    worker().main(tmp_path / "job.json", tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result.pop("seconds") > 0 and result.pop("engine") == "llama.cpp b1"
    texts = [[5, 7, 6, 2]]
    if with_head:
        counted = {"verify_calls": 2, "drafted": 3, "accepted": 1, "accepted_by_position": [1, 0]}
        assert result == {"texts": texts, "rounds": [[[1, [7, 8]], [3, [3]]]], **counted}
    else:
        counted = {"verify_calls": 0, "drafted": 0, "accepted": 0, "accepted_by_position": None}
        assert result == {"texts": texts, "rounds": None, **counted}
    (tmp_path / "job.json").write_text(json.dumps(job | {"stop_ids": [9]}))
    with pytest.raises(SystemExit, match=r"ends texts at \[2\], and not at \[9\]"):
        worker().main(tmp_path / "job.json", tmp_path / "result.json")


def test_the_worker_asks_for_exactly_the_jobs_chain():
    job = {"program": "b", "verifier": "v.gguf", "head": "h.gguf", "depth": 3, "dtype": "bfloat16", "threads": 2}
    words = worker().command(job | {"prompts": [[1, 2]], "max_new_tokens": 8}, 1234)
    pairs = dict(zip(words, words[1:], strict=False))
    assert pairs["--spec-type"] == "draft-eagle3" and pairs["-md"] == "h.gguf" and pairs["-np"] == "1"
    assert pairs["--spec-draft-n-max"] == pairs["--spec-draft-n-min"] == "3" and pairs["--spec-draft-p-min"] == "0"
    assert pairs["-ctk"] == pairs["-ctv"] == pairs["-ctkd"] == pairs["-ctvd"] == "bf16"
    assert "-md" not in worker().command(job | {"head": None, "prompts": [[1, 2]], "max_new_tokens": 8}, 1234)
