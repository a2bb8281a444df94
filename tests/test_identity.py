"""Greedy text is the verifier's own: every drafter, shape and batch, in several families. Sampled text has no company.

Drafts are accepted often enough to matter: beside untrained heads, the verifier's own noisy copy drafts.
"""

import pytest
import torch

from eval.measure import TIE
from eval.prompts import load_prompts
from eval.speculative.copying import Lookahead, NoDraft, PromptLookup
from eval.speculative.drafter import Features, pad
from eval.speculative.loop import decode_batch, plain_decode, speculative_decode, top_two_gap
from eval.speculative.processors import Sampling
from eval.speculative.scorers import EagleScorer, ModelScorer, TreeDrafter, drafter_for
from eval.speculative.shapes import FixedTree, GrowingShape
from models import heads
from models.draft_model import DraftModel
from models.loading import load_model
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import tiny_model, tiny_tokenizer, tiny_verifier

GREEDY = Sampling()
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "mixtral")
PROMPTS = [[1, 40, 41, 42, 43, 50, 60, 40, 41], [1, 7, 8, 9], [1, 40, 41, 40, 41, 40]]
SHAPES = {
    "chain": FixedTree.chain(4),
    "chain that stops early": FixedTree.chain(4, min_confidence=0.02),
    "[2,2,2]": FixedTree.of([2, 2, 2]),
    "paths": FixedTree.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
    "EAGLE-2": GrowingShape(4, 3, 12),
    "EAGLE-2, likely paths": GrowingShape(4, 3, 12, min_confidence=0.004),
}
WITHOUT = {"none": NoDraft, "prompt lookup": lambda: PromptLookup(4), "Lookahead": Lookahead}


def dtype_of(family):
    """float64, but for experts, whose grouped products have no such kernel."""
    return torch.float32 if family == "mixtral" else torch.float64


@pytest.fixture(scope="module")
def verifiers():
    made = {}

    def get(family, kind=None):
        if (family, kind) not in made:
            layers = None if kind is None else heads.captured_layers(kind, None)
            made[family, kind] = tiny_verifier(family, dtype=dtype_of(family), aux_layers=layers)
        return made[family, kind]

    return get


@pytest.fixture(scope="module")
def plain(verifiers):
    """Greedy texts of PROMPTS by the verifier alone."""
    made = {}

    def get(family):
        if family not in made:
            options = {"max_new_tokens": 24, "sampling": GREEDY}
            made[family] = [plain_decode(verifiers(family), ids, **options).tokens for ids in PROMPTS]
        return made[family]

    return get


def noisy_copy(family, verifier, noise=0.03):
    """A drafter model whose argmax is often the verifier's."""
    model = tiny_model(family, dtype=dtype_of(family))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += noise * p.std() * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return ModelScorer(DraftModel(Verifier(model, tiny_tokenizer(), "noisy", []), verifier), "cpu")


def head_of(kind, verifier):
    vocab = DraftVocab.identity(512) if kind == "eagle1" else DraftVocab(torch.arange(0, 512, 2), 512)
    config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, verifier.aux_layers, len(vocab))
    torch.manual_seed(0)
    head = heads.build(config, verifier, vocab).double().eval()
    with torch.no_grad():
        for p in head.parameters():
            p += 0.1 * torch.randn_like(p)
    return head


def check(verifier, drafter, plain):
    """One by one and as a batch: the verifier's texts, by the same rounds. Returns the number of accepted drafts."""
    options = {"max_new_tokens": 24, "sampling": GREEDY}
    alone = [speculative_decode(verifier, drafter, ids, **options) for ids in PROMPTS]
    together = decode_batch(verifier, drafter, PROMPTS, **options)
    assert [text.tokens for text in alone] == plain == [text.tokens for text in together]
    for one, other in zip(alone, together, strict=True):
        assert [r.drafted for r in one.rounds] == [r.drafted for r in other.rounds]
        assert [r.emitted for r in one.rounds] == [r.emitted for r in other.rounds]
    return sum(r.accepted for text in alone for r in text.rounds)


CASES = [(family, name) for family in FAMILIES for name in ("chain", "[2,2,2]", "EAGLE-2")]
CASES += [("llama", name) for name in SHAPES if ("llama", name) not in CASES]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_draft_that_is_often_right(family, name, verifiers, plain):
    verifier = verifiers(family)
    accepted = check(verifier, TreeDrafter(noisy_copy(family, verifier), SHAPES[name], GREEDY), plain(family))
    assert accepted > 12


