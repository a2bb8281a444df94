"""Tiny random verifiers and a tokenizer built in code, for every test: nothing is downloaded.

verifier = tiny_verifier("llama", layers=8, hidden=64, vocab=512, seed=0)
"""

import json
from functools import lru_cache

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from models.verifier import Verifier

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "mixtral")
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "system user assistant Be brief. The quick brown fox jumps over the lazy dog.",
    "What is the capital of France? The capital of France is Paris.",
    "Write a function that adds two numbers. def add(a, b): return a + b",
    "How many apples are there? There are three apples, and then there were two.",
)
SLIDING = {"mistral": 8, "gemma2": 8}


@lru_cache
def _trained(vocab: int, special: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(
    vocab: int = 512,
    template: str | None = CHATML,
    special: tuple[str, ...] = SPECIAL,
    bos: str | None = "<|im_start|>",
    eos: str = "<|im_end|>",
) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most `vocab` ids with a ChatML template.

    special: tokens with the ids from 0 up; the first one pads.
    """
    assert vocab >= 256 + len(special), "the byte alphabet and the special tokens need their ids"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(vocab, tuple(special))),
        eos_token=eos,
        pad_token=special[0],
        **({"bos_token": bos} if bos else {}),
    )
    tokenizer.chat_template = template
    return tokenizer


@lru_cache
def _pieces() -> tuple[tuple[str, float], ...]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, "INST [INST] [/INST]"], trainer)
    return tuple(
        (piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"] if piece != "<unk>"
    )


def tiny_pieces(template: str, special: tuple[str, ...], prepend: str) -> PreTrainedTokenizerFast:
    """Unigram over pieces with "▁" for spaces, and bytes for what no piece has.

    prepend: "always", a space goes before every stretch of text; "first", before a text that begins with none.
    special: unknown, beginning and end first.
    """
    space = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    pieces = [*((token, 0.0) for token in special), *((f"<0x{byte:02X}>", -20.0) for byte in range(256)), *_pieces()]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    unknown, bos, eos = special[:3]
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, bos_token=bos, eos_token=eos)
    found.chat_template = template
    return found


def tiny_model(family="llama", layers=8, hidden=64, vocab=512, seed=0, dtype=torch.float32, **config):
    """A random transformers model of one of FAMILIES (or another model type), 4 heads and 2 key/value heads.

    Weights are drawn larger than usual, so that attention is far from uniform and a wrong mask shows.
    """
    values = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    if family in SLIDING:
        values["sliding_window"] = SLIDING[family]
    if family == "gemma2":
        values |= {"query_pre_attn_scalar": hidden // 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    if family == "mixtral":
        values |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if family == "phi3":
        values |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(values | config)), dtype=dtype)
    return model.eval()


def tiny_verifier(
    family="llama", layers=8, hidden=64, vocab=512, seed=0, dtype=torch.float32, aux_layers=None, **config
) -> Verifier:
    """A Verifier over `tiny_model`; below 259 ids it has no tokenizer (toys for statistics)."""
    model = tiny_model(family, layers, hidden, vocab, seed, dtype, **config)
    tokenizer = tiny_tokenizer(vocab) if vocab >= 259 else None
    return Verifier(model, tokenizer, f"tiny-{family}", aux_layers)
