"""Searcher throughput against bare vLLM: engines of the same settings, same prompts, segments alternating.

    python tools/bench_searcher.py [--model FOLDER] [--rounds 8] [--json]

Arms: ``bare`` is a process that hands all prompts to ``LLM.generate`` at once; ``searcher`` is the real loop
of tba_hpc.loops.searcher, with rewards, reference log-probabilities and seals on disk; the arm without
reference shows what that costs. An arm's figure is the median over rounds of its tokens per second divided by
bare's of the same round. MODEL: see tools/make_tiny_model.py; the task is the quickstart's.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tba_hpc.config import Config, load_config
from tba_hpc.core.ports import Reference
from tba_hpc.core.types import Publication, Request, Sampling, Shard, WeightLayout, WeightUpdate
from tba_hpc.engine import vllm_engine
from tba_hpc.engine.engine_channel import EngineSettings
from tba_hpc.engine.vllm_generator import VllmGenerator, engine_settings
from tba_hpc.engine.vllm_victim import VllmVictim
from tba_hpc.exchange.hdf5_shards import ShardWriter
from tba_hpc.learner.hf_model import load_policy, load_tokenizer
from tba_hpc.learner.hf_reference import HfReference
from tba_hpc.learner.model_free_references import BehaviourReference
from tba_hpc.loops.online_evaluation import OnlineEvaluator
from tba_hpc.loops.scorer import Scorer
from tba_hpc.loops.searcher import Searcher
from tba_hpc.report.tables import Cell, print_rows
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import MetricsWriter
from tba_hpc.runtime import PROMPTS_AHEAD
from tba_hpc.tasks import load_task

if TYPE_CHECKING:
    from vllm import LLM

ROOT = Path(__file__).parents[1]

Arm = Callable[[list[Request]], int]
"""Generates all requests and returns how many tokens were sampled."""


def main() -> None:
    """Measure and print."""
    options = _options()
    torch.set_num_threads(1)  # as the launchers have it for every rank
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [f"model.path={options.model}", f"run.root={scratch}"]
        bench = Bench(load_config(ROOT / "configs" / "quickstart.yaml", overrides))
        with ProcessPoolExecutor(1, get_context("spawn"), build_bare, (bench.settings,)) as bare:
            arms: dict[str, Arm] = {
                "bare": lambda requests: bare.submit(generate_bare, requests).result(),
                "searcher without reference": lambda requests: bench.search(requests, BehaviourReference()),
                "searcher": lambda requests: bench.search(requests, bench.reference),
            }
            rates = measure(arms, bench.requests(options.prompts), options.rounds)
        bench.generator.close()
    print_rows(summarize(rates), as_json=options.json)


_llm: LLM
"""The bare engine, in the process of its own."""

_settings: EngineSettings
"""Its settings."""


def build_bare(settings: EngineSettings) -> None:
    """In a new process: the engine as a searcher's engine process builds it."""
    global _llm, _settings
    vllm_engine.prepare_environment()
    _llm, _settings = vllm_engine.build(settings), settings


def generate_bare(requests: list[Request]) -> int:
    """vLLM's own offline loop, with everything it could wish for: all prompts at once."""
    prompts = [request.prompt.tokens.tolist() for request in requests]
    params = [vllm_engine.sampling_params(request.sampling, request.n, _settings) for request in requests]
    outputs = _llm.generate(prompts, params, use_tqdm=False)
    return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)


