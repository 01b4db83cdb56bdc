"""The directory of a run: the paths of its files, and the frozen config, which a resume has to respect."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
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
from tba_hpc.core.wording import count, first_few
from tba_hpc.run.files import (
    DiskFullError,
    listing,
    make_folder,
    open_regular,
    parse_json_lines,
    read_regular,
    write_atomic,
)
from tba_hpc.run.notes import rank_name

FORMAT = 4
"""Version of the format on disk: the names of files, events, metrics and the fields of trajectories."""

ATTEMPT = "TBA_ATTEMPT"
"""Environment variable that tells a rank the name of its attempt, such as attempt-001."""

SEARCHERS_FIRST = "TBA_SEARCHERS_FIRST"
"""Environment variable that is "1" if MPI numbers the searchers before the trainers."""

PER_START = {"launch.trainers", "launch.searchers", "run.root"}
"""Config keys that each start sets for itself: numbers of ranks, and where the run lies."""

INPUTS = ("model.path", "task.train_file", "task.test_file")
"""Config keys of input paths. They may change, because every start checks the contents (``run.inputs``)."""

CONFIG_HEADER = "# Written by tba-hpc; keys are changed with --set. blake3="
"""Beginning of the first line of config.yaml, which ends with a checksum of the lines after it."""

MOST_KEYS = 3
"""Largest number of changed keys that an error names."""

REFUSED = ".refused"
"""Suffix that is added to the name of a shard that was set aside because it cannot be used."""

ShardKey = tuple[int, int]
"""Searcher and index of a shard."""

IDENTITY_BITS = 62
"""Number of random bits of a run's identity, which must fit a signed 64-bit attribute of HDF5."""

KEPT_ATTEMPTS = 16
"""Number of earlier attempts whose logs are kept when a new attempt begins."""


