"""The config.json of the models that shipped configs name, and a cache of the hub that holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _llama(hidden: int, layers: int, heads: int, groups: int, inner: int, words: int, **more: Any) -> dict:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": inner,
        "vocab_size": words,
        "dtype": "bfloat16",
        **more,
    }


def _pythia(hidden: int, layers: int, heads: int, words: int) -> dict:
    return {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": words,
    }


_GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
_LLAMA_1B = _llama(2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True)
_ROBERTA = {
    "model_type": "roberta",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
}

KNOWN: dict[str, dict[str, Any]] = {
    ".cache/tiny-model-seed0": _llama(96, 2, 3, 3, 192, 349, dtype="float32"),
    "realtreetune/rho-1b-sft-GSM8K": _llama(2048, 22, 32, 4, 5632, 32000),
    "Qwen/Qwen2.5-7B": _llama(3584, 28, 28, 4, 18944, 152064, model_type="qwen2"),
    "Qwen/Qwen2.5-1.5B-Instruct": _llama(
        1536, 28, 12, 2, 8960, 151936, model_type="qwen2", tie_word_embeddings=True
    ),
    "meta-llama/Llama-3.2-1B": _LLAMA_1B,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA_1B,
    "meta-llama/Llama-Guard-3-8B": _llama(4096, 32, 32, 8, 14336, 128256),
    "openai-community/gpt2": _GPT2,
    "vicgalle/gpt2-alpaca": _GPT2,
    "facebook/roberta-hate-speech-dynabench-r4-target": _ROBERTA,
    "sentence-transformers/all-MiniLM-L6-v2": {
        **_ROBERTA,
        **{"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
        **{"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2},
    },
    "mnoukhov/pythia410m-sft-tldr": _pythia(1024, 24, 16, 50304),
    "mnoukhov/pythia1b-sft-tldr": _pythia(2048, 16, 8, 50304),
    "mnoukhov/pythia2.8b-sft-tldr": _pythia(2560, 32, 32, 50304),
    "mnoukhov/pythia410m-rm-tldr6.9b": _pythia(1024, 24, 16, 50304),
    "mnoukhov/pythia1b-rm-tldr6.9b": _pythia(2048, 16, 8, 50304),
    "mnoukhov/pythia2.8b-rm-tldr6.9b": _pythia(2560, 32, 32, 50304),
    "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr": _pythia(4096, 32, 32, 50432),
}
"""By name; float32 if the type of the weights in their files is not known."""


def cache_shapes(folder: Path) -> dict[str, str]:
    """Write them into a cache in ``folder``, the tiny model beside it; the variables that name the cache."""
    for name, fields in KNOWN.items():
        place = folder / name
        if not name.startswith("."):
            model = folder / "hub" / f"models--{name.replace('/', '--')}"
            place = model / "snapshots/abc"
            (model / "refs").mkdir(parents=True)
            (model / "refs/main").write_text("abc")
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(fields))
    return {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
