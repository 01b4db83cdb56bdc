"""Whole runs of the product, one after the other, each started once: ``tba run CONFIG --set …``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tba_hpc.config import Config, differences, load_config
from tba_hpc.run.directory import RunDir

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = REPOSITORY / "configs/quickstart.yaml"

UNBOUNDED = ("exchange.max_staleness=null", "buffer.initial_completions=512")
"""Settings of arms that do not bound the age of data; the quickstart's differ."""

MODEL_SEED = 100

log = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Options:
    """What a user may vary. folder: of the experiment's results; steps: None for the experiment's own."""

    folder: Path
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int | None = None


@dataclass(frozen=True)
class Model:
    """What all runs start from: ``stem`` names its folder; arguments of tools/make_tiny_model.py."""

    stem: str
    arguments: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Its folder, in the cache of the repository."""
        return REPOSITORY / f".cache/{self.stem}-seed{MODEL_SEED}"

    def make(self) -> None:
        """Make it unless it is there."""
        tool, seed = REPOSITORY / "tools/make_tiny_model.py", str(MODEL_SEED)
        run(sys.executable, str(tool), "--seed", seed, "--out", str(self.path), *self.arguments)


@dataclass(frozen=True)
class Study:
    """Arms, of which each has settings of its own and all others in common: one run per arm and seed."""

    arms: Mapping[str, tuple[str, ...]]
    settings: tuple[str, ...]
    steps: int
    model: Model

    def config(self, arm: str, seed: int, options: Options) -> Config:
        """The config of one run. Raises ConfigError."""
        return load_config(QUICKSTART, self.overrides(arm, seed, options))

    def configs(self, options: Options) -> dict[str, Config]:
        """The config of every arm's first run."""
        return {arm: self.config(arm, options.seeds[0], options) for arm in self.arms}

    def overrides(self, arm: str, seed: int, options: Options) -> list[str]:
        """What ``--set`` gets, one each."""
        return [
            f"run.root={options.folder / 'runs'}",
            f"run.name={slug(arm)}",
            f"run.seed={seed}",
            f"model.path={self.model.path}",
            *UNBOUNDED,
            *self.settings,
            f"train.steps={self.steps}",
            *self.arms[arm],
            *([f"train.steps={options.steps}"] if options.steps else []),
        ]

    def require_curves(self, options: Options) -> None:
        """SystemExit if a run of some arm would end before its first evaluation."""
        for arm in self.arms:
            config = self.config(arm, options.seeds[0], options)
            if config.train.steps < config.evaluate.every:
                raise SystemExit(
                    f"--steps {config.train.steps} ends before the first evaluation, at step "
                    f"{config.evaluate.every}: give at least as many"
                )

    def run(self, arm: str, seed: int, options: Options) -> RunDir:
        """A finished run: as it stands on disk, or made now, after its model."""
        self.model.make()
        config = self.config(arm, seed, options)
        run_dir = RunDir(config.run_dir.absolute())
        if run_dir.finished and not differences(run_dir.config(), config):
            return run_dir
        if run_dir.config_file.exists():  # of other settings, or cut short: a clock cannot be resumed
            shutil.rmtree(run_dir.path)
        sets = [f"--set={text}" for text in self.overrides(arm, seed, options)]
        program = [sys.executable, "-m", "tba_hpc", "run", str(QUICKSTART), *sets, "--json"]
        run(*program)
        return run_dir


def run(*command: str) -> None:
    """Run a command in the repository, its output thrown away. SystemExit with a sentence if it fails."""
    log.print("$", *command, style="dim", soft_wrap=True)
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode} of: {' '.join(command)}\n{done.stdout[-2000:]}")


def slug(arm: str) -> str:
    """A name that may be part of a path: ``K = 8`` → ``k-8``."""
    words = "".join(letter if letter.isalnum() or letter == "." else " " for letter in arm.lower()).split()
    return "-".join(words)


def read_json(path: Path) -> dict[str, object] | None:
    """A JSON object, None if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else None
