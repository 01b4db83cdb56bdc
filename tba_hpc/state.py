"""Everything a run keeps on disk except the shards' format: paths, checkpoints, evaluations, events.

It must not import torch or h5py: a login node reads all of this. Files become visible only by rename
after fsync; a checkpoint is complete only when its last file, COMPLETE, exists.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import operator
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

from tba_hpc.config import Config, ConfigError, differing_keys, dump_config, load_config
from tba_hpc.ports import PASS_AT_1
from tba_hpc.types import Role, Split

STATE_FORMAT = 3
"""Version of state.json."""

BUFFER_FILE = "buffer.h5"
"""The replay buffer inside a checkpoint."""

PROMPTS_FILE = "prompts.h5"
"""Beside it the ledger of prompts done, which every searcher reads too."""

MAY_DIFFER = ("launch.", "run.root")
"""Config keys that a resume may change: it can have another number of ranks and another place."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StateError(ValueError):
    """Something on disk cannot be used; the message is one sentence."""


class DiskFullError(OSError, ValueError):
    """No space for a file; nothing of it is visible, and nothing sealed before is lost."""


def publish(path: Path, data: bytes | memoryview) -> None:
    """Make ``data`` visible as ``path``, whole and durable, or not at all.

    Temporary file, fsync, rename, fsync of the folder. Raises DiskFullError where there is no room
    (disk, quota or file size limit).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync(path.parent)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFullError(
            f"cannot write {path} ({len(data)} bytes): {os.strerror(error.errno)}; free space or raise the "
            "quota, then start the same run again: nothing sealed before is lost"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """``publish`` for text."""
    publish(path, text.encode())


def fsync(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of a run; alone knows where things lie. Private: 0700, and 0600 for the files below."""

    path: Path

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """Make ``config.run_dir``, or take it again where it holds a run of the same config (a resume).

        Sets the process's umask to 077. Raises ConfigError where the directory holds a run whose config
        differs in more than ``MAY_DIFFER``, holds anything else, or cannot be written.
        """
        run = cls(config.run_dir.absolute())
        os.umask(0o077)
        try:
            run._adopt(config)
        except DiskFullError:
            raise
        except OSError as error:
            raise ConfigError(
                f"cannot write to the run directory {run.path}: {error.strerror}; "
                "choose another place with --set run.root=…"
            ) from None
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """The run directory that ``create`` made. Sets the process's umask to 077. Raises ConfigError."""
        run = cls(path.absolute())
        if not run.config_file.is_file():
            raise ConfigError(
                f"{path} is not a run directory: it has no config.yaml; start the run with 'tba run CONFIG'"
            )
        os.umask(0o077)
        return run

    def _adopt(self, config: Config) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if self.config_file.exists():
            self._refuse_another_config(config)
        elif strangers := sorted(p.name for p in self.path.iterdir() if p.suffix != ".tmp"):
            raise ConfigError(
                f"{self.path} is not empty and holds no run (found {strangers[0]}): "
                "choose another run.name or run.root, or empty it"
            )
        self.path.chmod(0o700)
        write_atomic(self.config_file, dump_config(config))
        for folder in self._folders:
            folder.mkdir(exist_ok=True)

    def _refuse_another_config(self, config: Config) -> None:
        try:
            old = self.config()
        except ConfigError as error:
            raise ConfigError(
                f"{self.path} holds a run that this version cannot resume ({error}): choose another run.name"
            ) from None
        keys = [key for key in differing_keys(old, config) if not key.startswith(MAY_DIFFER)]
        if keys:
            raise ConfigError(
                f"{self.path} holds a run with another config: {', '.join(keys)} "
                f"{'differs' if len(keys) == 1 else 'differ'}; choose another run.name to start afresh, "
                "or the old values to resume"
            )

    def adapt(self, overrides: list[str]) -> None:
        """Set keys that a resume may change (``MAY_DIFFER``) in the frozen config. Raises ConfigError."""
        config = load_config(self.config_file, overrides)
        self._refuse_another_config(config)
        write_atomic(self.config_file, dump_config(config))

    def config(self) -> Config:
        """The frozen config. Raises ConfigError."""
        return load_config(self.config_file)

    @property
    def _folders(self) -> tuple[Path, ...]:
        return (
            *(self.shards, self.weights, self.checkpoints, self.references),
            *(self.metrics, self.logs, self.evaluations),
        )

    @property
    def config_file(self) -> Path:
        """The resolved config, all that the roles read."""
        return self.path / "config.yaml"

    @property
    def shards(self) -> Path:
        """Sealed trajectories, a folder per searcher."""
        return self.path / "shards"

    @property
    def weights(self) -> Path:
        """Published weights (file exchange only)."""
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.path / "checkpoints"

    @property
    def references(self) -> Path:
        """Policies that became the reference, as Hugging Face folders."""
        return self.path / "references"

    def reference(self, step: int) -> Path:
        """The policy of ``step``, which became the reference."""
        return self.references / f"step-{step:06d}"

    @property
    def metrics(self) -> Path:
        """One JSONL file per role and rank."""
        return self.path / "metrics"

    @property
    def logs(self) -> Path:
        """One folder per attempt; ``latest`` points to the newest."""
        return self.path / "logs"

    @property
    def evaluations(self) -> Path:
        """One folder per split and step."""
        return self.path / "evaluations"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.path / "export"

    @property
    def events_file(self) -> Path:
        """What happened to the run's ranks and jobs, over all its lives; see ``log_event``."""
        return self.path / "events.jsonl"

    @property
    def report(self) -> Path:
        """The self-contained HTML page."""
        return self.path / "report.html"

    @property
    def summary(self) -> Path:
        """The figures of a finished run."""
        return self.path / "summary.json"

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do: the leading trainer writes the summary last of all."""
        return self.summary.exists() and bool(json.loads(self.summary.read_text())["finished"])

    def metrics_file(self, role: Role, rank: int = 0) -> Path:
        """``trainer.jsonl`` or ``searcher-0003.jsonl``."""
        return self.metrics / ("trainer.jsonl" if role == "trainer" else f"searcher-{rank:04d}.jsonl")

    def shard_folder(self, searcher: int) -> Path:
        """Where a searcher seals its shards."""
        return self.shards / f"searcher-{searcher:04d}"

    def shard_file(self, searcher: int, index: int) -> Path:
        """Path of one shard."""
        return self.shard_folder(searcher) / f"{index:06d}.h5"

    def shard_files(self, suffix: str = ".h5") -> dict[tuple[int, int], Path]:
        """All visible shards by (searcher, index), ascending; files of other names are left alone."""
        name = re.compile(rf"searcher-(\d+)/(\d+){re.escape(suffix)}")
        found = {
            (int(place[1]), int(place[2])): path
            for path in self.shards.glob(f"searcher-*/*{suffix}")
            if (place := name.fullmatch(str(path.relative_to(self.shards))))
        }
        return dict(sorted(found.items()))

    def begin_attempt(self) -> Path:
        """A new folder ``logs/attempt-001`` …, which ``logs/latest`` names from now on."""
        taken = [int(path.name.removeprefix("attempt-")) for path in self.logs.glob("attempt-*")]
        folder = self.logs / f"attempt-{max(taken, default=0) + 1:03d}"
        folder.mkdir()
        link = self.logs / f".latest.{os.getpid()}.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self.logs / "latest")
        return folder

    @property
    def attempt(self) -> Path:
        """Folder of the newest attempt's logs; ``begin_attempt`` comes first."""
        return (self.logs / "latest").resolve()


