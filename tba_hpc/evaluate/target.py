"""Finds what ``tba evaluate`` evaluates and ``tba ask`` asks: the model, the task and the reference.

Loads no model. If a model is evaluated without a config, the model's config.json is read for its dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from tba_hpc.checks.config_checks import check_files
from tba_hpc.checks.facts import Facts, refuse
from tba_hpc.config import Config, ConfigError, RunSection, is_local, load_config, parse_config
from tba_hpc.report.tables import Terminal
from tba_hpc.run import modules
from tba_hpc.run.changes import export_notice
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import run_command


@dataclass(frozen=True, slots=True)
class Target:
    """Subject of an evaluation.

    config: config that names the model and the task. reference: path of the reference; None for none.
    """

    config: Config
    reference: str | None


def find_target(
    name: str, *, config: Path | None, task: str | None, overrides: list[str], reference: str | None
) -> Target:
    """Find what the command line names: a run, or a model with ``config`` or ``task``.

    name: a run's directory, a model's folder, or a model's name on a hub. config: config file for a model.
    task: name of a task, for a model without a config. overrides: texts such as ``model.dtype=float32``.
    reference: path of the reference; None: the initial model of the run or config. For a model without a
    config, None means no reference, and the dtype is the model's own unless ``overrides`` set one.

    Raises ConfigError as ``find_subject`` does, or if the reference or a file of the config does not exist.
    """
    settings, initial = find_subject(name, config=config, task=task, overrides=overrides)
    refuse([check_files], Facts(config=settings))
    reference = reference or initial
    if reference and is_local(reference) and not Path(reference).is_dir():
        raise ConfigError(
            f"{reference}, the reference of the perplexity, is not a folder: name another with --reference"
        )
    return Target(settings if initial else _in_its_own_dtype(settings), reference)


def find_subject(
    name: str, *, config: Path | None, task: str | None = None, overrides: list[str]
) -> tuple[Config, str | None]:
    """Return a config with the model and the task that the command line names, and the initial model's path.

    Takes the arguments of ``find_target``. The path is None for a model without a config. Neither the initial
    model nor data files need exist, so that a trained model can be asked on another machine.

    Raises ConfigError if there is no such run or model, if the run has no model yet, or if nothing names the
    task.
    """
    modules.use_here()
    refuse_missing(name)
    if (Path(name) / "config.yaml").is_file():
        settings, model = _run(name, overrides, named=config or task), str(RunDir(Path(name)).export)
    elif config:
        settings, model = load_config(config, overrides), name
        modules.use(modules.folder_of(config))
    elif task:
        return parse_config({"model": {"path": name}, "task": {"name": task}}, overrides), None
    else:
        raise ConfigError(
            f"{name} is not a run directory: check the path, or say on which task this model is to be "
            "evaluated, with --config FILE or --task NAME"
        )
    return _of_model(settings, model), settings.model.path


def refuse_missing(name: str) -> None:
    """Raise ConfigError if ``name`` does not exist on disk and cannot be a model on a hub.

    Paths are not names on a hub, nor are names that begin with ``runs/`` or with an existing folder.
    """
    path, first = Path(name), name.partition("/")[0]
    below_a_folder = "/" in name and (first == RunSection().root or Path(first).is_dir())
    if (is_local(name) or below_a_folder) and not path.exists():
        raise ConfigError(f"{name} does not exist, as a run or a model's folder: check the path")


def _run(name: str, overrides: list[str], *, named: Path | str | None) -> Config:
    run = RunDir(Path(name))
    if named:
        raise ConfigError(f"{name} is a run, which has a config of its own: leave out {named}")
    if not (run.export / "config.json").is_file():
        remedy = f"go on with {run_command(run)}, unless it is at work"
        found = f"{name} has no model yet; {run.export} is written when the run is finished"
        raise ConfigError(f"{found}: {remedy}")
    modules.use(run.modules)
    if older := export_notice(run):
        Terminal(stderr=True).print(Text(older))
    return load_config(run.config_file, overrides)


def _of_model(settings: Config, path: str) -> Config:
    """Return the config with another model's path."""
    section = settings.model.model_copy(update={"path": path})
    return settings.model_copy(update={"model": section})


def _in_its_own_dtype(settings: Config) -> Config:
    """Set the config's dtype to the one in the model's config.json, unless an override has set a dtype."""
    section = settings.model
    if "dtype" in section.model_fields_set:
        return settings
    from tba_hpc.learner.hf_model import stored_dtype

    section = section.model_copy(update={"dtype": stored_dtype(section.path)})
    return settings.model_copy(update={"model": section})
