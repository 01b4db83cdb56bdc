"""The directory of a run: the paths of its files, and the frozen config that resumes must respect."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from tba_hpc.config import (
    Config,
    ConfigError,
    differences,
    dump_config,
    load_config,
    may_change,
    value_text,
)
from tba_hpc.core.types import Role
from tba_hpc.core.wording import first_few
from tba_hpc.run.files import DiskFullError, listing, make_folder, read_regular, write_atomic

FORMAT = 4
"""Version of a run's format on disk: names of files, events, metrics and record fields."""

ATTEMPT = "TBA_ATTEMPT"
"""Environment variable: the name of a rank's attempt."""

SEARCHERS_FIRST = "TBA_SEARCHERS_FIRST"
"""Environment variable: "1" if MPI numbers searchers before trainers."""

OF_A_START = ("launch.", "run.root")
"""Prefixes of config keys that every start may set: keys of ranks and of the run's place."""

SEAL = "# Written by tba-hpc; keys are changed with --set. blake3="
"""Beginning of config.yaml, before a checksum of all that follows the first line."""

NAMED = 3
"""Largest number of keys that an error lists with their values."""

REFUSED = ".refused"
"""Suffix of the name of a shard that was set aside."""

ShardKey = tuple[int, int]
"""Searcher and index of a shard."""

IDENTITY_BITS = 62
"""Number of random bits of a run's identity, which HDF5 keeps as a signed 64-bit number."""

KEPT_ATTEMPTS = 16
"""Number of attempts before the newest whose logs are kept."""