# --- Checkpoints ---


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where the trainer stands; with the learner's files, buffer and ledger beside it, all of a checkpoint.

    cursors: per searcher, the index of the next shard to merge; searchers of earlier attempts stay in it.
    trajectories, tokens: merged so far (completion tokens); added, duplicates, evicted: what the buffer
    did with them. train_seconds: wall time of the loop, attempts added up. save_seconds: the longest save
    of a checkpoint so far, this one included.
    """

    step: int = 0
    round: int = 0
    cursors: Mapping[int, int] = field(default_factory=dict)
    trajectories: int = 0
    added: int = 0
    duplicates: int = 0
    evicted: int = 0
    tokens: int = 0
    train_seconds: float = 0.0
    save_seconds: float = 0.0
    seed: int = 0

    def to_json(self) -> str:
        """JSON text that from_json reads."""
        return json.dumps({"format": STATE_FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> TrainerState:
        """Inverse of to_json. Raises StateError for a text of another format."""
        values = json.loads(text)
        if values.pop("format") != STATE_FORMAT:
            raise StateError(
                f"state.json is not of format {STATE_FORMAT}: resume with the version that wrote it"
            )
        values["cursors"] = {int(searcher): index for searcher, index in values["cursors"].items()}
        return cls(**{known.name: values[known.name] for known in fields(cls)})


def begin_checkpoint(run: RunDir, step: int) -> Path:
    """A new folder for the files of a checkpoint; incomplete ones of earlier attempts are removed.

    ``step-000400``, or ``step-000400.1`` … where that step has a complete one already (stopped again
    right after a resume): a complete checkpoint is never written over.
    """
    for folder in checkpoint_folders(run, complete=False):
        shutil.rmtree(folder)
    name = f"step-{step:06d}"
    saves = [int(folder.suffix[1:] or 0) for folder in run.checkpoints.glob(f"{name}*")]
    again = max(saves, default=-1) + 1  # also where the first is gone: the newest must have the last name
    folder = run.checkpoints / (f"{name}.{again}" if again else name)
    folder.mkdir()
    return folder


def make_durable(folder: Path) -> None:
    """Flush everything in ``folder`` to the disk."""
    for path in folder.rglob("*"):
        fsync(path)


def complete_checkpoint(run: RunDir, folder: Path, state: TrainerState, *, keep: int) -> dict[int, int]:
    """Write ``state.json`` beside files that are durable already, and only then mark ``folder`` COMPLETE.

    COMPLETE lists the files, see ``missing_files``. Checkpoints beyond the newest ``keep`` are deleted.
    Returns the cursors of the oldest one kept: shards before them are needed no more, see ``prune_shards``.
    Raises DiskFullError.
    """
    write_atomic(folder / "state.json", state.to_json())
    write_atomic(folder / "COMPLETE", _inventory(folder))
    fsync(run.checkpoints)
    kept = checkpoint_folders(run, complete=True)
    for old in kept[:-keep]:
        (old / "COMPLETE").unlink()  # first: a half-deleted checkpoint must not look complete
        shutil.rmtree(old)
    return dict(read_state(kept[-keep:][0]).cursors)


def latest_checkpoint(run: RunDir) -> Path | None:
    """The newest complete checkpoint."""
    return next(iter(reversed(checkpoint_folders(run, complete=True))), None)


def read_state(folder: Path) -> TrainerState:
    """State of a complete checkpoint. Raises StateError where another version wrote it."""
    return TrainerState.from_json((folder / "state.json").read_text())


def missing_files(folder: Path) -> list[str]:
    """Files of a complete checkpoint that are not there as they were when it was completed, by name."""
    now = set(_inventory(folder).splitlines())
    then = (folder / "COMPLETE").read_text().splitlines()
    return [line.partition(" ")[2] for line in then if line not in now]


def _inventory(folder: Path) -> str:
    """A line per file: bytes and path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "COMPLETE")
    return "".join(f"{path.stat().st_size} {path.relative_to(folder)}\n" for path in files)


