"""Verifier states that a running vLLM server computes, for verifiers that this process does not want to run.

The server runs vLLM's method `extract_hidden_states`, whose connector writes a file for every request; docs/scaling.md
has its command line. Here stay the final norm and the LM head (verifier.whole=false), which make the record of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from conf.errors import UserError
from data.batches import packed_rows
from data.documents import Document
from data.http import address, client_options, models_of, said, values_of
from models.states import label_rows
from models.verifier import Verifier

BATCH = 32  # documents under way at a time
ANSWER = 600.0  # seconds to wait for one document
WRITTEN = 60.0  # seconds from the answer until its file must be whole
LARGEST_HEADER = 1 << 20  # bytes of a safetensors file beside its tensors
TIE = 0.5  # by how much the server's greedy token may lie below ours, in logits
SAME = {torch.float32: 1e-3}  # relative difference of states, mean over tokens, that rounding explains;
SAME_ROUGHLY = 0.05  # of bfloat16 and float16. A layer further is a quarter in SmolLM2


class ServerStates:
    """`pieces` is what `StateStore.capture` writes. Connects at once; raises UserError, one line, for what is wrong."""

    def __init__(self, url: str, verifier: Verifier):
        self.url, self.verifier = address(url, "server"), verifier
        self.layers = sorted({*verifier.aux_layers, verifier.num_layers})
        self._http = httpx.Client(**client_options(self.url, ANSWER))
        served = models_of(self._ask("GET", "/v1/models"), self.url)
        if len(served) > 1:
            raise UserError(f"expected one model at {self.url}, found {', '.join(served)}")
        [(self.model, self.longest)] = served.items()
        self._checked = False

    def pieces(self, documents: Sequence[Document]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """(aux_TAD, last_PD, top_P, lse_P) of the documents in order; before the first, a look at whether they fit."""
        longest = max((len(document.input_ids) for document in documents), default=0)
        if self.longest is not None and longest >= self.longest:
            raise UserError(
                f"{self.url} takes {self.longest} tokens with the one it writes, and a document has {longest}: start "
                f"it with --max-model-len {longest + 1}, or set data.max_length={self.longest - 1}"
            )
        pool, waiting = ThreadPoolExecutor(BATCH), deque()
        try:
            for document in documents:
                waiting.append((document, pool.submit(self._fetch, document)))
                if len(waiting) == BATCH:
                    yield self._piece(*waiting.popleft())
            while waiting:
                yield self._piece(*waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    @torch.no_grad()
    def _piece(self, document: Document, fetched) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        states_TAD, token = fetched.result()
        verifier, last = self.verifier, self.verifier.num_layers
        states_TAD = states_TAD.to(verifier.device, verifier.dtype)
        last_TD = verifier.final_norm(states_TAD[:, -1])
        taken = [last_TD if i == last else states_TAD[:, self.layers.index(i)] for i in verifier.aux_layers]
        aux_TAD = torch.stack([*taken, last_TD], dim=1)[:, :-1]
        if not self._checked and verifier.whole:
            self._compare(document, fetched.result()[0], aux_TAD, last_TD)
        self._checked = True
        row_V = verifier.logits(last_TD[-1])
        if not 0 <= token < len(row_V) or not row_V.max() - row_V[token] <= TIE:
            raise UserError(
                f"{self.url} goes on with token {token} after document {document.id}, its states with "
                f"{int(row_V.argmax())}: does it serve {verifier.name}, and layers {self.layers}?"
            )
        row_P = label_rows(packed_rows([document])[3]).to(verifier.device)
        return aux_TAD, last_TD[row_P], *verifier.top_and_lse(last_TD[row_P])

    def _compare(self, document: Document, found_TAD: Tensor, aux_TAD: Tensor, last_TD: Tensor) -> None:
        """UserError unless the states are what the verifier computes here; a layer beside the right one is named."""
        bound = max(SAME.get(dtype, SAME_ROUGHLY) for dtype in (found_TAD.dtype, self.verifier.dtype))
        input_ids_BT, document_BT, position_BT, _ = packed_rows([document])
        own = self.verifier.capture(input_ids_BT, document_BT, position_BT)
        pairs = zip((*aux_TAD.unbind(1), last_TD), (*own.aux_BTAD[0].unbind(1), own.last_BTD[0]), strict=True)
        worst = max(_distance(*pair) for pair in pairs)
        if worst <= bound:
            return
        streams = self.verifier.capturing(range(self.verifier.num_layers)).capture(
            input_ids_BT, document_BT, position_BT
        )
        nearest = []
        for found_TD in found_TAD.to(self.verifier.device, self.verifier.dtype).unbind(1):
            distances = [_distance(found_TD, own_TD) for own_TD in streams.aux_BTAD[0].unbind(1)]
            distances.append(_distance(self.verifier.final_norm(found_TD), own.last_BTD[0]))
            layer = min(range(len(distances)), key=distances.__getitem__)
            nearest.append(layer if distances[layer] <= bound else None)
        if None in nearest:
            raise UserError(
                f"{self.url}: expected the states of {self.verifier.name}, found others (by {worst:.2g} of their "
                f"length in the worst layer, rounding explains {bound:g}): another model, or quantised weights?"
            )
        raise UserError(
            f"{self.url}: expected the states that enter layers {self.layers}, found those of {nearest}: start it "
            f"with eagle_aux_hidden_state_layer_ids={self.layers}"
        )

    def _fetch(self, document: Document) -> tuple[Tensor, int]:
        """The file's states [T, layers, D] and the server's next token. The file is gone after that."""
        body = {"model": self.model, "prompt": document.input_ids, "max_tokens": 1, "temperature": 0}
        values = self._ask("POST", "/v1/completions", body | {"repetition_penalty": 1.0, "return_token_ids": True})
        try:
            token, written = values["choices"][0]["token_ids"][0], values.get("kv_transfer_params") or {}
            path = written.get("hidden_states_path")
            if type(token) is not int:
                raise TypeError("no token id")
        except (LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.url}/v1/completions: expected vLLM's answer with token ids, found {str(values)[:80]!r}"
            ) from error
        if not isinstance(path, str):
            raise UserError(
                f"{self.url} serves {self.model} and writes no hidden states: start it with the method "
                "extract_hidden_states and its connector (docs/scaling.md)"
            )
        return self._read(self._its_own(path), document), token

    def _its_own(self, named: str) -> Path:
        """The file that the server names, which is read and then removed. UserError where it can't be one of its own.

        Its lock is opened for writing before anything is read: it must be what vLLM leaves, empty and of that name.
        """
        path, lock = Path(named), Path(f"{named}.lock")
        plain = path.is_absolute() and ".." not in path.parts and path.suffix == ".safetensors" and "\0" not in named
        files = plain and all(not file.exists() or file.is_file() and not file.is_symlink() for file in (path, lock))
        if not files or lock.exists() and lock.stat().st_size:
            raise UserError(
                f"{self.url} names {named} for its states: expected a file of its own, /FOLDER/NAME.safetensors and no "
                "link; nothing was read or removed"
            )
        return path

    def _read(self, path: Path, document: Document) -> Tensor:
        lock, shape = Path(f"{path}.lock"), (len(document.input_ids), len(self.layers), self.verifier.hidden_size)
        try:
            if lock.exists():  # held while the file is written
                with FileLock(lock, timeout=WRITTEN):
                    pass
            if path.stat().st_size > 8 * math.prod(shape) + 8 * shape[0] + LARGEST_HEADER:
                raise KeyError("a file of another size")
            file = load_file(path)
            states_TAD, ids_T = file["hidden_states"], file["token_ids"]
            if len(file) > 2:
                raise KeyError("other tensors beside them")
        except Timeout as error:
            raise UserError(f"{self.url} did not finish {path} within {WRITTEN:g} s; see its log") from error
        except FileNotFoundError as error:
            raise UserError(
                f"{self.url} names {path}, which is not here: shared_storage_path must be a folder that both see by "
                "one name; if it is, the server's log says why nothing was written"
            ) from error
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(
                f"expected hidden_states and token_ids in {path}, found {type(error).__name__} ({error})"
            ) from error
        if ids_T.tolist() != document.input_ids:
            raise UserError(
                f"expected the {len(document.input_ids)} ids of document {document.id} in {path}, found others"
            )
        if states_TAD.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(f"{self.url}: expected states in float32, bfloat16 or float16, found {states_TAD.dtype}")
        if tuple(states_TAD.shape) != shape:
            raise UserError(
                f"{self.url}: expected [tokens, layers, width] = {list(shape)} of {self.verifier.name}, found "
                f"{list(states_TAD.shape)}: start it with eagle_aux_hidden_state_layer_ids={self.layers}"
            )
        if not torch.isfinite(states_TAD).all():
            raise UserError(f"{self.url}: states of document {document.id} are not finite")
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        return states_TAD

    def _ask(self, method: str, path: str, body: dict | None = None) -> dict:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UserError(
                f"no answer from {self.url}{path}: {said(error)}; is the server running? Its log says"
            ) from error
        if answer.status_code != 200:
            raise UserError(f"{self.url}{path} refused (status {answer.status_code}): {answer.text.strip()[:200]!r}")
        try:
            return values_of(answer)
        except ValueError as error:
            raise UserError(f"expected JSON from {self.url}{path}, found {answer.text[:80]!r}") from error


def _distance(a_TD: Tensor, b_TD: Tensor) -> float:
    """Length of the difference over b's, mean over tokens."""
    a_TD, b_TD = a_TD.float(), b_TD.float()
    return float(((a_TD - b_TD).norm(dim=-1) / b_TD.norm(dim=-1)).mean())
