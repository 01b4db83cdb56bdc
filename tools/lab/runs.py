"""Starts whole runs, ``tba run CONFIG --set …``, one after the other. A finished run is not repeated."""

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
"""Overrides that lift the quickstart's bound on the age of data."""

MODEL_SEED = 100

log = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Options:
    """Options of an experiment.

    folder: folder for results and runs. steps: optimizer steps of a run; None: the experiment's own number.
    """

    folder: Path
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int | None = None


@dataclass(frozen=True)
class Model:
    """The model from which all runs of a study start.

    stem: beginning of its folder's name. arguments: arguments of tools/make_tiny_model.py.
    """

    stem: str
    arguments: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Folder of the model, in the cache of the repository."""
        return REPOSITORY / f".cache/{self.stem}-seed{MODEL_SEED}"

    def make(self) -> None:
        """Make the model, unless it exists."""
        tool, seed = REPOSITORY / "tools/make_tiny_model.py", str(MODEL_SEED)
        run(sys.executable, str(tool), "--seed", seed, "--out", str(self.path), *self.arguments)


@dataclass(frozen=True)
class Study:
    """A comparison of arms, with one run per arm and seed.

    arms: overrides of each arm, by name. settings: overrides of all arms.
    """

    arms: Mapping[str, tuple[str, ...]]
    settings: tuple[str, ...]
    steps: int
    model: Model

    def config(self, arm: str, seed: int, options: Options) -> Config:
        """Return the config of one run. Raises ConfigError."""
        return load_config(QUICKSTART, self.overrides(arm, seed, options))

    def configs(self, options: Options) -> dict[str, Config]:
        """Return the config of each arm's first run."""
        return {arm: self.config(arm, options.seeds[0], options) for arm in self.arms}

    def overrides(self, arm: str, seed: int, options: Options) -> list[str]:
        """Return the overrides of one run, as ``--set`` takes them."""
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
        """Raise SystemExit if the runs of an arm would end before their first evaluation."""
        for arm in self.arms:
            config = self.config(arm, options.seeds[0], options)
            if config.train.steps < config.evaluate.every:
                raise SystemExit(
                    f"--steps {config.train.steps} ends before the first evaluation, at step "
                    f"{config.evaluate.every}: give at least as many"
                )

    def run(self, arm: str, seed: int, options: Options) -> RunDir:
        """Return a finished run: the one on disk, if it has the same settings, or a new one."""
        self.model.make()
        config = self.config(arm, seed, options)
        run_dir = RunDir(config.run_dir.absolute())
        if run_dir.finished and not differences(run_dir.config(), config):
            return run_dir
        if run_dir.config_file.exists():  # other settings, or interrupted: its time cannot be continued
            shutil.rmtree(run_dir.path)
        sets = [f"--set={text}" for text in self.overrides(arm, seed, options)]
        program = [sys.executable, "-m", "tba_hpc", "run", str(QUICKSTART), *sets, "--json"]
        run(*program)
        return run_dir


def run(*command: str) -> None:
    """Run a command in the repository, hiding its output. Raises SystemExit with the output if it fails."""
    log.print("$", *command, style="dim", soft_wrap=True)
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode} of: {' '.join(command)}\n{done.stdout[-2000:]}")


def slug(arm: str) -> str:
    """Turn the name of an arm into a part of a path: ``K = 8`` becomes ``k-8``."""
    words = "".join(letter if letter.isalnum() or letter == "." else " " for letter in arm.lower()).split()
    return "-".join(words)


def read_json(path: Path) -> dict[str, object] | None:
    """Read a JSON object; None if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else None
