"""Measures the learner, the reference policy and an engine's load of weights against the machine itself.

    python tools/bench_gpu.py [--device cuda|cpu] [--zero-stage 2] [--out bench_gpu.json]

Needs an NVIDIA GPU with 40 GB, and nobody has run it on one yet: its figures are to come. ``--device cpu``
takes a tiny model through the same code, to see that it runs.

A random model of 1.2 billion parameters in bfloat16 takes optimizer steps, has its weights copied out as for
a publication, computes reference log-probabilities, and is loaded into a running vLLM engine. Each time is
divided by the machine's best, measured in the same run: of one large bfloat16 matrix product with as many
FLOP, or of one plain copy of as many bytes. Counted as FLOP is what the mathematics needs: 2 per weight and
token forward, twice that backward, causal attention, the output layer at completion tokens; what is computed
again is not. Memory is divided by 18 bytes a parameter: weights, float32 gradients and master weights, AdamW.
Every row is printed and saved as soon as it is measured, so that what fails later loses none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import string
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tba_hpc.config import Config, parse_config
from tba_hpc.core.types import (
    LIVE_RECORD,
    Completion,
    Group,
    Prompt,
    Publication,
    Ragged,
    Request,
    Sampling,
    TrajectoryBatch,
    WeightLayout,
    WeightUpdate,
)
from tba_hpc.engine.vllm_generator import VllmGenerator
from tba_hpc.learner.deepspeed_learner import DeepSpeedLearner
from tba_hpc.learner.hf_model import load_policy
from tba_hpc.learner.hf_reference import HfReference
from tba_hpc.run.files import write_atomic

REPEATS = 5

WIDTH = 4
"""Size of the hidden layer of an MLP ÷ the model's."""

STATE_BYTES = 18
"""Of a parameter in training."""

BLOCK_TOKENS = 128
"""Multiple of the tokens of any block in which an engine keeps its attention cache."""

