"""Tiny random Llama models with a character tokenizer, for tests that need a real model folder."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

EOS = "<eos>"
SPECIAL = [EOS, "<pad>", "<unk>"]
CHARACTERS = [*string.printable[:95], "\n"]
HEAD_SIZE = 32  # the smallest that vLLM's CPU attention takes


def make_tokenizer(vocab: int = 128, *, eos: bool = True) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; ids 0, 1, 2 are EOS, padding and unknown.

    Filler tokens make the size exactly ``vocab``, so that every id that a random model samples decodes.
    """
    words = SPECIAL + CHARACTERS
    words += [f"<extra_{i}>" for i in range(vocab - len(words))]
    assert len(words) == vocab, f"vocab={vocab} is below the {len(words)} tokens needed"
    ids = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS if eos else None,
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def make_random_model(
    folder: Path,
    *,
    tied: bool,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    vocab: int = 128,
    dtype: torch.dtype = torch.float32,
    context: int = 256,
    eos: bool = True,
    spread: float = 1.0,
) -> Path:
    """Write a Hugging Face folder with random weights and return it; the same arguments, the same weights.

    ``tied`` shares the embedding with the output layer; ``hidden`` is a multiple of 32.
    The weights are large enough that the distributions are far from uniform; ``spread`` times as large.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        initializer_range=spread * (0.1 if tied else 0.15),
        bos_token_id=None,
        eos_token_id=0 if eos else None,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).to(dtype=dtype).save_pretrained(folder)
    make_tokenizer(vocab, eos=eos).save_pretrained(folder)
    return folder


FAMILIES: dict[str, dict[str, object]] = {
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {
        **{"num_key_value_heads": 1, "head_dim": HEAD_SIZE},
        "rope_parameters": {  # stretched positions, which engine and learner compute each in their own way
            **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0},
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3_moe": {
        **{"num_key_value_heads": 1, "head_dim": HEAD_SIZE, "norm_topk_prob": True},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    },
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt2": {
        "n_positions": 256,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
"""Models unlike Llama, by their type, with what else their config says."""


def make_family_model(
    folder: Path, kind: str, *, seed: int = 0, vocab: int = 130, **settings: object
) -> Path:
    """As make_random_model, of another family; the vocabulary is not a multiple of what engines pad it to.

    settings: what its config says besides that of FAMILIES.
    """
    torch.manual_seed(seed)
    size = {} if kind == "gpt2" else {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    wide = {} if kind == "gpt2" else {"intermediate_size": 128, "max_position_embeddings": 256}
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    config = AutoConfig.for_model(
        kind,
        vocab_size=vocab,
        initializer_range=0.15,
        **size | wide | ends | FAMILIES.get(kind, {}) | settings,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    make_tokenizer(vocab).save_pretrained(folder)
    return folder
