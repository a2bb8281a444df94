"""One point of the bench: shapes, and a file of random weights and states that every rival reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import UserError
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.states import VerifierStates, label_rows
from models.vocab import DraftVocab

LOGIT_SPREAD = 4.0  # standard deviation of the random verifier's logits
CHUNK = 128  # rows of full-vocabulary logits at a time


@dataclass(frozen=True)
class Setting:
    """tokens: T of one packed row of equal documents.  fraction: of each document that is answer, at its end.

    steps: K.  draft_vocab: R.  dtype: of matrix products ("bfloat16": under autocast, weights stay float32).
    answer_first: the answer opens the document instead.  Raises UserError for shapes without anything to learn.
    """

    tokens: int
    fraction: float
    steps: int
    draft_vocab: int
    documents: int = 1
    dtype: str = "float32"
    answer_first: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.fraction <= 1 and self.steps >= 1 and self.draft_vocab >= 2 and self.documents >= 1):
            raise UserError(
                f"expected 0 < fraction <= 1, steps and documents of 1 or more and a draft vocabulary, found {self}"
            )
        if self.answer < self.steps + 2:
            raise UserError(
                f"{self.tokens} tokens in {self.documents} documents with {self.fraction:g} of answer leave answers of "
                f"{self.answer} tokens, expected {self.steps + 2} or more for {self.steps} steps: give more tokens"
            )

    @property
    def length(self) -> int:
        """Tokens of a document."""
        return self.tokens // self.documents

    @property
    def answer(self) -> int:
        """Answer tokens of a document."""
        return round(self.fraction * self.length)

    @property
    def autocast(self) -> bool:
        return self.dtype != "float32"


@dataclass(frozen=True)
class Axes:
    """Values of T, of the answer's fraction, of K and of R."""

    tokens: list[int]
    fractions: list[float]
    steps: list[int]
    vocabularies: list[int]


@dataclass(frozen=True)
class Loaded:
    """What a rival works on, in memory of its own.

    last_TD: the verifier's post-norm last hidden state at every row.  lm_VD: its LM head.
    """

    setting: Setting
    head: Eagle3Head
    states: VerifierStates
    last_TD: Tensor
    lm_VD: Tensor


def write_setting(path: Path, setting: Setting, geometry: dict, aux_layers: tuple[int, ...], seed: int = 0) -> None:
    """Random states, verifier and head of the verifier's geometry (Verifier.head_geometry).

    The verifier's rows outside the draft vocabulary are small, so that its best token is always inside: a random
    teacher would put most rows outside, and we skip those.
    """
    V, D = geometry["vocab_size"], geometry["hidden_size"]
    if setting.draft_vocab > V:
        raise UserError(f"draft vocabulary of {setting.draft_vocab}: expected {V} or less, the verifier's")
    numbers = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers)

    config = Eagle3Config.from_verifier(geometry, aux_layers, setting.draft_vocab)
    ids_R = torch.arange(setting.draft_vocab) * V // setting.draft_vocab
    embedding_VD = normal(V, D)
    head = Eagle3Head(config, embedding_VD, DraftVocab(ids_R, V))
    weights = {name: 1 + 0.1 * normal(*w.shape) if w.dim() == 1 else normal(*w.shape) / w.shape[1] ** 0.5
               for name, w in head.state_dict().items()}  # fmt: skip
    lm_VD = normal(V, D) * (LOGIT_SPREAD / D**0.5)
    lm_VD[(head.inverse_V < 0)] *= 0.01
    length, answer = setting.length, setting.answer
    position_T = torch.arange(length * setting.documents) % length
    document_T = torch.arange(length * setting.documents) // length
    inside_T = position_T < answer if setting.answer_first else position_T >= length - answer
    tensors = {f"head.{name}": weight for name, weight in weights.items()} | {
        "ids_R": ids_R,
        "input_ids": torch.randint(V, position_T.shape, generator=numbers),
        "document": document_T,
        "position": position_T,
        "span": torch.where(inside_T, document_T, -1),
    }
    dtype = getattr(torch, setting.dtype)
    last_TD = normal(len(position_T), D).sign()  # of unit RMS, so that a norm over it changes nothing
    frozen = {"embedding": embedding_VD, "lm_head": lm_VD, "last": last_TD}
    frozen["aux"] = normal(len(position_T), len(aux_layers), D)
    # Rounded in every dtype, so that float32 is the exact answer to bfloat16's question.
    tensors |= {name: tensor.bfloat16().to(dtype) for name, tensor in frozen.items()}
    about = {"setting": json.dumps(asdict(setting)), "config": json.dumps(config.to_dict())}
    save_file(tensors, path, metadata=about)


def read_setting(path: Path | str) -> Loaded:
    """Everything copied out of the file, so that no page of it is first touched inside a step that is measured."""
    with safe_open(path, "pt") as file:
        about = file.metadata()
        found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no dict
    setting, config = Setting(**json.loads(about["setting"])), Eagle3Config.from_dict(json.loads(about["config"]))
    head = Eagle3Head(config, found["embedding"], DraftVocab(found["ids_R"], config.vocab_size))
    head.load_state_dict({name.removeprefix("head."): w for name, w in found.items() if name.startswith("head.")})
    last_P = label_rows(found["span"][None])
    last_PD = found["last"][last_P]
    top_P, lse_P = top_and_lse(last_PD, found["lm_head"])
    assert bool((head.inverse_V[top_P] >= 0).all()), "the random verifier's best token left the draft vocabulary"
    rows = [found[name][None] for name in ("input_ids", "document", "position", "span", "aux")]
    return Loaded(setting, head, VerifierStates(*rows, last_PD, last_P, top_P, lse_P), found["last"], found["lm_head"])


@torch.no_grad()
def top_and_lse(last_PD: Tensor, lm_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Full-vocabulary argmax and log-sum-exp [P], by chunks: what capture does at the label rows."""
    pairs = []
    for rows in last_PD.split(CHUNK):
        logits = F.linear(rows, lm_VD).float()
        pairs.append((logits.argmax(-1), logits.logsumexp(-1)))
    top, lse = zip(*pairs, strict=True)
    return torch.cat(top), torch.cat(lse)
