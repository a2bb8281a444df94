"""What is to be served, and where: the input of the tuner. conf/workload/ has examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class WorkloadConf:
    """Numbers that are null are unknown; which ones are needed then is said in one line. No tasks: chat."""

    name: str | None = None
    # The verifier. Its shape gives bytes and operations where no times were measured.
    verifier: str | None = None
    parameters: float | None = None  # billions that a token passes
    layers: int | None = None
    hidden: int | None = None
    vocab: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    weight_bits: float = 16
    kv_bits: float = 16
    # The machine, all devices together
    accelerator: str | None = None  # its name; one with "cpu" in it is one
    bandwidth: float | None = None  # of its memory, GB/s
    tflops: float | None = None  # dense matrix products in the dtype served
    memory: float | None = None  # GiB for weights and caches
    # The traffic
    batch: int = 1  # sequences at once
    prompt_tokens: int = 512
    answer_tokens: int = 256
    p50_ms: float | None = None  # a token, on average
    p99_ms: float | None = None  # the longest wait for the next tokens: a round of drafts and verify
    tasks: Any = None  # shares of chat, code, math, instructions, summary and creative: {chat: 0.8, code: 0.2}
    temperature: float = 0.0
    # The engine
    engine: str = "vllm"  # vllm | sglang | tensorrt_llm | llamacpp | openvino | transformers | eyrie | other
    engine_version: str | None = None  # null: the one that the table knows
    rollback: bool | None = None  # it can take back rejected drafts of this model; null: as the table of engines says
    acceptance: str = "exact"  # any other rule is lossy
    # What drafts are there
    # of those at hand, trained well: eagle1 (eagle2 too), eagle3, medusa
    heads: list[str] = field(default_factory=list)
    draft_parameters: float | None = None  # billions, of a smaller model with the verifier's tokenizer
    training_dialogues: int = 0  # the verifier's own answers that the budget allows to train on
    # Whose head it is, in hashes or revisions; null: the run's, or not known
    verifier_revision: str | None = None
    tokenizer: str | None = None
    head_verifier_revision: str | None = None
    head_tokenizer: str | None = None

    @property
    def mix(self) -> dict[str, float]:
        return {"chat": 1.0} if self.tasks is None else self.tasks