class _Below:
    """Descriptor (in Python's sense) that gives the path of ``name`` in the directory of a RunDir."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, _: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    """Directory of a run, with the path of every file in it. Its mode is 0700, that of files 0600."""

    path: Path

    format_file = _Below("format")
    """Holds the number FORMAT, which describes everything in the directory."""
    identity_file = _Below("identity")
    """Holds the random number that identifies the run. Its shards and checkpoints hold the same number."""
    config_file = _Below("config.yaml")
    """The frozen config, which all ranks read."""
    history = _Below("history")
    """Configs as they were before a resume changed them, and summaries from before a resume added steps."""
    modules = _Below("modules")
    """Copy of the user's code that the config names, if it names any."""
    inputs = _Below("inputs")
    """Digests of the run's prompts and of its model's files; see ``run.inputs``."""
    track = _Below("track")
    """Files of the trackers (W&B, TensorBoard), and how far each has followed the metrics."""
    shards = _Below("shards")
    """Sealed shards, in a folder per searcher."""
    weights = _Below("weights")
    """Published weights, if the exchange works over files or elastic searchers may join."""
    checkpoints = _Below("checkpoints")
    """One folder per checkpoint."""
    newest_checkpoint = _Below("newest-checkpoint")
    """Holds the name of the checkpoint that was completed last."""
    references = _Below("references")
    """Policies that became the reference at a reset, as Hugging Face folders."""
    metrics = _Below("metrics")
    """One JSONL file of metrics for the leading trainer and for each searcher."""
    logs = _Below("logs")
    """Logs of the ranks, in a folder per attempt; the link ``latest`` leads to the newest."""
    evaluations = _Below("evaluations")
    """One folder per split and step with the searchers' parts, which later become one file."""
    owners = _Below("owners")
    """Claims of the launcher and the ranks that work on the run; see ``run.owners``."""
    replay_note = _Below("replay.json")
    """Only in a replay: which run it replays and how, and the command that goes on with it."""
    export = _Below("export")
    """The trained model as a Hugging Face folder."""
    export_step = _Below("export-step")
    """File with the number of optimizer steps of the exported model."""
    events_file = _Below("events.jsonl")
    """Events of the run's ranks and jobs, over all its starts; see ``events.log_event``."""
    report = _Below("report.html")
    """The report, a self-contained HTML page."""
    summary = _Below("summary.json")
    """The final figures of a run that has finished or stopped."""
    finished_file = _Below("finished")
    """Exists once the run is finished. Only the summary and the report may still be missing then."""
    kept = _Below("kept")
    """Shards that no resume needs but ``exchange.keep_shards`` keeps, in a folder per searcher."""

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """Make ``config.run_dir``, or resume the run in it. Sets the process's umask to 077.

        A resume may change keys marked ``MayChange``, and INPUTS that were moved. The old config is then
        copied to ``history``. If a finished run gets more steps, its summary is moved there, too.

        Raises ConfigError if the config differs in any other key, unless the run has produced nothing; if the
        directory holds something other than a run; or if it cannot be written.
        """
        run = cls.check(config)
        os.umask(0o077)
        with run.writing():
            make_folder(run.path)
            run.path.chmod(0o700 | run.path.stat().st_mode & stat.S_ISGID)  # setgid: quotas may go by group
            write_atomic(run.format_file, f"{FORMAT}\n")  # before the config, which makes it a run directory
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
        """Return the directory that ``create`` would make or resume, or raise the ConfigError of ``create``.

        Leaves no files behind.
        """
        run = cls(config.run_dir.absolute())
        with run.writing():
            if run.config_file.exists():
                run._refuse_another_format()
                run._refuse_another_config(config, unless_empty=True)
            elif run.path.exists():
                run._refuse_other_files()
            place = next(path for path in (run.path, *run.path.parents) if path.exists())
            # Only an attempt tells root whether it can write, since permissions do not bind it.
            with tempfile.TemporaryDirectory(".tmp", dir=place) as trial:
                file = Path(trial, "file")
                file.touch()
                os.link(file, file.with_name("link"))  # ``run.owners`` needs hard links
                run._refuse_another_owner(file.stat().st_uid)
        return run

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an OSError in the block, except DiskFullError, into a ConfigError about the run directory."""
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
        """Open the directory of an existing run. Sets the process's umask to 077.

        Raises ConfigError if ``path`` is not a run directory or has another FORMAT.
        """
        run = cls(path.absolute())
        if not run.config_file.is_file():
            if inside := cls.inside(path):
                remedy = f"it holds {count(len(inside), 'run')}; name one, such as {inside[-1]}"
            else:
                remedy = (
                    "it has no config.yaml; start the run with 'tba run CONFIG', or on Slurm with "
                    "'tba submit --config CONFIG --nodes N'"
                )
            raise ConfigError(f"{path} is not a run directory: {remedy}")
        run._refuse_another_format()
        os.umask(0o077)
        return run

    @staticmethod
    def inside(folder: Path) -> list[Path]:
        """Return the run directories in a folder, by name."""
        return sorted(file.parent for file in folder.glob("*/format"))

    @property
    def identity(self) -> int:
        """Random number that only this run and its copies have; 0 if version 0.3.0 began the run."""
        try:
            return int(read_regular(self.identity_file), 16)
        except (FileNotFoundError, ValueError):
            return 0

    def _identify(self) -> None:
        """Give the run an identity if it has none and has produced nothing yet."""
        if not self.identity and self.came_to_nothing:
            write_atomic(self.identity_file, f"{1 + secrets.randbits(IDENTITY_BITS):x}\n")

    @property
    def came_to_nothing(self) -> bool:
        """True if no start has taken a step, or produced a shard, checkpoint, reference or evaluation.

        Weights published as files count, too: if the model changed, a searcher would load the old weights.
        """
        made = (self.shards, self.weights, self.checkpoints, self.references, self.evaluations)
        return not self.has_learned and not any(
            path for folder in made for path in folder.glob("**/[!.]*") if path.is_file()
        )

    @property
    def has_learned(self) -> bool:
        """True if the trainer's metrics hold an optimizer step."""
        file = self.metrics_file("trainer")
        if not file.exists():
            return False
        with open_regular(file) as lines:  # one by one, since the file may be large
            records = (record for line in lines for record in parse_json_lines(line))
            return any("step" in record and "event" not in record for record in records)

    def _refuse_other_files(self) -> None:
        """Raise ConfigError if the directory holds more than what an interrupted creation may leave."""
        ours = (self.format_file, self.owners)
        found = (path for path in self.path.iterdir() if path.suffix != ".tmp" and path not in ours)
        if others := sorted(path.name for path in found):
            raise ConfigError(
                f"{self.path} is not empty and holds no run (found {others[0]}): "
                "choose another run.name or run.root, or empty it"
            )

    def _refuse_another_owner(self, us: int) -> None:
        """Raise ConfigError if the directory does not belong to user id ``us``, the owner of new files in it.

        They differ if root writes in another user's directory; that user could then replace what root runs.
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

    def _refuse_another_config(self, config: Config, *, unless_empty: bool = False) -> None:
        """Raise ConfigError if ``config`` changes keys that a resume may not change, other than moved INPUTS.

        unless_empty: whether every change is allowed while the run has produced nothing.
        """
        self._refuse_an_edited_config()
        try:
            old = self.config()
        except ConfigError as error:
            raise ConfigError(
                f"{self.path} holds a run that this version cannot resume ({error}): choose another run.name"
            ) from None
        changed = differences(old, config).items()
        fixed = {key: pair for key, pair in changed if not (may_change(key) or _is_moved(key, *pair))}
        if fixed and not (unless_empty and self.came_to_nothing):
            now = [f"{key}={value_text(new)}" for key, (_, new) in fixed.items()]
            before = [f"{key}={value_text(was)}" for key, (was, _) in fixed.items()]
            remedy = (
                f"resume with {first_few(before, MOST_KEYS)}, or choose another run.name to start afresh"
                if self.has_learned
                else "it has taken no optimizer step, so unless it is running or queued, remove the folder "
                f"{self.path} (nothing was learned), or choose another run.name"
            )
            raise ConfigError(
                f"{self.path} holds a run with another config, and a resume may not change it to "
                f"{first_few(now, MOST_KEYS)}: {remedy}"
            )

    def adapt(self, overrides: list[str]) -> None:
        """Change the frozen config by ``overrides``, such as "train.steps=80".

        Raises ConfigError if a resume may not change a key.
        """
        self.config()
        config = load_config(self.config_file, overrides)
        self._refuse_another_config(config)
        self._freeze(config)

    def _freeze(self, config: Config) -> None:
        """Write the frozen config. If the run has produced something, first ``_keep`` the previous one."""
        if self.config_file.exists() and not self.came_to_nothing:
            self._keep(self.config(), config)
        text = dump_config(config)
        write_atomic(self.config_file, f"{CONFIG_HEADER}{_checksum(text)}\n{text}")

    def _keep(self, old: Config, new: Config) -> None:
        """Copy the old config to the history, unless only PER_START keys change; reopen a finished run."""
        if differences(old, new).keys() <= PER_START:
            return
        self.history.mkdir(exist_ok=True)
        number = 1 + len(list(self.history.glob("config-*.yaml")))
        write_atomic(self.history / f"config-{number:04d}.yaml", dump_config(old))
        # The new config is written after this. If this process is killed in between, the old number of steps
        # holds, and a resume only finishes the run again.
        if self.finished and new.train.steps > old.train.steps:
            with suppress(FileNotFoundError):  # the run may have been killed before it wrote its summary
                self.summary.rename(self.history / f"summary-{number:04d}.json")
            self.finished_file.unlink(missing_ok=True)

    def config(self) -> Config:
        """Return the frozen config. Raises ConfigError if it is invalid, damaged, or edited by hand."""
        self._refuse_an_edited_config()
        return load_config(self.config_file)

    def _refuse_an_edited_config(self) -> None:
        copy = self.logs / "latest" / self.config_file.name
        undo = f"undo that (cp {copy} {self.path}/)" if copy.is_file() else "undo that"
        try:
            text = read_regular(self.config_file).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.config_file} is damaged ({error}): {undo}") from None
        seal, _, rest = text.removeprefix(CONFIG_HEADER).partition("\n")
        if text.startswith(CONFIG_HEADER) and seal != _checksum(rest):
            raise ConfigError(
                f"{self.config_file} was edited or damaged: its checksum does not match; {undo}, and "
                "change keys with 'tba run RUN --set KEY=VALUE'"
            )

    def reference(self, step: int) -> Path:
        """Folder of the reference that is the policy after ``step`` optimizer steps."""
        return self.references / f"step-{step:06d}"

    @property
    def finished(self) -> bool:
        """True if the run has taken all its steps, exported its model and made its last evaluation."""
        return self.finished_file.exists()

    @property
    def exported_step(self) -> int | None:
        """Number of optimizer steps of the exported model; None if no note of it is there."""
        return int(self.export_step.read_text()) if self.export_step.exists() else None

    def mark_finished(self) -> None:
        """Mark the run as finished, until a resume raises its number of steps."""
        write_atomic(self.finished_file, "")

    def metrics_file(self, role: Role, rank: int = 0) -> Path:
        """Path of a rank's metrics, such as ``trainer.jsonl`` or ``searcher-0003.jsonl``."""
        return self.metrics / ("trainer.jsonl" if role == "trainer" else f"{rank_name(role, rank)}.jsonl")

    def searcher_files(self) -> dict[int, Path]:
        """Return the metrics file of each searcher that has one, by the searcher's index."""
        indices = _numbers(self.metrics, "searcher-", ".jsonl", digits=4)
        return {index: self.metrics_file("searcher", index) for index in indices}

    def shard_folder(self, searcher: int) -> Path:
        """Folder where a searcher seals its shards."""
        return self.shards / rank_name("searcher", searcher)

    def shard_file(self, searcher: int, index: int) -> Path:
        """Path of a searcher's shard with this index."""
        return self.shard_folder(searcher) / f"{index:06d}.h5"

    def shard_files(self, suffix: str = ".h5") -> dict[ShardKey, Path]:
        """Return the files of sealed shards by (searcher, index), ascending; temporary files are left out.

        suffix: end of the file names; ".h5" + REFUSED finds the shards that were set aside.
        """
        return _shards_in(self.shards, suffix)

    def shard_folders(self) -> list[int]:
        """Return the indices of the searchers that have a folder of shards, ascending."""
        return _numbers(self.shards, "searcher-", "", digits=4)

    def shard_indices(self, searcher: int, suffix: str = ".h5") -> list[int]:
        """Return the indices of a searcher's sealed shards, ascending; see ``shard_files``."""
        return _numbers(self.shard_folder(searcher), "", suffix, digits=6)

    def kept_file(self, searcher: int, index: int) -> Path:
        """Path of a shard that is kept although no resume needs it."""
        return self.kept / rank_name("searcher", searcher) / f"{index:06d}.h5"

    def kept_files(self) -> dict[ShardKey, Path]:
        """Return the files of all kept shards by (searcher, index), ascending."""
        return _shards_in(self.kept, ".h5")

    def sealed_files(self) -> dict[ShardKey, Path]:
        """Return the files of all shards on disk, in ``shards`` or ``kept``, by (searcher, index), ascending.

        A file may move to ``kept`` before the caller opens it. The caller must then list the files again.
        """
        waiting = self.shard_files()  # first: a shard that moves meanwhile is then in both, not in neither
        return dict(sorted({**waiting, **self.kept_files()}.items()))

    def begin_attempt(self) -> Path:
        """Make the folder of a new attempt, such as ``logs/attempt-003``, and return it.

        The folder gets a copy of the config, and ``logs/latest`` leads to it. Earlier folders are deleted,
        except for the newest ``KEPT_ATTEMPTS``.
        """
        taken = _numbers(self.logs, "attempt-", "", digits=3)
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
        """Folder of the logs of a rank's own attempt; in other processes, of the newest attempt.

        A rank gets the name from its launcher (ATTEMPT), because an NFS client may see the old link
        ``latest`` for a minute.
        """
        return self.logs / os.environ.get(ATTEMPT, (self.logs / "latest").resolve().name)

    @property
    def tracker_failed(self) -> Path:
        """Path of a file that exists if the attempt's tracker has failed, and none has sent figures since."""
        return self.attempt / "tracker.failed"

    @property
    def attempt_number(self) -> int:
        """Number of the attempt whose folder is ``attempt``, counted from 1."""
        return int(self.attempt.name.removeprefix("attempt-"))

    @property
    def newest_attempt(self) -> int:
        """Number of the newest attempt; 0 if there was none."""
        latest = self.logs / "latest"
        return int(latest.readlink().name.removeprefix("attempt-")) if latest.is_symlink() else 0


