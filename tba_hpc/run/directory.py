"""The directory of a run: where everything lies, and whose config it holds.

It must not know what is in the files, nor when they are written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tba_hpc.config import Config, ConfigError, differing_keys, dump_config, load_config
from tba_hpc.run.files import DiskFullError, write_atomic
from tba_hpc.types import Role

FORMAT = 2
"""Version of what a run keeps on disk: names of files, events, metrics and record fields."""

KEPT_ATTEMPTS = 16
"""Attempts before the newest whose logs are kept: a file a rank each, of however many starts."""

MAY_DIFFER = ("launch.", "run.root")
"""Config keys that a resume may change: it can have another number of ranks and another place."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of a run; alone knows where things lie. Private: 0700, and 0600 for the files below."""

    path: Path

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """Make ``config.run_dir``, or take it again where it holds a run of the same config (a resume).

        Sets the process's umask to 077. Raises ConfigError where the directory holds a run whose config
        differs in more than ``MAY_DIFFER``, unless it came to nothing, holds anything else, or cannot be
        written.
        """
        run = cls.check(config)
        os.umask(0o077)
        with run.writing():
            run._make(config)
        return run

    @classmethod
    def check(cls, config: Config) -> RunDir:
        """The directory that ``create`` would take; raises ConfigError as that would, and writes nothing."""
        run = cls(config.run_dir.absolute())
        with run.writing():
            if run.config_file.exists():
                run._refuse_another_format()
                run._refuse_another_config(config, but_nothing=True)
            elif run.path.exists():
                run._refuse_strangers()
            run._refuse_unwritable()
        return run

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Tell an error of the file system as one of the place. Raises ConfigError, DiskFullError."""
        try:
            yield
        except DiskFullError:
            raise
        except OSError as error:
            raise ConfigError(
                f"cannot write to the run directory {self.path}: {error.strerror}; "
                "choose another place with --set run.root=…"
            ) from None

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """The run directory that ``create`` made. Sets the process's umask to 077. Raises ConfigError."""
        run = cls(path.absolute())
        if not run.config_file.is_file():
            raise ConfigError(
                f"{path} is not a run directory: it has no config.yaml; start the run with 'tba run CONFIG'"
            )
        run._refuse_another_format()
        os.umask(0o077)
        return run

    @property
    def came_to_nothing(self) -> bool:
        """Whether no start of the run has left more than logs: no shard, trainer's record or checkpoint."""
        made = (self.shards, self.checkpoints, self.references, self.evaluations)
        return not self.metrics_file("trainer").exists() and not any(
            path for folder in made for path in folder.glob("**/[!.]*") if path.is_file()
        )

    def _make(self, config: Config) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)
        write_atomic(self.format_file, f"{FORMAT}\n")  # first: a directory with a config is a whole one
        write_atomic(self.config_file, dump_config(config))
        for folder in self._folders:
            folder.mkdir(exist_ok=True)

    def _refuse_unwritable(self) -> None:
        """Raise OSError where nothing can be written where the directory is, or is to be."""
        place = next(path for path in (self.path, *self.path.parents) if path.exists())
        tempfile.TemporaryFile(dir=place).close()  # rights alone do not tell it to root, nor on /proc

    def _refuse_strangers(self) -> None:
        strangers = sorted(p.name for p in self.path.iterdir() if not self._is_left_by_a_kill(p))
        if strangers:
            raise ConfigError(
                f"{self.path} is not empty and holds no run (found {strangers[0]}): "
                "choose another run.name or run.root, or empty it"
            )

    def _is_left_by_a_kill(self, path: Path) -> bool:
        """Whether a creation that was cut short may have made it."""
        return path.suffix == ".tmp" or path in (self.format_file, self.owners)

    def _refuse_another_format(self) -> None:
        found = self.format_file.read_text().strip() if self.format_file.exists() else "1"
        if found != str(FORMAT):
            raise ConfigError(
                f"{self.path} holds a run of format {found}, and this version of tba-hpc reads format "
                f"{FORMAT}: go on with the version that wrote it, or choose another run.name"
            )

    def _refuse_another_config(self, config: Config, *, but_nothing: bool = False) -> None:
        """but_nothing: leave a run alone that came to nothing."""
        try:
            old = self.config()
        except ConfigError as error:
            raise ConfigError(
                f"{self.path} holds a run that this version cannot resume ({error}): choose another run.name"
            ) from None
        keys = [key for key in differing_keys(old, config) if not key.startswith(MAY_DIFFER)]
        if keys and not (but_nothing and self.came_to_nothing):
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
    def format_file(self) -> Path:
        """The FORMAT of everything below."""
        return self.path / "format"

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
    def owners(self) -> Path:
        """Who is at work on the run, and as which rank; see ``run.owners``."""
        return self.path / "owners"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.path / "export"

    @property
    def events_file(self) -> Path:
        """What happened to the run's ranks and jobs, over all its starts; see ``log_event``."""
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
    def finished_file(self) -> Path:
        """What the leading trainer leaves once nothing is left to do but the summary and the report."""
        return self.path / "finished"

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do; runs of earlier versions say so in their summary alone."""
        return self.finished_file.exists() or (
            self.summary.exists() and bool(json.loads(self.summary.read_text())["finished"])
        )

    def mark_finished(self) -> None:
        """Make ``finished`` true, for good."""
        write_atomic(self.finished_file, "")

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
        """A new folder ``logs/attempt-001`` …, which ``logs/latest`` names from now on.

        Of those before, the newest ``KEPT_ATTEMPTS`` stay.
        """
        taken = sorted(int(path.name.removeprefix("attempt-")) for path in self.logs.glob("attempt-*"))
        for old in taken[:-KEPT_ATTEMPTS]:
            shutil.rmtree(self.logs / f"attempt-{old:03d}", ignore_errors=True)
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