class _Below:
    """Attribute of RunDir (a Python descriptor): the path of ``name`` in the run's directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, _: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of a run, which alone knows where things lie. It has mode 0700, and its files 0600."""

    path: Path

    format_file = _Below("format")
    """FORMAT of everything in the directory."""
    identity_file = _Below("identity")
    """Number that identifies the run; its shards and checkpoints contain it."""
    config_file = _Below("config.yaml")
    """The frozen config, which all ranks read."""
    history = _Below("history")
    """Configs that a resume has changed, and summaries of finished runs that it has extended."""
    modules = _Below("modules")
    """Copy of the user's code that the config names, if it names any."""
    inputs = _Below("inputs")
    """Digests of the run's prompts and of its model's files; see ``run.inputs``."""
    track = _Below("track")
    """Data that trackers keep of the run, and how far they have followed it."""
    shards = _Below("shards")
    """Sealed trajectories, a folder per searcher."""
    weights = _Below("weights")
    """Published weights, over files or for elastic searchers."""
    checkpoints = _Below("checkpoints")
    """One folder per checkpoint."""
    newest_checkpoint = _Below("newest-checkpoint")
    """Name of the checkpoint that was completed last."""
    references = _Below("references")
    """Policies that became the reference, as Hugging Face folders."""
    metrics = _Below("metrics")
    """One JSONL file of the leading trainer, and one of each searcher."""
    logs = _Below("logs")
    """One folder per attempt; ``latest`` points to the newest."""
    evaluations = _Below("evaluations")
    """One folder of parts per split and step, later joined to one file."""
    owners = _Below("owners")
    """Claims of the processes that work on the run, by rank; see ``run.owners``."""
    export = _Below("export")
    """The trained model as a Hugging Face folder."""
    events_file = _Below("events.jsonl")
    """Events of the run's ranks and jobs, over all its starts; see ``log_event``."""
    report = _Below("report.html")
    """The self-contained HTML page."""
    summary = _Below("summary.json")
    """The figures of a run that has finished or stopped."""
    finished_file = _Below("finished")
    """Mark of a finished run; at most the summary and the report are still missing."""
    kept = _Below("kept")
    """Shards that no resume needs, kept by ``exchange.keep_shards``, in a folder per searcher."""

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """Make ``config.run_dir``, or take it again if it holds a run of the same config (a resume).

        Sets the process's umask to 077. If the config differs in what a resume may change (``MayChange``),
        the old one goes to the ``history``. So does the summary of a finished run that is to take more steps.
        Raises ConfigError if the config differs in anything else, unless the run has produced nothing.
        Raises it also if the directory holds anything else or cannot be written.
        """
        run = cls.check(config)
        os.umask(0o077)
        with run.writing():
            make_folder(run.path)
            run.path.chmod(0o700)
            write_atomic(run.format_file, f"{FORMAT}\n")  # first: a directory with a config is complete
            run._freeze(config)
            run._identify()
            for folder in (
                *(run.shards, run.weights, run.checkpoints, run.references),
                *(run.metrics, run.logs, run.evaluations),
            ):
                make_folder(folder)
        return run

    @classmethod
    def check(cls, config: Config) -> RunDir:
        """Return the directory that ``create`` would use, or raise its ConfigError. Leaves no files."""
        run = cls(config.run_dir.absolute())
        with run.writing():
            if run.config_file.exists():
                run._refuse_another_format()
                run._refuse_another_config(config, but_nothing=True)
            elif run.path.exists():
                run._refuse_strangers()
            place = next(path for path in (run.path, *run.path.parents) if path.exists())
            # Root learns only from a trial whether it can write there.
            with tempfile.TemporaryDirectory(".tmp", dir=place) as trial:
                file = Path(trial, "file")
                file.touch()
                os.link(file, file.with_name("link"))  # needed to keep owners apart
                run._refuse_another_users(file.stat().st_uid)
        return run

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an OSError into a ConfigError about the run's place. DiskFullError is raised as it is."""
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
        """Open the directory that ``create`` made. Sets the process's umask to 077. Raises ConfigError."""
        run = cls(path.absolute())
        if not run.config_file.is_file():
            raise ConfigError(
                f"{path} is not a run directory: it has no config.yaml; start the run with 'tba run CONFIG'"
            )
        run._refuse_another_format()
        os.umask(0o077)
        return run

    @property
    def identity(self) -> int:
        """Number that only this run and its copies have; 0 if unknown, as for a run that 0.3.0 began."""
        try:
            return int(read_regular(self.identity_file), 16)
        except (FileNotFoundError, ValueError):
            return 0

    def _identify(self) -> None:
        """Write the run's identity, unless there is one, or the run has produced something without it."""
        if not self.identity and self.came_to_nothing:
            write_atomic(self.identity_file, f"{1 + secrets.randbits(IDENTITY_BITS):x}\n")

    @property
    def came_to_nothing(self) -> bool:
        """True if no start of the run has produced a shard, a trainer's record or a checkpoint."""
        made = (self.shards, self.checkpoints, self.references, self.evaluations)
        return not self.metrics_file("trainer").exists() and not any(
            path for folder in made for path in folder.glob("**/[!.]*") if path.is_file()
        )

    def _refuse_strangers(self) -> None:
        """Raise ConfigError if the directory contains anything but the remains of an interrupted creation."""
        ours = (self.format_file, self.owners)
        found = (path for path in self.path.iterdir() if path.suffix != ".tmp" and path not in ours)
        if strangers := sorted(path.name for path in found):
            raise ConfigError(
                f"{self.path} is not empty and holds no run (found {strangers[0]}): "
                "choose another run.name or run.root, or empty it"
            )

    def _refuse_another_users(self, us: int) -> None:
        """Raise ConfigError if the directory and new files in it belong to different users.

        This happens if root writes in another user's directory; that user could replace what root runs.
        """
        if self.path.exists() and (owner := self.path.stat().st_uid) != us:
            raise ConfigError(
                f"{self.path} belongs to another user (uid {owner}), who could change what runs there: "
                "choose another run.name or run.root, or resume it as that user"
            )

    def _refuse_another_format(self) -> None:
        found = (
            read_regular(self.format_file).decode(errors="replace").strip()
            if self.format_file.exists()
            else "1"
        )
        if found != str(FORMAT):
            raise ConfigError(
                f"{self.path} holds a run of format {found}, and this version of tba-hpc reads format "
                f"{FORMAT}: resume it with the version that wrote it, or choose another run.name"
            )

    def _refuse_another_config(self, config: Config, *, but_nothing: bool = False) -> None:
        """Raise ConfigError if ``config`` changes keys that a resume may not change.

        but_nothing: allow this if the run has produced nothing.
        """
        self._refuse_an_edited_config()
        try:
            old = self.config()
        except ConfigError as error:
            raise ConfigError(
                f"{self.path} holds a run that this version cannot resume ({error}): choose another run.name"
            ) from None
        fixed = {key: pair for key, pair in differences(old, config).items() if not may_change(key)}
        if fixed and not (but_nothing and self.came_to_nothing):
            now = [f"{key}={value_text(new)}" for key, (_, new) in fixed.items()]
            before = [f"{key}={value_text(was)}" for key, (was, _) in fixed.items()]
            raise ConfigError(
                f"{self.path} holds a run with another config, and a resume may not change it to "
                f"{first_few(now, NAMED)}: resume with {first_few(before, NAMED)}, or choose another "
                "run.name to start afresh"
            )

    def adapt(self, overrides: list[str]) -> None:
        """Change the frozen config by ``overrides``, by the rules of ``create``. Raises ConfigError."""
        self.config()
        config = load_config(self.config_file, overrides)
        self._refuse_another_config(config)
        self._freeze(config)

    def _freeze(self, config: Config) -> None:
        """Write the frozen config. An earlier one is first moved to the history."""
        if self.config_file.exists() and not self.came_to_nothing:
            self._keep(self.config(), config)
        text = dump_config(config)
        write_atomic(self.config_file, f"{SEAL}{_checksum(text)}\n{text}")

    def _keep(self, old: Config, new: Config) -> None:
        if all(key.startswith(OF_A_START) for key in differences(old, new)):
            return
        self.history.mkdir(exist_ok=True)
        number = 1 + len(list(self.history.glob("config-*.yaml")))
        write_atomic(self.history / f"config-{number:04d}.yaml", dump_config(old))
        # Before the config: a kill in between only means that the end of the run is written again.
        if self.finished and new.train.steps > old.train.steps:
            with suppress(FileNotFoundError):  # a kill may have come before it was written
                self.summary.rename(self.history / f"summary-{number:04d}.json")
            self.finished_file.unlink(missing_ok=True)

    def config(self) -> Config:
        """Return the frozen config. Raises ConfigError, also if it was edited or damaged."""
        self._refuse_an_edited_config()
        return load_config(self.config_file)

    def _refuse_an_edited_config(self) -> None:
        copy = self.logs / "latest" / self.config_file.name
        undo = f"undo that (cp {copy} {self.path}/)" if copy.is_file() else "undo that"
        try:
            text = read_regular(self.config_file).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.config_file} is damaged ({error}): {undo}") from None
        seal, _, rest = text.removeprefix(SEAL).partition("\n")
        if text.startswith(SEAL) and seal != _checksum(rest):
            raise ConfigError(
                f"{self.config_file} was edited or damaged: its checksum does not match; {undo}, and "
                "change keys with 'tba run RUN --set KEY=VALUE'"
            )

    def reference(self, step: int) -> Path:
        """Folder of the policy of ``step``, exported as the reference."""
        return self.references / f"step-{step:06d}"

    @property
    def finished(self) -> bool:
        """True if nothing is left to do."""
        return self.finished_file.exists()

    def mark_finished(self) -> None:
        """Mark the run as finished, until a resume raises its number of steps."""
        write_atomic(self.finished_file, "")

    def metrics_file(self, role: Role, rank: int = 0) -> Path:
        """Path of a rank's metrics: ``trainer.jsonl`` or ``searcher-0003.jsonl``."""
        return self.metrics / ("trainer.jsonl" if role == "trainer" else f"searcher-{rank:04d}.jsonl")

    def searcher_files(self) -> dict[int, Path]:
        """Return metrics files of the searchers that have one, by index."""
        indices = _numbers(self.metrics, "searcher-", ".jsonl", digits=4)
        return {index: self.metrics_file("searcher", index) for index in indices}

    def shard_folder(self, searcher: int) -> Path:
        """Folder where a searcher seals its shards."""
        return self.shards / _folder_of(searcher)

    def shard_file(self, searcher: int, index: int) -> Path:
        """Path of one shard."""
        return self.shard_folder(searcher) / f"{index:06d}.h5"

    def shard_files(self, suffix: str = ".h5") -> dict[ShardKey, Path]:
        """Return all visible shards by (searcher, index), ascending. Files of other names are left out."""
        return _shards_in(self.shards, suffix)

    def shard_folders(self) -> list[int]:
        """Return the indices of searchers that have a folder of shards, ascending."""
        return _numbers(self.shards, "searcher-", "", digits=4)

    def shard_indices(self, searcher: int, suffix: str = ".h5") -> list[int]:
        """Return indices of a searcher's visible shards, ascending; none if it has no folder."""
        return _numbers(self.shard_folder(searcher), "", suffix, digits=6)

    def kept_file(self, searcher: int, index: int) -> Path:
        """Path of a shard that is kept for inspection."""
        return self.kept / _folder_of(searcher) / f"{index:06d}.h5"

    def kept_files(self) -> dict[ShardKey, Path]:
        """Return all shards kept for inspection, by (searcher, index), ascending."""
        return _shards_in(self.kept, ".h5")

    def sealed_files(self) -> dict[ShardKey, Path]:
        """Return all shards on disk, pending, merged or kept, by (searcher, index), ascending.

        A file may move to ``kept`` before the caller reads it; call this again then.
        """
        waiting = self.shard_files()  # first, lest one that moves meanwhile is in neither
        return dict(sorted({**waiting, **self.kept_files()}.items()))

    def begin_attempt(self) -> Path:
        """Make a new folder ``logs/attempt-001`` …, to which ``logs/latest`` points from now on.

        It gets a copy of the config. Of earlier folders, the newest ``KEPT_ATTEMPTS`` stay.
        """
        taken = sorted(int(path.name.removeprefix("attempt-")) for path in self.logs.glob("attempt-*"))
        for old in taken[:-KEPT_ATTEMPTS]:
            shutil.rmtree(self.logs / f"attempt-{old:03d}", ignore_errors=True)
        folder = self.logs / f"attempt-{max(taken, default=0) + 1:03d}"
        folder.mkdir()
        shutil.copyfile(self.config_file, folder / self.config_file.name)
        link = self.logs / f".latest.{os.getpid()}.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self.logs / "latest")
        return folder

    @property
    def attempt(self) -> Path:
        """Folder of the logs of this process's attempt, or of the newest attempt if it is not a rank.

        Launchers tell their ranks the name, because an NFS client may see an old link for a minute.
        """
        return self.logs / os.environ.get(ATTEMPT, (self.logs / "latest").resolve().name)

    @property
    def attempt_number(self) -> int:
        """Number of ``attempt``; the first is 1."""
        return int(self.attempt.name.removeprefix("attempt-"))

    @property
    def newest_attempt(self) -> int:
        """Number of the newest attempt; 0 if there was none."""
        latest = self.logs / "latest"
        return int(latest.readlink().name.removeprefix("attempt-")) if latest.is_symlink() else 0


