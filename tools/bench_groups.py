"""Measures what a group saves whose completions share a row with their prompt: one forward and backward pass.

    python tools/bench_groups.py [--width 512] [--layers 4] [--rounds 5] [--json]

Groups shaped like the paper's, of random tokens, completions of uneven lengths (gamma, shape 4), by a random
Llama on the GPU where there is one: every completion in a row of its own behind its prompt, padded to the
longest, against as many to a row as pays. Both in turn, medians; values are compared, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tba_hpc.learner.hf_model import PolicyLogprobs

VOCABULARY = 1000
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Shape:
    """Tokens of the prompt, mean tokens of a completion, completions of the group."""

    prompt: int
    completion: int
    group_size: int


SHAPES = {
    "quickstart": Shape(27, 20, 16),
    "GSM8K": Shape(100, 120, 20),
    "TL;DR": Shape(400, 45, 20),
    "MATH": Shape(150, 500, 16),
}


def main() -> None:
    """Print a line per shape."""
    options = _options()
    logprobs = PolicyLogprobs(_model(options), chunk_tokens=4096).train()
    figures = {name: _measure(logprobs, shape, options.rounds) for name, shape in SHAPES.items()}
    if options.json:
        print(json.dumps(figures))
        return
    print(f"{DEVICE.type}, {torch.get_num_threads()} threads, width {options.width}, {options.layers} layers")
    for name, found in figures.items():
        print(f"{name:>12}  " + "  ".join(f"{key} {value:.3g}" for key, value in found.items()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def _model(options: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
    )
    with DEVICE:
        model = LlamaForCausalLM(config)
    return model.bfloat16() if DEVICE.type == "cuda" else model


def _measure(logprobs: PolicyLogprobs, shape: Shape, rounds: int) -> dict[str, float]:
    """Median seconds of either way, their ratio, and the largest difference of a log-probability."""
    batch = _group(shape)
    seconds: dict[int, list[float]] = {1: [], shape.group_size: []}
    values = {}
    for _ in range(rounds + 1):
        for group_size, times in seconds.items():
            started = time.perf_counter()
            values[group_size] = logprobs(*batch, group_size)
            values[group_size].sum().backward()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    alone, together = (statistics.median(times[1:]) for times in seconds.values())  # the first warms up
    difference = (values[1] - values[shape.group_size]).abs().max().item()
    return {"alone_s": alone, "together_s": together, "ratio": together / alone, "difference": difference}


def _group(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    uneven = torch.distributions.Gamma(4.0, 4.0).sample((shape.group_size,))
    length_N = shape.prompt + (uneven * shape.completion).long().clamp(min=1)
    tokens_NL = torch.randint(VOCABULARY, (shape.group_size, int(length_N.max())))
    tokens_NL[:, : shape.prompt] = tokens_NL[0, : shape.prompt]
    prompt_length_N = torch.full_like(length_N, shape.prompt)
    return tokens_NL.to(DEVICE), prompt_length_N.to(DEVICE), length_N.to(DEVICE)


if __name__ == "__main__":
    main()
