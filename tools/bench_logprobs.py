"""Measures chunked log-probabilities against the plain log-softmax of all logits: time and peak memory.

    python tools/bench_logprobs.py [--tokens 4096] [--vocabulary 65536] [--hidden 256] [--chunk 256] [--json]

Forward and backward of a one-layer model, so that the output layer is nearly all there is. Each variant
runs in a process of its own, on the GPU where there is one; memory is what it adds to the loaded model.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tba_hpc.learner.hf_model import PolicyLogprobs

SEQUENCES = 8
PROMPT = 1  # tokens: as good as everything is completion
REPEATS = 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    """Run both variants and print their figures and ratios."""
    options = _options()
    if options.variant:
        print(json.dumps(_measure(options)))
        return
    plain, chunked = _in_a_process("plain"), _in_a_process("chunked")
    figures = {
        "device": DEVICE.type,
        "tokens": options.tokens,
        "vocabulary": options.vocabulary,
        "plain_seconds": plain["seconds"],
        "chunked_seconds": chunked["seconds"],
        "time_ratio": chunked["seconds"] / plain["seconds"],
        "plain_bytes": plain["bytes"],
        "chunked_bytes": chunked["bytes"],
        "memory_ratio": chunked["bytes"] / plain["bytes"],
        "value_difference": abs(chunked["sum"] - plain["sum"]) / abs(plain["sum"]),
    }
    print(json.dumps(figures) if options.json else _table(figures))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="completion tokens of the batch")
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=256, help="tokens whose logits are held at once")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--variant", choices=["plain", "chunked"], help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_a_process(variant: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _measure(options: argparse.Namespace) -> dict[str, float]:
    """Best time of a forward and backward pass (s), memory it adds (bytes), sum of the log-probabilities."""
    torch.manual_seed(0)
    model = _model(options)
    length = options.tokens // SEQUENCES + PROMPT
    tokens_NL = torch.randint(options.vocabulary, (SEQUENCES, length), device=DEVICE)
    logprobs = _plain(model) if options.variant == "plain" else _chunked(model, options.chunk)
    logprobs(tokens_NL[:, : PROMPT + 2]).sum().backward()  # gradients and kernels are there before we count
    before, times = _memory(peak=False), []
    for _ in range(REPEATS):
        started = time.perf_counter()
        total = logprobs(tokens_NL).sum()
        total.backward()
        value = total.item()
        times.append(time.perf_counter() - started)
    return {"seconds": min(times), "bytes": _memory(peak=True) - before, "sum": value}


def _model(options: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden,
        num_hidden_layers=1,
        num_attention_heads=options.hidden // 64,
        tie_word_embeddings=False,
    )
    with DEVICE:
        return LlamaForCausalLM(config)


def _plain(model: LlamaForCausalLM) -> Callable[[torch.Tensor], torch.Tensor]:
    def logprobs(tokens_NL: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=tokens_NL, use_cache=False).logits[:, PROMPT - 1 : -1]
        return logits.float().log_softmax(-1).gather(2, tokens_NL[:, PROMPT:, None])

    return logprobs


def _chunked(model: LlamaForCausalLM, chunk_tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
    policy = PolicyLogprobs(model, chunk_tokens=chunk_tokens)

    def logprobs(tokens_NL: torch.Tensor) -> torch.Tensor:
        count, length = tokens_NL.shape
        prompt_length_N = torch.full((count,), PROMPT, device=DEVICE)
        result: torch.Tensor = policy(tokens_NL, prompt_length_N, torch.full((count,), length, device=DEVICE))
        return result

    return logprobs


def _memory(*, peak: bool) -> int:
    """Bytes held now, or at most so far."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    if peak:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return int(psutil.Process().memory_info().rss)


def _table(figures: dict[str, float | str]) -> str:
    rows = [f"{name:>18}  {value:.4g}" for name, value in figures.items() if not isinstance(value, str)]
    return "\n".join([f"{'device':>18}  {figures['device']}", *rows])


if __name__ == "__main__":
    main()
