"""Searcher throughput against bare vLLM: same engine, same prompts, one process, segments alternating.

    python tools/bench_searcher.py [--model FOLDER] [--rounds 7] [--json]

Arms: ``bare`` hands all prompts to ``LLM.generate`` at once; ``generator`` refills our generator as groups
end; ``searcher`` also scores every group and computes its reference log-probabilities in a second thread.
An arm's figure is the median over rounds of its tokens per second divided by bare's of the same round.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tba_hpc.backends.hf_model import load_policy, load_tokenizer
from tba_hpc.backends.hf_reference import HfReference
from tba_hpc.backends.vllm_generator import VllmGenerator, sampling_params
from tba_hpc.config import GeneratorSection, ModelSection
from tba_hpc.types import Group, Prompt, Request, Sampling

Arm = Callable[[list[Request]], int]
"""Generates all requests and returns how many tokens were sampled."""

VOCABULARY = 161


def main() -> None:
    """Measure and print."""
    options = _options()
    with tempfile.TemporaryDirectory() as scratch:
        path = options.model or str(_make_model(Path(scratch)))
        generator = _generator(path, options)
        reference = HfReference(load_policy(path, "float32"), chunk_tokens=1024)
        sequences = options.prompts_in_flight * options.completions
        arms: dict[str, Arm] = {
            "bare": lambda requests: bare(generator, requests),
            "generator": lambda requests: refill(generator, requests, sequences),
            "searcher": lambda requests: searcher(generator, reference, requests, sequences),
        }
        requests = _requests(options, load_tokenizer(path).vocab_size)
        rates = measure(arms, requests, options.rounds)
        generator.close()
    _print(summarize(rates), as_json=options.json)


def _generator(path: str, options: argparse.Namespace) -> VllmGenerator:
    model = ModelSection(path=path, dtype="float32", context_length=50 + options.max_tokens)
    section = GeneratorSection(
        completions_per_prompt=options.completions,
        prompts_in_flight=options.prompts_in_flight,
        max_tokens=options.max_tokens,
        kv_cache_mb=256,
    )
    return VllmGenerator(model, section, seed=0)


def bare(generator: VllmGenerator, requests: list[Request]) -> int:
    """vLLM's own offline loop, with everything it could wish for: all prompts at once."""
    prompts = [request.prompt.tokens.tolist() for request in requests]
    params = [sampling_params(request.sampling, request.n) for request in requests]
    outputs = generator.llm.generate(prompts, params, use_tqdm=False)
    return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)


def refill(
    generator: VllmGenerator,
    requests: list[Request],
    sequences: int,
    deliver: Callable[[Group], object] = lambda group: None,
) -> int:
    """The searcher's way: at least ``sequences`` in flight while prompts last, new ones as groups end."""
    waiting, in_flight, tokens = iter(requests), 0, 0
    while True:
        while in_flight < sequences and (request := next(waiting, None)):
            generator.submit(request)
            in_flight += request.n
        if not in_flight:
            return tokens
        for group in generator.step():
            in_flight -= group.request.n
            tokens += sum(len(completion.tokens) for completion in group.completions)
            deliver(group)


def searcher(
    generator: VllmGenerator, reference: HfReference, requests: list[Request], sequences: int
) -> int:
    """As ``refill``, with rewards and reference log-probabilities of every group in a second thread."""
    with ThreadPoolExecutor(max_workers=1) as scorer:
        scored: list[Future[float]] = []
        tokens = refill(
            generator,
            requests,
            sequences,
            lambda group: scored.append(scorer.submit(_score, reference, group)),
        )
        assert all(np.isfinite(future.result()) for future in scored)
    return tokens


def _score(reference: HfReference, group: Group) -> float:
    """Stands for the task: a rule over the tokens of each completion, and the reference."""
    rewards = [float(tokens.tokens[-1] == 0) for tokens in group.completions]
    return sum(rewards) + float(sum(row.sum() for row in reference.logprobs(group)))


def measure(arms: dict[str, Arm], requests: list[Request], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of every arm in every round; within a round the arms follow each other."""
    for arm in arms.values():
        arm(requests[: len(requests) // 4])
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            gc.collect()
            start = time.perf_counter()
            tokens = arm(requests)
            rates[name].append(tokens / (time.perf_counter() - start))
    return rates


def summarize(rates: dict[str, list[float]]) -> list[dict[str, float | str]]:
    """Per arm: median tokens per second, and median, least and greatest ratio to bare's of the same round."""
    rows: list[dict[str, float | str]] = []
    for name, values in rates.items():
        ratios = [rate / base for rate, base in zip(values, rates["bare"], strict=True)]
        rows.append(
            {
                "arm": name,
                "tokens_per_second": statistics.median(values),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
        )
    return rows


def _print(rows: list[dict[str, float | str]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("arm", "tokens/s", "÷ bare (median)", "min", "max")
    for row in rows:
        name, rate, *ratios = row.values()
        table.add_row(str(name), f"{rate:,.0f}", *(f"{ratio:.3f}" for ratio in ratios))
    Console().print(table)


def _requests(options: argparse.Namespace, vocabulary: int) -> list[Request]:
    """Random prompts of 30 to 50 tokens, as many as the quickstart's problems have."""
    rng = np.random.default_rng(0)
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=options.max_tokens)
    prompts = [rng.integers(3, vocabulary, rng.integers(30, 51), np.int32) for _ in range(options.prompts)]
    return [Request(Prompt(i, p, ""), i, options.completions, sampling) for i, p in enumerate(prompts)]


def _make_model(folder: Path) -> Path:
    """A random Llama of the quickstart's size: its completions end by chance, here and there."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"<{i}>": i for i in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<2>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<0>").save_pretrained(folder)
    return folder


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a model (default: a random one of 0.2 M parameters)")
    parser.add_argument("--rounds", type=int, default=7, help="segments per arm")
    parser.add_argument("--prompts", type=int, default=96, help="prompts per segment")
    parser.add_argument("--completions", type=int, default=16, help="completions per prompt")
    parser.add_argument("--prompts-in-flight", type=int, default=8, help="prompts decoded at once")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest completion")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