def prune_shards(run: RunDir, cursors: Mapping[int, int]) -> int:
    """Delete the shards before ``cursors``; returns how many. Files set aside stay, as evidence."""
    merged = [path for (s, index), path in run.shard_files().items() if index < cursors.get(s, 0)]
    for path in merged:
        path.unlink()
    return len(merged)


def prune_references(run: RunDir) -> None:
    """Delete the references before the one in force at the oldest complete checkpoint."""
    oldest = next(iter(checkpoint_folders(run, complete=True)), None)
    end = read_state(oldest).step if oldest else 0
    folders = {int(path.name.removeprefix("step-")): path for path in run.references.glob("step-*")}
    in_force = max((step for step in folders if step <= end), default=0)
    for step, folder in folders.items():
        if step < in_force:
            shutil.rmtree(folder)


def checkpoint_folders(run: RunDir, *, complete: bool) -> list[Path]:
    """The complete checkpoints, or the others, by (step, save), ascending."""
    named = {
        folder: re.fullmatch(r"step-(\d+)(?:\.(\d+))?", folder.name) for folder in run.checkpoints.iterdir()
    }
    found = {
        (int(name[1]), int(name[2] or 0)): folder
        for folder, name in named.items()
        if name and (folder / "COMPLETE").exists() == complete
    }
    return [found[key] for key in sorted(found)]


# --- Evaluations ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Greedy answers to a split under the weights of ``step``: one searcher's part, or all of it.

    ref_logprob: log π_ref of all their tokens together, nats; None without a reference model · score_name:
    what the task calls the share of correct answers.
    """

    split: Split
    step: int
    correct: int
    total: int
    tokens: int
    truncated: int
    ref_logprob: float | None = None
    score_name: str = PASS_AT_1

    def __add__(self, other: Evaluation) -> Evaluation:
        """Both together, of the same split and step."""
        known = self.ref_logprob is not None and other.ref_logprob is not None
        return replace(
            self,
            correct=self.correct + other.correct,
            total=self.total + other.total,
            tokens=self.tokens + other.tokens,
            truncated=self.truncated + other.truncated,
            ref_logprob=(self.ref_logprob or 0) + (other.ref_logprob or 0) if known else None,
        )

    @property
    def score(self) -> float:
        """Share of correct answers; NaN for an empty split."""
        return self.correct / self.total if self.total else float("nan")

    @property
    def perplexity(self) -> float | None:
        """Of the answers under the reference, exp(−Σ log π_ref ÷ tokens), which grows with the KL to it.

        None without a reference model, or without a token.
        """
        if self.ref_logprob is None or self.tokens == 0:
            return None
        return math.exp(-self.ref_logprob / self.tokens)


def write_evaluation(run: RunDir, searcher: int, searchers: int, part: Evaluation) -> None:
    """Publish one searcher's part of an evaluation."""
    path = _evaluation_part(run, part.split, part.step, searcher, searchers)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, json.dumps(asdict(part)))


