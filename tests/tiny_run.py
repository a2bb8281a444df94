"""A run folder with an untrained head for a tiny verifier, and two prompts."""

from pathlib import Path

import torch

from models.export.native import StoredHead, save_head
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import tiny_model, tiny_tokenizer


def save_verifier(folder: Path, seed: int = 0) -> Path:
    tiny_model(layers=7, hidden=32, seed=seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_run(folder: Path) -> Path:
    """folder/verifier, folder/head (EAGLE-3, 64 draft tokens) and folder/prompts.jsonl."""
    verifier = Verifier.load(str(save_verifier(folder / "verifier")), dtype="float32", device="cpu")
    torch.manual_seed(0)
    vocab = DraftVocab(torch.arange(64), verifier.vocab_size)
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, len(vocab))
    save_head(folder / "head", StoredHead.of(Eagle3Head(config, verifier.embedding_VD, vocab), verifier))
    (folder / "prompts.jsonl").write_text('{"turns": ["What is the capital?"]}\n{"prompt": "Add two numbers."}\n')
    return folder
