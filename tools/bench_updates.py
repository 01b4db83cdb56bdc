"""Tokens per second of an engine whose weights change all the time, its attention cache kept or not.

    python tools/bench_updates.py [--model FOLDER] [--every .5] [--tokens 40] [--rounds 6] [--json]

Arms: ``none`` gets no weights; ``computed again`` (generator.keep_kv=false) and ``kept`` (true) get them
every so many seconds, as from a trainer that publishes every k steps. Prompts and settings are the
quickstart's, but for ``--tokens``: with more than its 40, every completion is that long. An arm's figure is
the median over rounds of its tokens per second divided by those of ``none`` in the same round; arms take
turns to begin. MODEL: see tools/make_tiny_model.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial

import torch
from bench_searcher import ROOT, own_weights

from tba_hpc.config import Config, load_config
from tba_hpc.core.types import Publication, Request, Sampling, WeightUpdate
from tba_hpc.engine.vllm_generator import VllmGenerator
from tba_hpc.engine.vllm_victim import VllmVictim
from tba_hpc.learner.hf_model import load_policy, load_tokenizer
from tba_hpc.report.tables import print_rows
from tba_hpc.tasks import load_task

QUICKSTART_TOKENS = 40


def main() -> None:
    """Measure and print."""
    options = _options()
    torch.set_num_threads(1)
    config = _config(options)
    update = own_weights(load_policy(config.model.path, config.model.dtype).state_dict())
    keeping = config.model_copy(update={"generator": config.generator.model_copy(update={"keep_kv": True})})
    first, second = (VllmGenerator(one.model, one.generator, seed=0) for one in (config, keeping))
    arms = {
        "none": partial(generate, first, every=float("inf")),
        "computed again": partial(generate, first, every=options.every),
        "kept": partial(generate, second, every=options.every),
    }
    requests = _requests(config, options)
    for arm in arms.values():
        arm(requests[: len(requests) // 4], update)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(options.rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            rates[name].append(arms[name](requests, update))
    first.close()
    second.close()
    print_rows(
        [
            {
                "arm": name,
                "tokens/s": statistics.median(values),
                "÷ none": statistics.median(a / b for a, b in zip(values, rates["none"], strict=True)),
            }
            for name, values in rates.items()
        ],
        as_json=options.json,
    )


def generate(
    generator: VllmGenerator, requests: list[Request], update: WeightUpdate, *, every: float
) -> float:
    """Tokens per second over all requests, with new weights every so many seconds."""
    section = generator._generator
    sequences = (section.prompts_in_flight + 2) * section.completions_per_prompt
    waiting, tokens = iter(requests), 0
    start = loaded = time.perf_counter()
    while True:
        if time.perf_counter() - loaded > every and not generator.loading:
            loaded = time.perf_counter()
            generator.load(replace(update, publication=Publication(version=generator.version + 1)))
        while generator.in_flight < sequences and (request := next(waiting, None)):
            generator.submit(request)
        if not generator.in_flight:
            return tokens / (time.perf_counter() - start)
        for group in generator.step():
            tokens += sum(len(completion.tokens) for completion in group.completions)


def _config(options: argparse.Namespace) -> Config:
    room = max(128, 96 + options.tokens)
    overrides = [
        *(f"model.path={options.model}", f"model.context_length={room}"),
        f"generator.max_tokens={options.tokens}",
    ]
    return load_config(ROOT / "configs" / "quickstart.yaml", overrides)


def _requests(config: Config, options: argparse.Namespace) -> list[Request]:
    section = config.generator
    task = load_task(config.task, load_tokenizer(config.model.path), partial(VllmVictim, seed=1))
    least = options.tokens if options.tokens > QUICKSTART_TOKENS else 0
    sampling = Sampling(section.temperature, section.top_p, options.tokens, least)
    prompts = task.prompts("train")
    return [
        Request(prompts[i % len(prompts)], i, section.completions_per_prompt, sampling)
        for i in range(options.prompts)
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".cache/tiny-model-seed0", help="folder of a tiny model")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two updates")
    parser.add_argument("--tokens", type=int, default=QUICKSTART_TOKENS, help="longest completion")
    parser.add_argument("--rounds", type=int, default=6, help="segments per arm")
    parser.add_argument("--prompts", type=int, default=120, help="prompts per segment")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
