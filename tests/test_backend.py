"""A model of one's own: a class that a config names, kept by the run and asked for every part."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from lab.tabular import Tabular, World

from tba_hpc.checks.resources import missing, resources
from tba_hpc.config import ConfigError, load_config
from tba_hpc.core.own_code import is_own, refusal
from tba_hpc.engine.hf_backend import HfBackend, make_backend
from tba_hpc.run import modules
from tba_hpc.run.directory import RunDir
from tba_hpc.tasks import load_task

TABULAR = Path(__file__).parents[1] / "tools" / "tabular.yaml"

OWN = """
import helper

class Model:
    def __init__(self, config):
        self.name = config.run.name + helper.SUFFIX
"""


def test_a_run_keeps_the_module_and_what_that_imports(tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "own_model.py").write_text(OWN)
    (beside / "helper.py").write_text("SUFFIX = '!'")
    settings = [f"run.root={tmp_path}", "model.path=own_model:Model"]
    config = load_config(TABULAR, settings)
    run = RunDir.create(config)
    modules.keep(run, config, beside)
    assert sorted(file.name for file in run.modules.iterdir()) == ["helper.py", "own_model.py"]
    assert make_backend(run, config).name == "tabular!"  # type: ignore[attr-defined]
    wrong = load_config(TABULAR, [*settings[:1], "model.path=own_model:Modle"])
    with pytest.raises(ConfigError, match=r"^model.path=own_model:Modle: no .*did you mean 'Model'"):
        make_backend(run, wrong)
    absent = load_config(TABULAR, [*settings[:1], "model.path=nowhere_to_be_found:Model"])
    with pytest.raises(ConfigError, match=r"^model.path=nowhere_to_be_found:Model cannot be imported"):
        make_backend(run, absent)


def test_paths_and_names_of_a_hub_are_hugging_faces(tmp_path: Path) -> None:
    run = RunDir.create(load_config(TABULAR, [f"run.root={tmp_path}"]))
    for name in ("org/model", "./a:b", "/models/a:b", ".cache/tiny-model-seed0"):
        assert not is_own(name)
        assert make_backend(run, load_config(TABULAR, [f"model.path={name}"])) == HfBackend(
            load_config(TABULAR, [f"model.path={name}"]), date.today()
        )


def test_nothing_of_it_is_looked_for_on_a_hub() -> None:
    config = load_config(TABULAR)
    assert not [one for one in resources(config, of_custom_task=False) if one.kind == "model"]
    assert missing(config, {"HF_HUB_OFFLINE": "1"}, of_custom_task=False) == []


def test_the_enumerable_one_gives_every_part(tmp_path: Path) -> None:
    config = load_config(TABULAR, ["model.path=lab.tabular:Tabular", f"run.root={tmp_path}"])
    backend = make_backend(RunDir.create(config), config)
    assert isinstance(backend, Tabular)
    learner = backend.learner(rank=0, ranks=1, store=tmp_path, folder_of=lambda step: tmp_path)
    generator, reference = backend.generator(seed=0), backend.reference(lambda step: tmp_path)
    assert generator.version == reference.step == 0 and learner.layout.nbytes == 4 * 4 * 7 * 3
    assert isinstance(load_task(config.task, backend.tokenizer()), World)
    learner.close()


def test_a_parameter_may_have_any_name() -> None:
    def loss(groups: object, *, function: str) -> None: ...

    assert refusal(loss, 1, function="huber") == ""
    assert refusal(loss, 1) == "missing a required argument: 'function'"
