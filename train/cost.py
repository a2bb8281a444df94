"""What training costs, from shapes alone: floating-point operations, bytes, disk, memory (docs/scaling.md).

Products of [m, k] and [k, n] count 2 m k n. Norms, activations and softmaxes are left out: they are memory traffic, not
products. `tests/test_cost.py` holds the counts against torch's counter on the real step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

FORWARD_BACKWARD = 3  # products of a linear layer: forward, gradient of the weight, gradient of the input
ADAMW_BYTES = 28  # a parameter and step: weight, gradient and two moments read, weight and moments written, float32
STATE_BYTES = 16  # a trained parameter: weight, gradient and two moments, float32
BLOCK_BYTES = 3 * 4 * 2**25  # logits, teacher and gradient of one block (models.token_loss.BLOCK_LOGITS), float32


@dataclass(frozen=True)
class VerifierCost:
    """total, active: parameters of the layers in all, and those that a token passes; experts are what is between.

    Attention of a token over c tokens: 4 heads * head_dim * c operations in each of `layers`.
    """

    layers: int
    hidden: int
    vocab: int
    total: int
    active: int
    ends: int  # embedding, LM head and final norm
    heads_dim: int

    @classmethod
    def of(cls, model: nn.Module, layers: nn.ModuleList, text) -> VerifierCost:
        """Counted on the model (`models.parts.outline` needs no weights). text: its text config."""
        total = sum(p.numel() for p in layers.parameters())
        experts = sum(p.numel() for name, p in layers.named_parameters() if ".experts." in f".{name}")
        chosen, every = getattr(text, "num_experts_per_tok", None), _experts(text)
        active = total - (round(experts * (1 - chosen / every)) if experts and chosen and every else 0)
        seen = {id(p): p.numel() for p in model.parameters()}
        inside = sum(seen.get(id(p), 0) for p in layers.parameters())
        size = getattr(text, "v_head_dim", None) or getattr(text, "head_dim", None)
        size = size or text.hidden_size // text.num_attention_heads
        return cls(
            len(layers), text.hidden_size, text.vocab_size, total, active, sum(seen.values()) - inside,
            text.num_attention_heads * size,
        )  # fmt: skip

    def capture(self, tokens: float, labels: float, length: float) -> float:
        """Operations of one pass over `tokens` in documents of `length`, with the whole LM head at `labels` rows."""
        attention = self.layers * 4 * self.heads_dim * (length + 1) / 2
        return tokens * (2 * self.active + attention) + labels * 2 * self.vocab * self.hidden

    def write(self, tokens: float, length: float) -> float:
        """Operations of writing or reading `tokens` one by one, with the LM head at each."""
        return self.capture(tokens, tokens, length)

    def weight_bytes(self, itemsize: int) -> int:
        return (self.total + self.ends) * itemsize


def _experts(text) -> int | None:
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    return next((value for name in names if (value := getattr(text, name, None))), None)


@dataclass(frozen=True)
class HeadCost:
    """kind: of models.heads. steps: K. layers: decoder layers of an independent draft. blocks: of a Medusa head.

    query, key_value: widths of queries, and of keys and values together. aux: captured layers.
    """

    kind: str
    hidden: int
    mlp: int
    query: int
    key_value: int
    draft_vocab: int
    aux: int
    steps: int
    train_lm_head: bool = True
    layers: int = 1
    blocks: int = 1

    @property
    def body(self) -> int:
        """Parameters without the LM head, matrices alone."""
        D, layer = self.hidden, self.query * self.hidden + 3 * self.hidden * self.mlp
        qkv = (self.query + self.key_value) * D
        return {
            "eagle1": 2 * D * D + qkv + layer,
            "eagle3": self.aux * D * D + 2 * qkv + layer,
            "medusa": self.steps * self.blocks * D * D,
            "independent": self.layers * (qkv + layer),
        }[self.kind]

    @property
    def lm_head(self) -> int:
        return self.draft_vocab * self.hidden

    @property
    def trained(self) -> int:
        """An EAGLE-1 head drafts with the verifier's LM head, which is not its own."""
        return self.body + (self.lm_head if self.train_lm_head and self.kind != "eagle1" else 0)

    def every_row(self) -> float:
        """Operations of a token, answer or not: fc and the keys and values of step 0, forward and backward."""
        D = self.hidden
        if self.kind == "eagle3":  # what the verifier captured takes no gradient
            return 2 * (2 * self.aux * D * D + FORWARD_BACKWARD * 2 * D * self.key_value)
        if self.kind == "eagle1":
            return 2 * (2 * 2 * D * D + FORWARD_BACKWARD * D * self.key_value)
        return 2 * FORWARD_BACKWARD * self.body if self.kind == "independent" else 0.0

    def anchor(self) -> float:
        """Operations of an anchor and all its draft steps, without attention and LM head."""
        D, qkv = self.hidden, self.query + self.key_value
        if self.kind in ("eagle1", "eagle3"):
            layer = self.steps * (qkv * D + self.query * D + 3 * D * self.mlp)
            if self.kind == "eagle3":
                return 2 * FORWARD_BACKWARD * (layer + qkv * D)  # the embeddings' half of q, k, v, once
            # fc's hidden half at every step, its other half once; no gradient of what the verifier gave, nor of the
            # first step's own keys and values, which nobody reads.
            fc = self.steps * FORWARD_BACKWARD * D * D + 2 * D * D - D * D
            return 2 * (FORWARD_BACKWARD * layer + fc - 2 * D * self.key_value)
        first = self.steps * D * D  # a Medusa head's first block reads the verifier's state, which takes no gradient
        return 2 * (FORWARD_BACKWARD * self.body - first) if self.kind == "medusa" else 0.0

    def attention(self, length: float) -> float:
        """Of an anchor over documents of `length`: scores and sums forward, and five such products backward."""
        if self.kind == "medusa":
            return 0.0
        return 2 * 7 * self.query * self.steps * self.layers * length

    def logits(self) -> float:
        """Of an anchor: LM head with its gradients, and the loss's product with the teacher."""
        passes = FORWARD_BACKWARD - (not self.train_lm_head or self.kind == "eagle1")
        return self.steps * (2 * passes * self.lm_head + 2 * self.draft_vocab)

    def teacher(self) -> float:
        """Of a label row: the verifier's logits of the draft columns."""
        return 2 * self.lm_head

    def step(self, tokens: float, anchors: float, length: float) -> float:
        """Operations of a training step on `tokens`, of which `anchors` are supervised, in documents of `length`."""
        each = self.anchor() + self.attention(length) + self.logits() + self.teacher()
        return tokens * self.every_row() + anchors * each

    def optimizer_bytes(self) -> int:
        """Moved by AdamW in a step."""
        return ADAMW_BYTES * self.trained

    def memory(self, tokens: float, anchors: float) -> float:
        """Bytes of weights, gradients, moments and of what a step on so many rows keeps for its backward pass."""
        D, qkv = self.hidden, self.query + self.key_value
        frozen = 4 * (self.body + self.lm_head - self.trained)
        row = self.aux * D + 6 * D + 2 * self.key_value
        draft = 8 * D + 3 * qkv + 2 * self.query + 4 * self.mlp
        if self.kind == "medusa":
            row, draft = D, 3 * self.blocks * D
        if self.kind == "independent":
            row, draft = self.layers * draft, D
        weights = STATE_BYTES * self.trained + max(frozen, 0) + 4 * self.lm_head
        return weights + 4 * (tokens * row + anchors * self.steps * draft) + BLOCK_BYTES
