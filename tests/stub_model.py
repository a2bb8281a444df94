"""A verifier and a draft of four tokens whose laws are tables, so that the law of every text is known exactly."""

from types import SimpleNamespace

import torch

from eval.speculative.drafter import Draft
from eval.speculative.scorers import TreeDrafter

V, FIRST, LENGTH = 4, 0, 3


class StubCache:
    """Ids of each sequence; `lengths` after every rollback."""

    def __init__(self, batch):
        self.ids, self.base, self.lengths = [[] for _ in range(batch)], [0] * batch, []

    @property
    def length_B(self):
        return [len(ids) for ids in self.ids]

    def accept_paths(self, nodes_B):
        self.ids = [
            ids[:base] + [ids[base + n] for n in nodes]
            for ids, base, nodes in zip(self.ids, self.base, nodes_B, strict=True)
        ]
        self.lengths.append(self.length_B)

    def keep_rows(self, rows):
        self.ids = [self.ids[row] for row in rows]


class StubVerifier:
    """Its law depends on the last two tokens; after the one-token prompt [FIRST] it always says FIRST."""

    device, eos_ids = torch.device("cpu"), ()

    def __init__(self, seed=0):
        self.table_VVV = 1.5 * torch.randn(V, V, V, generator=torch.Generator().manual_seed(seed))
        self.caches = []

    def new_cache(self, batch, capacity):
        self.caches.append(StubCache(batch))
        return self.caches[-1]

    def decode(self, cache, tokens_BT, *, count_B=None, tree=None, logits="all", capture=True):
        B, T = tokens_BT.shape
        cache.base = cache.length_B
        before_B = torch.tensor([ids[-1] if ids else -1 for ids in cache.ids])
        if tree is None:
            previous_BT = torch.cat([before_B[:, None], tokens_BT[:, :-1]], 1)
        else:
            rows = tree.rows(B, self.device)
            parent_BTT = rows.seen_BTN & (rows.depth_BN[:, None] == rows.depth_BN[..., None] - 1)
            of_tree_BT = tokens_BT.gather(1, parent_BTT.long().argmax(2))
            previous_BT = torch.where(parent_BTT.any(2), of_tree_BT, before_B[:, None])
        logits_BTV = self.table_VVV[previous_BT.clamp_min(0), tokens_BT]
        only_first = torch.full((V,), -1e9).index_fill(0, torch.tensor(FIRST), 0.0)
        logits_BTV = torch.where((previous_BT < 0)[..., None], only_first, logits_BTV)
        for ids, new in zip(cache.ids, tokens_BT.tolist(), strict=True):
            ids += new
        nothing = torch.zeros(B, T, 1, 1)
        return SimpleNamespace(
            logits=logits_BTV[:, -1] if logits == "last" else logits_BTV, aux_BTAD=nothing, last_BTD=nothing[..., 0]
        )


class StubScorer:
    """A draft whose law depends on the last two tokens of the path; a pruned vocabulary with `ids_R`."""

    def __init__(self, ids_R=None, seed=1):
        self.name = "stub"
        self.ids_R = torch.arange(V) if ids_R is None else ids_R
        generator = torch.Generator().manual_seed(seed)
        self.table_VVR = 1.5 * torch.randn(V, V, len(self.ids_R), generator=generator)

    def start(self, prompts, pending, features, capacity):
        self.last_B2 = torch.tensor([[ids[-1], token] for ids, token in zip(prompts, pending, strict=True)])

    def accepted(self, tokens, features):
        assert len(features.aux_BTAD) == len(tokens)
        rows = zip(self.last_B2.tolist(), tokens, strict=True)
        self.last_B2 = torch.tensor([[*before, *new][-2:] for before, new in rows])

    def keep_rows(self, rows):
        self.last_B2 = self.last_B2[list(rows)]

    def root(self):
        self.tokens_BG = self.last_B2[:, 1:]
        return self.table_VVR[self.last_B2[:, 0], self.last_B2[:, 1]]

    def grow(self, tokens_BK, parents_BK):
        before_BK = self.tokens_BG.gather(1, parents_BK + 1)
        self.tokens_BG = torch.cat([self.tokens_BG, tokens_BK], 1)
        return self.table_VVR[before_BK, tokens_BK]


def stub_drafter(shape, sampling, points=False, ids_R=None, seed=1):
    return TreeDrafter(StubScorer(ids_R, seed), shape, sampling, points)


class Oracle:
    """Drafts a chain of what the verifier will say, apart from every `wrong`-th token of the text. For one sequence."""

    name, ids_R = "oracle", None

    def __init__(self, text, depth, wrong=None):
        self.text, self.wrong = text, wrong
        self.nodes = self.depth = depth

    def start(self, prompts, pending, features, capacity):
        self.at = 1

    def accepted(self, tokens, features, logits_BMV):
        self.at += len(tokens[0])

    def keep_rows(self, rows):
        pass

    def draft(self, uniform_BN):
        known = self.text[self.at : self.at + self.depth]
        known += [3] * (self.depth - len(known))
        wrong = [self.wrong and (self.at + i) % self.wrong == 0 for i in range(self.depth)]
        tokens = [token ^ 1 if bad else token for token, bad in zip(known, wrong, strict=True)]
        return Draft(torch.tensor([tokens]), torch.arange(-1, self.depth - 1)[None])