def of_two_runs(one: int, other: int) -> bool:
    """Return whether two identities belong to different runs; False if one is unknown (0)."""
    return bool(one and other) and one != other


def _is_moved(key: str, was: object, now: object) -> bool:
    """Return whether ``key`` is one of INPUTS, its old path no longer exists, and its new path does."""
    paths = key in INPUTS and isinstance(was, str) and isinstance(now, str)
    return paths and not Path(str(was)).exists() and Path(str(now)).exists()


def _checksum(text: str) -> str:
    return blake3(text.encode()).hexdigest(length=8)


def _shards_in(folder: Path, suffix: str) -> dict[ShardKey, Path]:
    """Return the shards in the searchers' folders below ``folder``, ascending; see ``RunDir.shard_files``."""
    return {
        (searcher, index): folder / rank_name("searcher", searcher) / f"{index:06d}{suffix}"
        for searcher in _numbers(folder, "searcher-", "", digits=4)
        for index in _numbers(folder / rank_name("searcher", searcher), "", suffix, digits=6)
    }


def _numbers(folder: Path, prefix: str, suffix: str, *, digits: int) -> list[int]:
    """Return the numbers in file names of the form ``{prefix}{number}{suffix}``, ascending.

    Numbers are padded with zeros to ``digits`` digits. The list is empty if the folder does not exist.
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