def read_evaluation(run: RunDir, split: Split, step: int, searchers: int) -> Evaluation | None:
    """The sum of all parts; None until every searcher's part is there."""
    paths = [_evaluation_part(run, split, step, searcher, searchers) for searcher in range(searchers)]
    if not all(path.exists() for path in paths):
        return None
    return functools.reduce(operator.add, (Evaluation(**json.loads(path.read_text())) for path in paths))


def find_evaluation(run: RunDir, split: Split, step: int) -> Evaluation | None:
    """As ``read_evaluation``, whatever number of searchers made it."""
    parts = _evaluation_folder(run, split, step).glob("searcher-*-of-*.json")
    counts = sorted({int(part.stem.rpartition("-")[2]) for part in parts})
    whole = (read_evaluation(run, split, step, searchers) for searchers in counts)
    return next((evaluation for evaluation in whole if evaluation), None)


def discard_evaluations(run: RunDir, *, after: int) -> None:
    """Delete evaluations of steps beyond ``after``, which a resume takes again, and those cut short."""
    for folder in run.evaluations.glob("*-step-*"):
        split, _, step = folder.name.partition("-step-")
        if int(step) > after or find_evaluation(run, cast(Split, split), int(step)) is None:
            shutil.rmtree(folder)


def _evaluation_part(run: RunDir, split: Split, step: int, searcher: int, searchers: int) -> Path:
    """The name holds the number of searchers: parts of another number slice the split differently."""
    return _evaluation_folder(run, split, step) / f"searcher-{searcher:04d}-of-{searchers:04d}.json"


def _evaluation_folder(run: RunDir, split: Split, step: int) -> Path:
    return run.evaluations / f"{split}-step-{step:06d}"


# --- Events ---


def log_event(run: RunDir, event: str, **extra: object) -> None:
    """Append a line to ``events.jsonl``: ``time`` (unix s), ``event``, ``job``, ``life``, and ``extra``.

    job: id of the Slurm job that this process is part of, else empty; life: how often it was requeued.

    ==========  ====================================================================================
    event       when, and its extra keys
    ==========  ====================================================================================
    submitted   ``tools/submit.py`` has submitted ``job``; ``command``: what submits the run again
    life        a batch script begins, for the first time or after a requeue; ``nodes``: "node1,node2"
    start       the ranks are about to be started; ``attempt``: "attempt-003", ``trainers``, ``searchers``
    failed      they ended badly; ``code``: exit status
    stopped     they ended because they were asked to, or their time was over
    signal      the batch script, or ``tba run``, was asked to stop
    requeue     the job goes back to the queue
    unfit       ``nodes`` do not answer
    hung        srun outlived its step
    orphan      a step of an earlier life was cancelled
    finished    the run is finished
    refused     the user must mend something; ``sentence``
    ==========  ====================================================================================

    ``slurm/env.sh`` writes such lines too. A line that cannot be written, on a full disk, is left out.
    """
    job, life = os.environ.get("SLURM_JOB_ID", ""), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    line = json.dumps({"time": time.time(), "event": event, "job": job, "life": life, **extra})
    with suppress(OSError), run.events_file.open("ab", buffering=0) as file:
        file.write(line.encode() + b"\n")


def read_events(run: RunDir) -> list[dict[str, Any]]:
    """All events in order; a line torn by a crash is left out, no file is no event."""
    if not run.events_file.exists():
        return []
    lines = run.events_file.read_bytes().splitlines()
    return [event for line in lines if (event := _parse_event(line))]


def _parse_event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


# --- Signals ---


class StopFlag:
    """``with StopFlag() as stop``: SIGTERM, SIGUSR1 and SIGINT set a flag that loops read at safe points.

    The handler does nothing else: saving inside a handler could interrupt a save. Before the block these
    signals end the process at once, which is right while there is nothing to save: no flag is read inside
    a slow import or the start of MPI. After it they are ignored: what is left is to leave. Main thread only.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.is_set = False

    def __enter__(self) -> StopFlag:
        for number in self.SIGNALS:
            signal.signal(number, self._set)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
