"""States from a vLLM server: a stand-in that writes the same files, honest and with each fault."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conf.errors import UserError
from conf.schema import DataCommandConf
from data.command import run
from data.documents import Document
from data.server_states import ServerStates
from data.store import StateStore
from tiny import tiny_model, tiny_verifier

LAYERS = [2, 3, 4, 7]  # of the default head on seven layers, and the last


class Server(ThreadingHTTPServer):
    """Runs transformers' own model; `stream[i]` enters layer i, and stream[7] the final norm."""

    def __init__(self, folder, **faults):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.layers, self.model, self.lock = (
            folder,
            LAYERS,
            tiny_model(layers=7, hidden=32),
            threading.Lock(),
        )
        self.models, self.fault = [{"id": "tiny", "max_model_len": 200}], ""
        self.__dict__.update(faults)
        self.streams, inner = {}, self.model.model
        for index, module in enumerate([*inner.layers, inner.norm]):
            module.register_forward_pre_hook(self.keep(index), with_kwargs=True)

    def keep(self, index):
        def hook(_module, args, kwargs):
            self.streams[index] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    @torch.no_grad()
    def complete(self, ids):
        with self.lock:
            token = int(self.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            states = torch.stack([self.streams[layer] for layer in self.layers], dim=1)
            path = self.folder / f"{len(list(self.folder.iterdir()))}-{token}.safetensors"
            if self.fault == "nan":
                states[3] = float("nan")
            given = ids[::-1] if self.fault == "ids" else ids
            if self.fault == "file":
                path.write_bytes(b"half of it")
            elif self.fault != "absent":
                save_file({"hidden_states": states, "token_ids": torch.tensor(given)}, path)
                path.with_name(f"{path.name}.lock").touch()
        moved = None if self.fault == "plain" else {"hidden_states_path": str(path)}
        return {"choices": [{"token_ids": [token]}], "kv_transfer_params": moved}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, values, status=200):
        body = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"data": self.server.models})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert asked["model"] == "tiny" and asked["temperature"] == 0 and asked["max_tokens"] == 1
        if self.server.fault == "refuses":
            return self.answer({"error": {"message": "out of memory"}}, 500)
        return self.answer(self.server.complete(asked["prompt"]))


@pytest.fixture
def serving(tmp_path):
    servers = []

    def start(**faults):
        (tmp_path / "files").mkdir(exist_ok=True)
        servers.append(Server(tmp_path / "files", **faults))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier(layers=7, hidden=32)


def documents(count=40):
    rng = np.random.default_rng(0)
    lengths = rng.integers(12, 60, count).tolist()
    return [Document(f"d{i}", rng.integers(3, 500, n).tolist(), [(4, 8), (9, n)]) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("layers", [None, [], [3, 7]])
def test_the_store_is_the_one_that_is_computed_here(serving, tmp_path, layers):
    """More documents than are under way at once, several shards; the un-normed last stream becomes the normed one."""
    verifier, here = tiny_verifier(layers=7, hidden=32, aux_layers=layers), documents()
    server = serving(layers=sorted({*verifier.aux_layers, 7}))
    store = StateStore.capture(
        verifier, here, tmp_path / "served", shard_tokens=500, pieces=ServerStates(server.url, verifier).pieces
    )
    own = StateStore.capture(verifier, here, tmp_path / "own", shard_tokens=500)
    assert store.index == own.index and len(store.shards) > 2
    found, wanted = store.states(range(len(here))), own.states(range(len(here)))
    for name in ("aux_BTAD", "last_PD", "lse_P"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), atol=1e-4, rtol=1e-4)
    assert torch.equal(found.top_P, wanted.top_P)
    assert not list(server.folder.iterdir())


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"layers": [3, 4, 5, 7]}, r"enter layers \[2, 3, 4, 7\], found those of \[3, 4, 5, 7\]"),
        ({"layers": [2, 3, 7]}, r"\[\d+, 4, 32\] of tiny-llama, found \[\d+, 3, 32\].*layer_ids=\[2, 3, 4, 7\]"),
        ({"layers": [2, 3, 4, 6]}, r"enter layers \[2, 3, 4, 7\], found those of \[2, 3, 4, 6\]"),
        ({"model": tiny_model(layers=7, hidden=32, seed=5)}, "expected the states of tiny-llama, found others"),
        ({"model": tiny_model(layers=7, hidden=64)}, r"4, 32\] of tiny-llama, found \[\d+, 4, 64\]"),
        ({"fault": "plain"}, "serves tiny and writes no hidden states"),
        ({"fault": "absent"}, "names .*safetensors, which is not here"),
        ({"fault": "file"}, "expected hidden_states and token_ids in .*, found SafetensorError"),
        ({"fault": "ids"}, r"expected the \d+ ids of document d0 .*, found others"),
        ({"fault": "nan"}, "states of document d0 are not finite"),
        ({"fault": "refuses"}, r"refused \(status 500\).*out of memory"),
        ({"models": []}, "lists none"),
        ({"models": [{"id": "a"}, {"id": "b"}]}, "expected one model at .*, found a, b"),
        ({"models": [{"id": "tiny", "max_model_len": 40}]}, r"--max-model-len \d+, or set data.max_length=39"),
    ],
)
def test_a_fault_is_one_line(serving, verifier, faults, said):
    with pytest.raises(UserError, match=said) as caught:
        list(ServerStates(serving(**faults).url, verifier).pieces(documents()))
    assert "\n" not in str(caught.value)


def test_states_of_other_weights_are_told_by_their_values(serving, verifier):
    """A model that goes on alike but whose early layers differ: another model, or a coarse quantisation of it."""
    server = serving()
    with torch.no_grad():
        server.model.model.layers[1].mlp.down_proj.weight.mul_(1.02)
    with pytest.raises(UserError, match="found others .*another model, or quantised weights"):
        list(ServerStates(server.url, verifier).pieces(documents()))


def test_without_its_layers_the_verifier_still_sees_a_wrong_last_stream(serving, verifier, monkeypatch):
    monkeypatch.setattr(verifier, "whole", False)
    assert len(list(ServerStates(serving().url, verifier).pieces(documents(3)))) == 3
    with pytest.raises(UserError, match="goes on with token"):
        list(ServerStates(serving(layers=[2, 3, 4, 6]).url, verifier).pieces(documents(3)))


def test_no_server(verifier):
    with pytest.raises(UserError, match=r"no answer from http://127.0.0.1:9/v1/models: .*is the server running"):
        ServerStates("http://127.0.0.1:9", verifier)
    with pytest.raises(UserError, match="expected server=http://HOST:PORT, found localhost:8000"):
        ServerStates("localhost:8000", verifier)
    with pytest.raises(UserError, match="with task=capture, found it with task=vocab"):
        run(DataCommandConf(task="vocab", server="http://127.0.0.1:9"))