@pytest.mark.parametrize("kind", heads.KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_heads(kind, name, verifiers, plain):
    verifier = verifiers("llama", kind)
    check(verifier, drafter_for(head_of(kind, verifier), SHAPES[name], GREEDY), plain("llama"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", WITHOUT)
def test_drafters_without_a_model(family, name, verifiers, plain):
    accepted = check(verifiers(family), WITHOUT[name](), plain(family))
    assert (accepted > 0) == (name != "none") or family != "llama"


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_sampled_text_does_not_depend_on_its_company(name, points, verifiers):
    verifier, sampling = verifiers("llama"), Sampling(0.3, top_p=0.95)
    drafter = TreeDrafter(noisy_copy("llama", verifier), SHAPES[name], sampling, points)
    options = {"max_new_tokens": 12, "sampling": sampling}
    together = decode_batch(verifier, drafter, PROMPTS, seed=3, **options)
    for i, ids in enumerate(PROMPTS):
        alone = speculative_decode(verifier, drafter, ids, seed=3 + i, **options)
        assert alone.tokens == together[i].tokens
    assert sum(r.accepted for text in together for r in text.rounds) > 3


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "independent"])
@torch.no_grad()
def test_a_grown_node_scores_as_a_chain_of_its_path_would(kind, verifiers):
    """Two sequences, two levels of several nodes and then one: every node against its path alone."""
    verifier = verifiers("llama", kind)
    head, prompts, pending = head_of(kind, verifier), PROMPTS[:2], [77, 78]
    tokens = torch.randint(3, 512, (2, 6), generator=torch.Generator().manual_seed(1))
    parents = [-1, -1, 0, 1, 0, 3]
    levels = [slice(0, 2), slice(2, 5), slice(5, 6)]
    scorer = scorer_after(kind, head, verifier, prompts, pending)
    scored = [scorer.root()[:, None]]
    for level in levels:
        above = torch.tensor([parents[level]]).expand(2, -1)
        scored.append(scorer.grow(tokens[:, level], above))
    scored_BGR = torch.cat(scored, 1)
    for b in range(2):
        for node in range(6):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            alone = scorer_after(kind, head, verifier, prompts[b : b + 1], pending[b : b + 1])
            torch.testing.assert_close(alone.root(), scored_BGR[b : b + 1, 0])
            for depth, n in enumerate(path):
                last = alone.grow(tokens[b : b + 1, n : n + 1], torch.tensor([[depth - 1]]))
            torch.testing.assert_close(last[:, 0], scored_BGR[b : b + 1, node + 1])


def scorer_after(kind, head, verifier, prompts, pending):
    """A scorer that was told of these prompts, and then of two accepted tokens."""
    scorer = ModelScorer(head, "cpu") if kind == "independent" else EagleScorer(head)
    cache, counts = verifier.new_cache(len(prompts), 64), [len(ids) for ids in prompts]
    out = verifier.decode(cache, pad(prompts, "cpu"), count_B=counts, logits="none")
    scorer.start(prompts, pending, Features(out.aux_BTAD, out.last_BTD), 64)
    scorer.root()
    scorer.grow(torch.full((len(prompts), 3), 9), torch.full((len(prompts), 3), -1))  # drafts, thrown away
    more = torch.tensor([[token, 11] for token in pending])
    out = verifier.decode(cache, more, logits="none")
    scorer.accepted([[11, 12]] * len(prompts), Features(out.aux_BTAD, out.last_BTD))
    return scorer


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_by_every_drafter(dtype, capsys):
    """Real weights: a difference is allowed at a numerical tie alone, and shown; bfloat16 shows its match rate."""
    verifier = Verifier.load("smollm2", dtype=dtype, device="cpu")
    prompts, tokens = (8, 64) if dtype == "float32" else (2, 12)
    ids = [list(prompt.input_ids) for prompt in load_prompts(verifier, "eyrie", prompts)]
    options = {"max_new_tokens": tokens, "sampling": GREEDY}
    plain = [plain_decode(verifier, one, **options).tokens for one in ids]
    copies = {name: TreeDrafter(first_layers(verifier, 12, dtype), shape, GREEDY) for name, shape in SHAPES.items()}
    for name, drafter in (copies | {name: make() for name, make in WITHOUT.items()}).items():
        texts = [text.tokens for text in decode_batch(verifier, drafter, ids, **options)]
        same = sum(text == own for text, own in zip(texts, plain, strict=True))
        with capsys.disabled():
            print(f"\n{dtype}, batch of {len(ids)}, {name}: {same} of {len(ids)} texts equal", end="")
        for i, (text, own) in enumerate(zip(texts, plain, strict=True)):
            if text != own and dtype == "float32":
                at = next(t for t, (a, b) in enumerate(zip(text, own, strict=False)) if a != b)
                gap = top_two_gap(verifier, ids[i] + own[:at])
                with capsys.disabled():
                    print(f"; text {i} parts at {at}, where the two best logits are {gap:.1e} apart", end="")
                assert gap < TIE


def first_layers(verifier, layers, dtype):
    """SmolLM2's own first layers as a draft: often right, often wrong."""
    model = load_model("smollm2", dtype=dtype, device="cpu").model
    del model.model.layers[layers:]
    model.config.num_hidden_layers = layers
    return ModelScorer(DraftModel(Verifier(model, verifier.tokenizer, "first layers", []), verifier), "cpu")
