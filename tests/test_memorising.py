"""On a few texts that it may learn by heart, each head's loss falls to near nothing and it drafts them by itself."""

import pytest
import torch

from data.batches import packed_rows
from data.documents import Document
from eval.counts import Counts
from eval.speculative.loop import plain_decode, speculative_decode
from eval.speculative.processors import Sampling
from eval.speculative.scorers import drafter_for
from eval.speculative.shapes import FixedTree
from models import heads
from models.losses import head_loss
from models.objectives import Labels, Objective
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import tiny_model, tiny_tokenizer

GREEDY, DEPTH, LENGTH = Sampling(), 5, 36
FEATURE = {"feature_weight": 1.0, "token_weight": 0.1}
# kind, steps K, objective, optimizer steps, learning rate, least n-alpha of the depths that are held to one
CASES = {
    "eagle3": ("eagle3", 5, {}, 260, 4e-3, [0.95] * 5),
    "eagle1": ("eagle1", 1, FEATURE, 400, 1e-2, [0.9]),
    "medusa": ("medusa", 5, {}, 260, 1e-2, [0.9] * 5),
    "independent": ("independent", 1, {}, 200, 3e-3, [0.95] * 5),
}


def verifier_of(kind):
    """Tiny, and sure of itself: with laws near point masses the least loss is near 0."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    return Verifier(model, tiny_tokenizer(), "tiny", heads.captured_layers(kind, None))


def texts(verifier, count=4):
    """Prompts and the verifier's greedy answers to them."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 400, (6,), generator=generator).tolist() for _ in range(count)]
    return [
        (prompt, plain_decode(verifier, prompt, max_new_tokens=LENGTH + DEPTH, sampling=GREEDY).tokens)
        for prompt in prompts
    ]


def learn(kind, verifier, data, steps, objective, updates, rate):
    """A head after `updates` steps on all texts, and its last loss."""
    documents = [Document("", p + t, [(len(p), len(p) + len(t))]) for p, t in data]
    states = verifier.states(*packed_rows(documents))
    counts = torch.bincount(torch.tensor([t for _, text in data for t in text]), minlength=512)
    vocab = DraftVocab.identity(512) if kind == "eagle1" else DraftVocab.from_counts(counts, 200)
    torch.manual_seed(0)
    head = heads.build(
        heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, verifier.aux_layers, len(vocab)), verifier, vocab
    )
    head.start(verifier, None if kind == "eagle1" else -1, True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, betas=(0.9, 0.95))
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (update + 1) / 20) * (1 - update / updates)
        labels = Labels.given(states, verifier.draft_logits(None if vocab.is_identity else vocab.ids_R), steps)
        loss, weight, _ = head_loss(head, states, labels, Objective(steps=steps, **objective))
        optimizer.zero_grad()
        (loss / weight).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
    return head.eval(), float((loss / weight).detach())


@pytest.mark.parametrize("case", CASES)
def test_it_learns_by_heart_and_drafts_by_itself(case):
    kind, steps, objective, updates, rate, least = CASES[case]
    verifier = verifier_of(kind)
    data = texts(verifier)
    head, loss = learn(kind, verifier, data, steps, objective, updates, rate)
    counts = Counts()
    for prompt, text in data:
        drafter = drafter_for(head, FixedTree.chain(DEPTH), GREEDY)
        decoded = speculative_decode(verifier, drafter, prompt, max_new_tokens=LENGTH, sampling=GREEDY)
        assert decoded.tokens == text[:LENGTH]
        for call in decoded.rounds:
            counts.add(call)
    print(f"\n{case}: loss {loss:.4f}, n-alpha {counts.alpha_by_depth}, tau {counts.tau:.3f}")
    assert loss < 0.1
    for depth, bound in enumerate(least):
        assert counts.tested_by_depth[depth] >= 10 and counts.alpha_by_depth[depth] >= bound, (depth, counts)
