"""A HeadModule with a tiny verifier and a handful of documents, ready for train.fit."""

from __future__ import annotations

import multiprocessing
import os
import socket
from contextlib import contextmanager

import torch

from conf.schema import OptimConf, TrainerConf
from data.batches import OnlineStates, PackedLoader
from data.documents import Document
from models import heads
from models.objectives import Objective
from models.vocab import DraftVocab
from train.module import HeadModule, StepSettings
from train.schedule import Limits

CPU = TrainerConf(accelerator="cpu", devices=1, precision="32-true")


def documents(count=7):
    """Prompts of 4 tokens and answers of 5 to 12."""
    numbers = torch.Generator().manual_seed(1)
    lengths = [9 + index % 8 for index in range(count)]
    ids = [torch.randint(3, 300, (length,), generator=numbers).tolist() for length in lengths]
    return [Document(str(i), row, [(4, len(row))]) for i, row in enumerate(ids)]


def make(
    verifier, steps=None, seconds=None, accumulate=1, name="adamw", tokens=32, rank=0, world=1, log_every=2, count=7,
    kind="eagle3", objective=None, source=None, **settings,
):  # fmt: skip
    """objective: its settings beside steps=3; settings: StepSettings' others; source: of states, in place of the
    verifier's own."""
    torch.manual_seed(5)
    objective = Objective(**({"steps": 3} | (objective or {})))
    vocab = DraftVocab(torch.arange(0, 300, 3), 300) if kind != "eagle1" else DraftVocab.identity(300)
    switches = {"medusa": {"heads": objective.steps}, "eagle3": {"survival": objective.survival_weight > 0}}
    layers = () if kind == "independent" else verifier.aux_layers
    config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, layers, len(vocab), **switches.get(kind, {}))
    head = heads.build(config, verifier, vocab)
    loader = PackedLoader(source or OnlineStates(verifier, documents(count)), tokens, seed=3, rank=rank, world=world)
    ends = Limits(steps, seconds)
    return HeadModule(
        head, verifier, loader, StepSettings(OptimConf(name=name), ends, objective, accumulate, log_every, **settings)
    )


def parameters(module):
    return {name: p.detach().clone() for name, p in module.head.named_parameters()}


@contextmanager
def two_ranks(work, *arguments):
    """work(rank, *arguments) in two gloo ranks, as torchrun would start them; at the end of the block both are through.

    The processes, to send signals to.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=_rank, args=(work, rank, port, arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    yield ranks
    for process in ranks:
        process.join(timeout=120)
        assert process.exitcode == 0


def _rank(work, rank, port, arguments):
    local = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in local.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test")
    work(rank, *arguments)