Row = dict[str, str | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a model, and of its batches: B groups of K completions of T tokens after a prompt of P."""

    hidden: int
    layers: int
    head_size: int
    vocabulary: int
    groups: int
    group_size: int
    prompt: int
    completion: int
    matmul: int
    """Rows and columns of the matrices by whose product the machine is measured."""

    @property
    def kv_cache_mb(self) -> int:
        """Of the attention cache of a group in bfloat16; every head has keys and values of its own."""
        blocks = math.ceil((self.prompt + self.completion) / BLOCK_TOKENS)
        token_bytes = 2 * 2 * self.layers * self.hidden
        return math.ceil(self.group_size * blocks * BLOCK_TOKENS * token_bytes / (1 << 20))

    def forward_flops(self, rows: int, length: int, *, after: int = 0, scored: int) -> float:
        """Of ``rows`` sequences of ``length`` new tokens ``after`` others; ``scored``: tokens with logits."""
        weights = self.layers * (4 + 3 * WIDTH) * self.hidden**2
        attended = rows * length * (after + length / 2)
        return (
            2 * weights * rows * length
            + 4 * self.layers * self.hidden * attended
            + 2 * self.vocabulary * self.hidden * scored
        )


SHAPES = {
    "cuda": Shape(
        **{"hidden": 2048, "layers": 16, "head_size": 128, "vocabulary": 65536, "matmul": 8192},
        **{"groups": 8, "group_size": 16, "prompt": 128, "completion": 512},
    ),
    "cpu": Shape(
        **{"hidden": 64, "layers": 2, "head_size": 32, "vocabulary": 512, "matmul": 512},
        **{"groups": 4, "group_size": 4, "prompt": 8, "completion": 24},
    ),
}


def main() -> None:
    """Measure and print."""
    options = _options()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        sys.exit("bench_gpu: needs an NVIDIA GPU, and torch sees none here; --device cpu only tries the code")
    shape = SHAPES[options.device]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        config = make_config(make_model(Path(scratch) / "model", shape), shape, options.zero_stage)
        for row in measure(config, shape, Path(scratch), torch.device(options.device)):
            rows.append(row)
            print(line_of(row), flush=True)
            write_atomic(options.out, json.dumps(rows, indent=2))


def measure(config: Config, shape: Shape, scratch: Path, device: torch.device) -> Iterator[Row]:
    """All figures; learner, reference and engine follow each other, so that each has the GPU to itself."""
    rate = matmul_rate(shape.matmul, device)
    yield _row("matrix product, TFLOP/s", 1e-12, rate, rate)
    layout, weights = yield from measure_learner(config, shape, scratch / "store", device, rate)
    torch.cuda.empty_cache()
    yield measure_reference(config, shape, rate)
    torch.cuda.empty_cache()
    _, copy = copy_seconds(weights, device)
    yield _row("weights loaded by an engine, ms", 1e3, load_seconds(config, layout, weights), copy)


def measure_learner(
    config: Config, shape: Shape, store: Path, device: torch.device, rate: float
) -> Generator[Row, None, tuple[WeightLayout, np.ndarray]]:
    """Figures of one trainer rank; returns the layout of its weights, and these, uint8 [layout.nbytes]."""
    store.mkdir()
    learner = DeepSpeedLearner.create(config, rank=0, ranks=1, store=store, deadline=600)
    layout, weights, batch = learner.layout, np.zeros(learner.layout.nbytes, np.uint8), make_batch(shape)
    step = best(lambda: learner.step(batch, learning_rate=1e-6, beta=0.1))
    yield _row("optimizer step, ms", 1e3, step, 3 * batch_flops(shape) / rate)
    yield _row("peak memory, GB", 1e-9, peak_bytes(device), STATE_BYTES * layout.nbytes / 2)
    copied, (copy, _) = best(lambda: learner.write_weights(weights)), copy_seconds(weights, device)
    yield _row("weights copied out, ms", 1e3, copied, copy)
    learner.close()
    return layout, weights


def measure_reference(config: Config, shape: Shape, rate: float) -> Row:
    """The reference policy on one group."""
    policy = load_policy(config.model.path, config.model.dtype)
    reference = HfReference(policy, fp32_head=config.model.fp32_head)
    group = make_group(shape)
    seconds = best(lambda: reference.logprobs(group))
    return _row("reference log-probabilities of a group, ms", 1e3, seconds, group_flops(shape) / rate)


def best(action: Callable[[], object]) -> float:
    """Shortest of REPEATS times, s, after one that does not count; every action ends on the host."""
    action()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


# --- The machine ---


def matmul_rate(size: int, device: torch.device) -> float:
    """FLOP/s of a product of two square bfloat16 matrices."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / best(lambda: (left @ right)[0, 0].item())


def copy_seconds(host: np.ndarray, device: torch.device) -> tuple[float, float]:
    """Times of one copy of as many bytes from the device to the memory of ``host``, and back."""
    memory, there = torch.from_numpy(host), torch.zeros(len(host), dtype=torch.uint8, device=device)
    return best(lambda: memory.copy_(there)), best(lambda: there.copy_(memory)[-1].item())


def peak_bytes(device: torch.device) -> int:
    """Most memory held at once so far: torch's on a GPU, else the whole process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def load_seconds(config: Config, layout: WeightLayout, weights: np.ndarray) -> float:
    """Shortest time that an engine stood still to load weights."""
    generator, times = VllmGenerator(config.model, config.generator, seed=0), []
    for version in range(1, REPEATS + 2):
        generator.load(WeightUpdate(Publication(version=version), layout, weights))
        while generator.version < version:
            generator.step()
        times.append(generator.load_seconds)
    generator.close()
    return min(times[1:])


# --- The work ---


def batch_flops(shape: Shape) -> float:
    """Forward, of a batch."""
    rows = shape.groups * shape.group_size
    return shape.forward_flops(rows, shape.prompt + shape.completion, scored=rows * shape.completion)


def group_flops(shape: Shape) -> float:
    """Forward, of a group whose prompt is computed once."""
    rows, length = shape.group_size, shape.completion
    return shape.forward_flops(1, shape.prompt, scored=0) + shape.forward_flops(
        rows, length, after=shape.prompt, scored=rows * length
    )


def make_model(folder: Path, shape: Shape) -> Path:
    """A Llama model with random weights, and a tokenizer of one token per printable character."""
    torch.manual_seed(0)
    heads = shape.hidden // shape.head_size
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=WIDTH * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max(256, 2 * (shape.prompt + shape.completion)),  # 256: for whole runs
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    known = ["<eos>", "<unk>", *string.printable]
    known += [f"<{token}>" for token in range(len(known), shape.vocabulary)]
    words = {word: token for token, word in enumerate(known)}
    characters = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)
    return folder


def make_config(model: Path, shape: Shape, zero_stage: int) -> Config:
    """One trainer rank; a group at a time."""
    return parse_config(
        {
            "model": {"path": str(model), "context_length": shape.prompt + shape.completion},
            "train": {
                "prompts_per_step": shape.groups,
                "completions_per_prompt": shape.group_size,
                "zero_stage": zero_stage,
            },
            "generator": {
                "max_tokens": shape.completion,
                "kv_cache_mb": shape.kv_cache_mb,
                "gpu_memory_utilization": 0.5,
            },
            "launch": {"trainers": 1},
        }
    )


def make_batch(shape: Shape) -> TrajectoryBatch:
    """Random tokens, rewards and reference log-probabilities."""
    random, rows = np.random.default_rng(0), shape.groups * shape.group_size
    prompts, completions = (
        Ragged.from_rows(list(random.integers(1, shape.vocabulary, size)), np.int32)
        for size in ((shape.groups, shape.prompt), (rows, shape.completion))
    )
    logprobs = random.normal(-3, 1, rows * shape.completion).astype(np.float32)
    record = np.zeros(rows, LIVE_RECORD)
    record["prompt_id"] = record["prompt_row"] = np.arange(rows) // shape.group_size
    record["reward"] = random.random(rows)
    size = shape.group_size
    return TrajectoryBatch(record, prompts, completions, logprobs, logprobs, group_size=size, step=0)


def make_group(shape: Shape) -> Group:
    """Distinct random completions of a random prompt."""
    random = np.random.default_rng(1)
    tokens_KT = random.integers(1, shape.vocabulary, (shape.group_size, shape.completion), np.int32)
    prompt = Prompt(0, random.integers(1, shape.vocabulary, shape.prompt, np.int32), "")
    request = Request(prompt, 0, shape.group_size, Sampling(1.0, 1.0, shape.completion))
    completions = [Completion(row, np.zeros(len(row), np.float32), "length") for row in tokens_KT]
    return Group(request, tuple(completions), np.zeros((shape.group_size, 2), np.int32))


# --- The rows ---


def line_of(row: Row) -> str:
    """A row, in text."""
    what, *numbers = row.values()
    measured, at_best, ratio = (f"{number:,.4g}" for number in numbers)
    return f"{what:45}{measured:>12}   at best {at_best:>12}   ratio {ratio}"


def _row(what: str, unit: float, measured: float, at_best: float) -> Row:
    return {"what": what, "measured": unit * measured, "at best": unit * at_best, "ratio": measured / at_best}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=list(SHAPES), default="cuda", help="cpu only tries the code")
    parser.add_argument("--zero-stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--out", type=Path, default=Path("bench_gpu.json"), help="file of the rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
