"""A tiny EAGLE-3 head and random verifier states, in float64, that several tests share."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from models.heads import build, kind_of
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.losses import head_loss
from models.objectives import Labels, Objective
from models.states import VerifierStates, label_rows
from models.vocab import DraftVocab

V, D, A = 23, 16, 3
OWN = ("aux_layers", "draft_vocab_size")


def make_config(R=13, **changes):
    values = dict(
        hidden_size=D,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        vocab_size=V,
        draft_vocab_size=R,
        aux_layers=(1, 2, 3),
        verifier_hidden_size=D,
    )
    return Eagle3Config(**{**values, **changes})


def make_head(seed=0, R=13, **changes):
    config = make_config(R, **changes)
    generator = torch.Generator().manual_seed(seed)
    vocab = DraftVocab(torch.randperm(V, generator=generator)[:R].sort().values, V)
    head = Eagle3Head(config, torch.randn(V, D, generator=generator, dtype=torch.float64), vocab).double()
    with torch.no_grad():
        for p in head.parameters():  # lively weights, so that nothing is checked on near-zeros
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * (0.3 if p.dim() > 1 else 0.1))
            if p.dim() == 1:
                p += 1
    return head


def make_other(kind, seed=0):
    """A toy head of another kind, with lively float64 weights. It reads one captured state."""
    generator = torch.Generator().manual_seed(seed)
    embedding, lm_head = (torch.randn(V, D, generator=generator, dtype=torch.float64) for _ in range(2))
    ids = torch.arange(V) if kind == "eagle1" else torch.randperm(V, generator=generator)[:13].sort().values
    verifier = SimpleNamespace(embedding_VD=embedding, lm_head=None, config=None, lm_head_rows=lambda: lm_head)
    geometry = make_config().to_dict()
    config = kind_of(kind)[0].from_verifier({k: geometry[k] for k in geometry if k not in OWN}, (3,), len(ids))
    head = build(config, verifier, DraftVocab(ids, V)).double()
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * (0.3 if p.dim() > 1 else 0.1))
            if p.dim() == 1:
                p += 1
    return head


def make_states(rows, seed=0):
    """Random states of packed rows. A row is a list of documents, a document a string: p prompt, A.. answer, u user.

    Pads are a last "document" of dashes.
    """
    generator = torch.Generator().manual_seed(seed)
    T = max(sum(map(len, row)) for row in rows)
    document, position, span = (torch.full((len(rows), T), x) for x in (-1, 0, -1))
    docs = spans = 0
    for b, row in enumerate(rows):
        t = 0
        for text in row:
            for i, letter in enumerate(text):
                if letter == "-":
                    continue
                document[b, t + i], position[b, t + i] = docs, i
                if letter.isupper():
                    spans += i == 0 or not text[i - 1].isupper()
                    span[b, t + i] = spans - 1
            t, docs = t + len(text), docs + ("-" not in text)
    index = label_rows(span)
    P = len(index)
    return VerifierStates(
        input_ids_BT=torch.randint(V, (len(rows), T), generator=generator),
        document_BT=document,
        position_BT=position,
        span_BT=span,
        aux_BTAD=torch.randn(len(rows), T, A, D, generator=generator, dtype=torch.float64),
        last_PD=torch.randn(P, D, generator=generator, dtype=torch.float64),
        last_index_P=index,
        top_P=torch.randint(V, (P,), generator=generator),
        lse_P=torch.full((P,), 4.0, dtype=torch.float64),
    )


def teacher(states, R=13, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(states.last_index_P), R, generator=generator, dtype=torch.float64)


def labels_of(states, teacher_PR, steps):
    """The text's own labels, by a made-up teacher's logits."""
    labels = Labels.given(states, lambda hidden: hidden, steps)
    return replace(labels, law=lambda rows: (teacher_PR[rows] - states.lse_P[rows, None]).exp())


def ttt_loss(head, states, teacher_PR, steps, step_decay=0.8, **switches):
    """`head_loss` with the text's own labels."""
    objective = Objective(steps=steps, step_decay=step_decay, **switches)
    return head_loss(head, states, labels_of(states, teacher_PR, steps), objective)


def one_by_one(label_N, count):
    """row_MU of `token_loss`: the rows of each label, in order, filled up with N."""
    rows = [(label_N == label).nonzero().flatten().tolist() for label in range(count)]
    most = max(map(len, rows))
    return torch.tensor([[*row, *[len(label_N)] * (most - len(row))] for row in rows])


def head_of(verifier, start=True):
    """A head for a tiny verifier over every second token, started from its last layer or left random."""
    torch.manual_seed(0)
    vocab = DraftVocab(torch.arange(0, verifier.vocab_size, 2), verifier.vocab_size)
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, len(vocab))
    head = Eagle3Head(config, verifier.embedding_VD, vocab)
    if start:
        head.start_from_verifier(
            verifier.layer_state_dict(), verifier.final_norm_weight, verifier.lm_head_rows(vocab.ids_R)
        )
    return head.eval()
