"""Runs a real DeepSpeedLearner on one or more ranks, each a process, and keeps what it did in files.

A plan is a list of actions, such as ``("step", 7)`` or ``("save", "checkpoint")``, that the leader takes
in order.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from forks import fork

from tba_hpc.config import Config, parse_config
from tba_hpc.core.batch import take_groups
from tba_hpc.core.types import BEHAVIOUR, LIVE_RECORD, Ragged, TrajectoryBatch, WeightLayout
from tba_hpc.learner import deepspeed_learner, hf_model
from tba_hpc.learner.deepspeed_learner import DeepSpeedLearner
from tba_hpc.run.background import in_background

Plan = list[tuple[str, int | str]]

LEARNING_RATE, BETA = 5e-5, 0.5
GROUPS, GROUP_SIZE = 4, 4
DEADLINE = 60.0


def make_config(
    model: Path,
    *,
    ranks: int,
    dtype: str = "float32",
    temperature: float = 1.0,
    context_length: int = 1024,
    **train: object,
) -> Config:
    """A config whose micro-batches, chunks and clip all matter to the result."""
    settings = {
        "prompts_per_step": GROUPS,
        "completions_per_prompt": GROUP_SIZE,
        "gradient_clip": 5.0,
        "weight_decay": 0.01,
        "objective": {"name": "trajectory_balance", "log_z": "policy"},  # as the plain loop has it
        "ratio_bound": "none",
    }
    return parse_config(
        {
            "model": {
                "path": str(model),
                "dtype": dtype,
                "logprob_temperature": temperature,
                "context_length": context_length,
            },
            "generator": {"max_tokens": context_length // 2},
            "train": settings | train,
            "launch": {"trainers": ranks},
        }
    )


def make_batch(seed: int) -> TrajectoryBatch:
    """Random groups of very different lengths: B = 4, K = 4; every third token of the last is no action."""
    random = np.random.default_rng(seed)
    prompts, completions = [], []
    for group in range(GROUPS):
        prompts.append(random.integers(3, 90, random.integers(2, 9)))
        completions += [
            random.integers(3, 90, random.integers(1, 6 * (group + 1))) for _ in range(GROUP_SIZE)
        ]
    record = np.zeros(len(completions), LIVE_RECORD)
    record["prompt_id"] = record["prompt_row"] = np.arange(len(record)) // GROUP_SIZE
    record["reward"] = random.random(len(record))
    sampled = [np.zeros(len(row), np.float32) for row in completions]
    for row in sampled[-GROUP_SIZE:]:
        row[2::3] = np.nan
    ref_logprobs = random.normal(-3, 1, sum(map(len, sampled))).astype(np.float32)
    record["version_oldest"] = -random.integers(0, 13, len(record))
    record["version_newest"] = record["version_oldest"] // 2
    for name in ("version_oldest", "version_newest"):
        record[name][::3] = 0  # every third is on-policy
    return TrajectoryBatch(
        record,
        Ragged.from_rows(prompts, np.int32),
        Ragged.from_rows(completions, np.int32),
        np.concatenate(sampled),
        ref_logprobs,
        group_size=GROUP_SIZE,
        step=0,
    )


SPOILT_PROMPT = 2
"""The prompt whose group has another reward in a batch that is spoilt."""


def spoilt(reward: float) -> TrajectoryBatch:
    """A batch in which one completion's reward is ``reward``."""
    batch = make_batch(5)
    batch.record["reward"][SPOILT_PROMPT * GROUP_SIZE] = reward
    return batch


