"""A /metrics page of vLLM, and a server that has it."""

from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread


def vllm_page(calls, positions, k=3):
    """Counters after `calls` verify calls, with `positions` accepted by position, of drafts of `k`."""
    counts = {"drafts": calls, "draft_tokens": calls * k, "accepted_tokens": sum(positions)}
    lines = [f"vllm:spec_decode_num_{name}_total {n}" for name, n in counts.items()]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    return "\n".join(lines + [f'{name}{{position="{i}"}} {n}' for i, n in enumerate(positions)]) + "\n"


@contextmanager
def serving(text):
    """Yields the address of a server whose /metrics is `text`."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            body = text.encode()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