class Bench:
    """A searcher's engine and what its loop needs besides."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.settings = engine_settings(config.model, config.generator, seed=0)
        self._run = RunDir.create(config)
        self._task = load_task(config.task, load_tokenizer(config.model.path), partial(VllmVictim, seed=1))
        policy = load_policy(config.model.path, config.model.dtype)
        self._update = own_weights(policy.state_dict())
        self.reference = HfReference(policy)
        self.generator = VllmGenerator(config.model, config.generator, seed=0)

    def requests(self, count: int) -> list[Request]:
        """Training prompts of the task, over and over."""
        prompts, section = self._task.prompts("train"), self._config.generator
        sampling = Sampling(section.temperature, section.top_p, section.max_tokens)
        return [
            Request(prompts[i % len(prompts)], i, section.completions_per_prompt, sampling)
            for i in range(count)
        ]

    def search(self, requests: list[Request], reference: Reference) -> int:
        """The whole loop, on an exchange that gives the weights once and takes shards at once."""
        section, shards = self._config.generator, ShardWriter(self._run, 0)
        publication = replace(self._update.publication, reference=reference.step)
        exchange = Feed(replace(self._update, publication=publication), self.generator, requests)
        seal_seconds = self._config.exchange.seal_seconds
        Searcher(
            generator=self.generator,
            scorer=Scorer(self._task, reference, shards, seal_seconds=seal_seconds),
            exchange=exchange,
            requests=exchange.feed(),
            evaluator=OnlineEvaluator(self._task, searcher=0, searchers=1, max_tokens=1, limits={}),
            report=lambda place, places, part: None,
            metrics=MetricsWriter(self._run.metrics_file("searcher")),
            stop_asked=lambda: False,
            sequences=(section.prompts_in_flight + PROMPTS_AHEAD) * section.completions_per_prompt,
            pending_shards=1,
        ).run()
        return exchange.tokens


@dataclass
class Feed:
    """A SearcherExchange that gives weights once and is closed when nothing is left to generate."""

    update: WeightUpdate | None
    generator: VllmGenerator
    requests: list[Request]
    pending: int = 0
    trajectories: int = 0
    tokens: int = 0
    exhausted: bool = False

    def feed(self) -> Iterator[Request]:
        """The requests; it notices their end."""
        yield from self.requests
        self.exhausted = True

    def poll(self) -> WeightUpdate | None:
        """The weights, at the first call."""
        update, self.update = self.update, None
        return update

    def offer(self, shard: Shard) -> None:
        """Count."""
        self.trajectories += len(shard.trajectories)
        self.tokens += len(shard.trajectories.completions.values)

    def request_stop(self) -> None:
        """Nobody to ask."""

    @property
    def closed(self) -> bool:
        """Whether the prompts have run out and the engine is empty."""
        return self.exhausted and self.generator.in_flight == 0

    def close(self) -> None:
        """Every completion must have come as a sealed trajectory."""
        wanted = sum(request.n for request in self.requests)
        assert self.trajectories == wanted, (self.trajectories, wanted)


def measure(arms: dict[str, Arm], requests: list[Request], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of every arm in every round; each round begins with another arm.

    The speed of a shared machine drifts, and whoever comes first after a pause finds it faster.
    """
    for arm in arms.values():
        arm(requests[: len(requests) // 4])
    rates: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            gc.collect()
            start = time.perf_counter()
            tokens = arms[name](requests)
            rates[name].append(tokens / (time.perf_counter() - start))
    return rates


def summarize(rates: dict[str, list[float]]) -> list[dict[str, Cell]]:
    """Per arm: median tokens per second, and median, least and greatest ratio to bare's of the same round."""
    rows: list[dict[str, Cell]] = []
    for name, values in rates.items():
        ratios = [rate / base for rate, base in zip(values, rates["bare"], strict=True)]
        row: dict[str, Cell] = {
            "arm": name,
            "tokens/s": statistics.median(values),
            "÷ bare": statistics.median(ratios),
        }
        rows.append({**row, "least": min(ratios), "greatest": max(ratios)})
    return rows


def own_weights(state: Mapping[str, torch.Tensor]) -> WeightUpdate:
    """The model's own weights, as a trainer would publish them."""
    layout = WeightLayout.of([(name, tuple(tensor.shape)) for name, tensor in state.items()], "F32")
    data = np.concatenate(
        [tensor.contiguous().numpy().reshape(-1).view(np.uint8) for tensor in state.values()]
    )
    return WeightUpdate(Publication(version=0, published=time.time()), layout, data)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".cache/tiny-model-seed0", help="folder of a tiny model")
    parser.add_argument("--rounds", type=int, default=8, help="segments per arm")
    parser.add_argument("--prompts", type=int, default=300, help="prompts per segment")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