@dataclass(frozen=True)
class Run:
    """What a group of ranks did in ``folder``: metrics of every step in order, weights by name."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        return json.loads((self.folder / "metrics.json").read_text())

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout.from_json((self.folder / "layout.json").read_text())

    def losses(self) -> list[float]:
        return [step["loss"] for step in self.metrics]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        data = torch.from_numpy(np.fromfile(self.folder / name, np.uint8))
        kind = {"F32": torch.float32, "BF16": torch.bfloat16}
        return {
            slot.name: data[slot.start : slot.end].view(kind[slot.dtype]).view(slot.shape)
            for slot in self.layout.slots
        }

    def peak_bytes(self, rank: int) -> int:
        return int((self.folder / f"peak-{rank}").read_text())


def run(folder: Path, config: Config, plan: Plan, *, fused: bool = False) -> Run:
    """Take the actions of ``plan`` on ``config.launch.trainers`` ranks; fails with their logs.

    fused: with the AdamW that a GPU would have.
    """
    play(_work, folder, config, plan, fused, ranks=config.launch.trainers)
    return Run(folder)


def play(
    part: Callable[..., None], folder: Path, *arguments: object, ranks: int = 2, codes: Sequence[int] = ()
) -> None:
    """Let each rank, a process, call ``part(folder, rank, *arguments)``; fails with their logs.

    codes: the exit codes that they are to have, if not 0. One that had to be killed after five minutes has
    None.
    """
    (folder / "store").mkdir(parents=True, exist_ok=True)
    processes = [fork(part, folder, rank, *arguments) for rank in range(ranks)]
    for process in processes:
        process.join(300)
    found = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    logs = "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("log-*")))
    assert found == [*(codes or [0] * ranks)], f"exit codes {found}\n{logs}"


def log_to(path: Path) -> None:
    """In a rank's process: send its output to a file; a batch has several chunks of log-probabilities."""
    hf_model.CHUNK_BYTES["cpu"] = 16 * 4 * 128
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def learner_of(folder: Path, rank: int, config: Config) -> DeepSpeedLearner:
    """In a rank's process: its learner; its output goes to a file."""
    log_to(folder / f"log-{rank}")
    torch.set_num_threads(1)
    return DeepSpeedLearner(config, rank=rank, ranks=config.launch.trainers, store=folder / "store")


def _work(folder: Path, rank: int, config: Config, plan: Plan, fused: bool) -> None:
    if fused:
        deepspeed_learner.is_fused = lambda device: True
    os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = "7"  # as under mpiexec: not this group's numbering
    learner = learner_of(folder, rank, config)
    if rank == 0:
        _lead(learner, folder, plan)
    else:
        learner.follow(lambda: shared_window(folder / "window", learner.layout))
    (folder / f"peak-{rank}").write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10))


def _lead(learner: DeepSpeedLearner, folder: Path, plan: Plan) -> None:
    metrics: list[dict[str, float]] = []
    (folder / "layout.json").write_text(learner.layout.to_json())
    (folder / "window").write_bytes(b"\xff" * learner.layout.nbytes)
    for action, value in plan:
        match action:
            case "step":
                step = learner.step(make_batch(int(value)), learning_rate=LEARNING_RATE, beta=BETA)
                metrics.append(dict(step))
            case "spoilt":
                step = learner.step(spoilt(float(value)), learning_rate=LEARNING_RATE, beta=BETA)
                metrics.append(dict(step))
            case "write":
                learner.write_weights(shared_window(folder / "window", learner.layout))()
                (folder / str(value)).write_bytes((folder / "window").read_bytes())
            case "save":
                (folder / str(value)).mkdir()
                (folder / str(value) / "lines").write_text(learner.save(folder / str(value))())
            case "snapshot":
                (folder / str(value)).mkdir()
                written = in_background(learner.save(folder / str(value)))
            case "written":
                (folder / str(value) / "lines").write_text(written.result(DEADLINE))
            case "load":
                learner.load(Path(value))
            case "refer":
                asked = take_groups(make_batch(7), np.arange(GROUPS - 1))  # not evenly over two ranks
                np.save(folder / str(value), learner.reference_logprobs(asked, BEHAVIOUR))
            case "export":
                learner.export(folder / str(value))
    (folder / "metrics.json").write_text(json.dumps(metrics))
    learner.close()


def shared_window(path: Path, layout: WeightLayout) -> np.ndarray:
    """The shared buffer that all ranks write weights into."""
    return np.memmap(path, np.uint8, "r+", shape=(layout.nbytes,))