def of_two_runs(one: int, other: int) -> bool:
    """Return whether two identities are of different runs. An unknown one may belong to any run."""
    return bool(one and other) and one != other


def _checksum(text: str) -> str:
    return blake3(text.encode()).hexdigest(length=8)


def _folder_of(searcher: int) -> str:
    return f"searcher-{searcher:04d}"


def _shards_in(folder: Path, suffix: str) -> dict[ShardKey, Path]:
    """Return the shards in the searchers' folders below ``folder``, ascending."""
    return {
        (searcher, index): folder / _folder_of(searcher) / f"{index:06d}{suffix}"
        for searcher in _numbers(folder, "searcher-", "", digits=4)
        for index in _numbers(folder / _folder_of(searcher), "", suffix, digits=6)
    }


def _numbers(folder: Path, prefix: str, suffix: str, *, digits: int) -> list[int]:
    """Return the numbers in file names of the form ``{prefix}{number}{suffix}``, ascending.

    The list is empty if the folder does not exist.
    """
    try:
        names = listing(folder)
    except FileNotFoundError:
        return []
    stems = (
        name[len(prefix) : len(name) - len(suffix)]
        for name in names
        if name.startswith(prefix) and name.endswith(suffix)
    )
    return sorted(int(stem) for stem in stems if stem.isdecimal() and stem == f"{int(stem):0{digits}d}")
