"""A run's recorded shards, trained on again: bit by bit the same by the same config, and by others."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab.tabular_learner import TabularLearner
from test_loops import (
    TABLE,
    ReplayExchange,
    TrainerParts,
    _losses,
    _losses_reach,
    _sealed,
    make_config,
    make_searcher,
)
from typed import tba

from tba_hpc.cli import replay_run
from tba_hpc.commands.replay import read_recorded, replay, replay_config, train_on
from tba_hpc.config import Config, ConfigError, parse_config
from tba_hpc.core.types import Shard
from tba_hpc.exchange.file_exchange import FileSearcherExchange, FileTrainerExchange
from tba_hpc.exchange.hdf5_shards import ShardError, read_sealed
from tba_hpc.exchange.replay_exchange import Recording
from tba_hpc.report.run_state import RunMonitor, RunState, run_state
from tba_hpc.run.directory import RunDir
from tba_hpc.run.history import History
from tba_hpc.run.signals import StopFlag


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A replay ignores signals in the end; this process goes on, and others come from it."""
    before = {number: signal.getsignal(number) for number in StopFlag.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def keep(run: RunDir) -> None:
    """What is there now, as exchange.keep_shards keeps it, while the run goes on with it."""
    for key, path in run.shard_files().items():
        kept = run.kept_file(*key)
        if not kept.exists():  # those that are may be deleted meanwhile
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, kept)


class Keeping(FileTrainerExchange):
    """Keeps what it collects."""

    run: RunDir

    def collect(self) -> list[Shard]:
        """As ever."""
        if shards := super().collect():
            keep(self.run)
        return shards


def record(root: Path, **sections: dict[str, object]) -> tuple[RunDir, TabularLearner]:
    """A run with a searcher beside the trainer, as fast as both are."""
    config = make_config(root, **sections)
    run = RunDir.create(config)
    parts = TrainerParts(config, run, learner=TabularLearner(TABLE, config.train))
    searcher = FileSearcherExchange(run.weights, 0, attempt="first", deadline=240)
    thread = threading.Thread(target=make_searcher(config, run, searcher).run)
    thread.start()
    Keeping.run = run
    exchange = parts.file_exchange(Keeping)
    assert parts.build(exchange).run()
    exchange.close()
    thread.join(240)
    return run, parts.learner


def in_lockstep(root: Path, **sections: dict[str, object]) -> RunDir:
    """A run of which each publish, every other step, has brought a shard."""
    config = make_config(root, **sections)
    run = RunDir.create(config)
    shards = _sealed(config, run, 8)
    keep(run)
    assert TrainerParts(config, run).build(ReplayExchange(shards, 0)).run()
    return run


def again(
    source: RunDir,
    *overrides: str,
    change: Callable[[Recording], Recording] = lambda recording: recording,
    partial: bool = False,
) -> tuple[RunDir, TabularLearner, bool]:
    """A replay on the tabular learner."""
    recorded = source.config()
    config = replay_config(source, recorded, Recording.of(source).steps, overrides)
    recording, read = read_recorded(source, recorded, config, partial=partial)
    run = RunDir.create(config)
    run.begin_attempt()
    learner = TabularLearner(TABLE, config.train)
    return run, learner, train_on(run, config, change(recording), read, learner)


def steps_of(run: RunDir) -> list[dict[str, Any]]:
    return History.read(run).steps  # type: ignore[return-value]


def first(run: RunDir, name: str) -> float:
    return float(steps_of(run)[0][name])


SYNCHRONOUS: dict[str, dict[str, object]] = {"exchange": {"max_staleness": 0, "sync_every": 1}}


CENTRED: dict[str, dict[str, object]] = {"train": {"score_centering": 2}}


@pytest.mark.parametrize(
    "sections", [{}, SYNCHRONOUS, CENTRED], ids=["asynchronous", "synchronous", "centred"]
)
def test_by_the_same_config_every_loss_is_the_same_bit_by_bit(
    sections: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    """Whenever shards came: between publishes, during waits; the policy at the end is the same, too."""
    falling: dict[str, object] = {"learning_rate": {"schedule": "linear", "peak": 0.05}}
    train = {**falling, **sections.get("train", {})}
    source, learner = record(tmp_path, **{**sections, "train": train})
    run, replayed, finished = again(source)
    assert finished and run.finished and run.path != source.path
    assert _losses(run) == _losses(source) and len(_losses(run)) == 12
    part, _, _ = again(source, "train.steps=5", "run.name=part")
    assert _losses(part) == _losses(source)[:5]
    np.testing.assert_array_equal(replayed.policy_logits, learner.policy_logits)


def test_a_run_that_was_resumed_is_replayed_as_what_survived(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = RunDir.create(config)
    parts = TrainerParts(config, run)
    shards, reached = _sealed(config, run, 10), [False]
    keep(run)
    stopped = parts.build(ReplayExchange(shards, 0), stop_asked=lambda: _losses_reach(run, 6, reached))
    assert not stopped.run()
    second = TrainerParts(config, run)
    assert second.build(ReplayExchange(shards, 3)).run()
    made, learner, _ = again(run)
    assert _losses(made) == _losses(run)
    np.testing.assert_array_equal(learner.policy_logits, second.learner.policy_logits)


def test_what_is_moved_while_it_is_replayed_is_found_again(tmp_path: Path) -> None:
    """A run at work keeps what it deletes; of what it does not keep nothing is left."""
    config = make_config(tmp_path)
    run = RunDir.create(config)
    first, second = ((shard.searcher, shard.index) for shard in _sealed(config, run, 2))
    whole = read_sealed(run, first)
    keep(run)
    for file in run.shard_files().values():
        file.unlink()
    np.testing.assert_array_equal(read_sealed(run, first).trajectories.logprobs, whole.trajectories.logprobs)
    for path in run.kept_files().values():
        path.unlink()
    with pytest.raises(ShardError, match=r"000001.h5 was deleted by its run after this command had begun"):
        read_sealed(run, second)


def test_a_replay_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """At a step where weights were published: elsewhere a resume publishes once more than was recorded."""
    source = in_lockstep(tmp_path)
    _, _, finished = again(source, "train.steps=6")
    assert finished
    run, learner, finished = again(source, "train.steps=12")
    whole, other, _ = again(source, "run.name=whole")
    assert finished and _losses(run) == _losses(whole)
    np.testing.assert_array_equal(learner.policy_logits, other.policy_logits)


def test_another_objective_learns_from_the_same_first_batch(tmp_path: Path) -> None:
    """OAPL's reference is what sampled: at the first step that is the policy itself, so its KL is 0."""
    source, _ = record(tmp_path)
    for objective in ("oapl", "grpo", "tba_prime"):
        run, _, finished = again(source, f"train.objective={objective}", f"run.name={objective}")
        assert finished and first(run, "train/reward") == first(source, "train/reward")
        assert first(run, "train/loss") != first(source, "train/loss")
    assert RunDir(tmp_path / "oapl-seed0").config().train.reference.name == "behaviour"
    assert first(RunDir(tmp_path / "oapl-seed0"), "train/log_ratio") == pytest.approx(0, abs=1e-6)


OWN_MODEL = """
from lab.tabular import Tabular
from lab.tabular_learner import TabularLearner

class Model(Tabular):
    def learner(self, **_):
        return TabularLearner(self._table, self._config.train)
"""
"""A model whose learner needs no group of processes."""

OWN_CODE = {
    "recorded/own_model.py": OWN_MODEL,
    "recorded/own_rewards.py": "import own_helper\ndef right(completion): return 1.0",
    "recorded/own_helper.py": "",
    "recorded/own_loss.py": "def loss(groups, beta): return -1 * groups.logprob_BK",
    "here/own_rewards.py": "def right(completion): return 2.0",
    "here/own_loss.py": "from own_part import times\ndef loss(group, beta): return times * group.logprob_BK",
    "here/own_part.py": "times = -9",
}


def test_a_replay_keeps_the_recorded_rewards_and_the_loss_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = in_lockstep(tmp_path / "runs", task={"reward": "own_rewards:right"})
    for name, text in OWN_CODE.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    settings = ["model.path=own_model:Model", "train.objective=own_loss:loss"]
    with pytest.raises(ConfigError, match=r"^model.path=own_model:Model cannot be imported"):
        replay(source.path, [*settings, "run.name=own"], delay=1)
    shutil.copytree(tmp_path / "recorded", source.modules)

    def replayed(name: str, *overrides: str) -> tuple[float, set[str]]:
        """Its first loss, and whose code it has kept."""
        for module in ("own_loss", "own_part", "own_rewards", "own_model"):
            sys.modules.pop(module, None)
        run, _ = replay(
            Path("../here/../runs") / source.path.name, [*settings, f"run.name={name}", *overrides]
        )
        sys.path.remove(str(run.modules))
        assert run.finished and run.path == tmp_path / f"runs/{name}-seed0"
        texts = {file.name: file.read_text() for file in run.modules.glob("*.py")}
        return first(run, "train/loss"), {
            name for name, text in OWN_CODE.items() if texts.get(Path(name).name) == text
        }

    of_rewards = {"recorded/own_rewards.py", "recorded/own_helper.py", "recorded/own_model.py"}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recorded, kept = replayed("recorded")
    assert kept == {*of_rewards, "recorded/own_loss.py"}
    monkeypatch.chdir(tmp_path / "here")
    mine, kept = replayed("own")
    assert mine == pytest.approx(9 * recorded)
    assert kept == {*of_rewards, "here/own_loss.py", "here/own_part.py"}
    monkeypatch.chdir(tmp_path / "elsewhere")
    steps = len(steps_of(RunDir(tmp_path / "runs/own-seed0")))
    assert replayed("own", f"train.steps={steps + 2}") == (mine, kept), "its own copy, not the recorded one"
    with pytest.raises(ConfigError, match=r'own-seed0 holds .*"delay": 0.* cannot go on as .*"delay": 1'):
        replay(source.path, [*settings, "run.name=own"], delay=1)
    monkeypatch.chdir(tmp_path / "here")
    Path("own_helper.py").write_text("times = -9")
    Path("own_loss.py").write_text(OWN_CODE["here/own_loss.py"].replace("own_part", "own_helper"))
    with pytest.raises(
        ConfigError, match=r"^own_helper.py, which own_loss:loss needs, is not what the rewards"
    ):
        replay(source.path, [*settings, "run.name=unlike"])


def test_a_delay_that_the_bound_of_staleness_undoes_is_refused(tmp_path: Path) -> None:
    """Shards that are too old would be dropped, and the next ones come early: no data were any older."""
    source = in_lockstep(tmp_path, exchange={"max_staleness": 20})
    source.modules.mkdir()
    (source.modules / "own_model.py").write_text(OWN_MODEL)
    settings = ["model.path=own_model:Model", "run.name=late"]
    refused = r"^--delay 4 makes data up to 24 steps old, .*=20 would drop: add .*max_staleness=24, or null$"
    with pytest.raises(ConfigError, match=refused):
        replay(source.path, settings, delay=4)
    with pytest.raises(ConfigError, match=r"^--at-once makes .*=20 would drop them: .*max_staleness=null$"):
        replay(source.path, settings, at_once=True)
    run, _ = replay(source.path, [*settings, "exchange.max_staleness=24"], delay=4)
    assert run.exported_step == len(steps_of(run))


def test_shards_come_later_or_all_at_once(tmp_path: Path) -> None:
    """The first comes at once all the same, since it is waited for; the others are not, however late."""
    source = in_lockstep(tmp_path)
    late, _, finished = again(source, "run.name=late", change=lambda recording: recording.delayed(4))
    came = {one.step: one.shards for one in Recording.of(late).arrivals}
    assert finished and came == {0: ((0, 0),), 6: ((0, 1),), 8: ((0, 2),), 10: ((0, 3),)}
    once, _, finished = again(source, "run.name=once", change=lambda recording: recording.at_once())
    (only,) = Recording.of(once).arrivals
    assert finished and only.step == 0 and only.shards == tuple((0, index) for index in range(6))


def test_a_replay_that_waits_where_a_publish_was_put_off_goes_on(tmp_path: Path) -> None:
    """Of three versions the second was left out; with each group used once, every step waits for a shard."""
    source = in_lockstep(tmp_path)
    run, _, finished = again(
        source,
        "buffer.replay_limit=1",
        "train.steps=6",
        "launch.timeout_seconds=2",
        change=lambda recording: replace(recording, published=frozenset({0, 4})),
    )
    assert finished and [one.step for one in Recording.of(run).arrivals] == list(range(6))
    assert Recording.of(run).published == {0, 4}


def test_a_publish_that_was_put_off_to_the_end_is_put_off_again(tmp_path: Path) -> None:
    """So what comes after it has the sync that it had; steps beyond the recorded ones publish as ever."""
    source = in_lockstep(tmp_path)

    def busy(recording: Recording) -> Recording:
        return replace(recording, published=frozenset({0, 4}), steps=9)

    run, _, finished = again(source, change=busy)
    assert finished and Recording.of(run).published == {0, 4, 9, 11}


def test_where_the_shards_end_the_replay_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And no searchers may join it then: a result of the recorded data would become one of others."""
    source, _ = record(tmp_path, **SYNCHRONOUS)
    source.modules.mkdir()
    (source.modules / "own_model.py").write_text(OWN_MODEL)
    settings = ["model.path=own_model:Model", "run.name=more", "train.steps=30"]
    replay_run(source.path, settings, partial=True)
    used_up = "the recorded shards are used up"
    run, printed = RunDir(source.path.with_name("more-seed0")), capfd.readouterr()
    assert printed.out.splitlines()[-1] == f"stopped at step 12/30: {used_up}"
    assert f"replaying 12 shards; to watch: tba status {run.path}\n" in printed.err
    assert len(_losses(run)) == 12 and (run.export / "model.safetensors").exists() and not run.finished
    monitor = RunMonitor(run)
    monitor.update()
    found = run_state(monitor)
    assert found == RunState("stopped", f"stopped at step 12: {used_up}", f"tba report {run.path}")
    words = [word for setting in settings for word in ("--set", setting)]
    again = shlex.join(["tba", "replay", str(source.path), "--partial", *words])
    for verb in ("run", "create"):
        refused = tba(verb, run.path)
        assert refused.returncode == 2
        assert (
            f"is a replay, which no searchers may join: to go on with it type {again}; to" in refused.stderr
        )


@pytest.mark.parametrize("override", ["train.objective=oapl", "train.reference=behaviour"])
@pytest.mark.parametrize("scored_by", ["searcher", "trainer"])
def test_what_was_recorded_of_another_reference_falls_away(
    override: str, scored_by: str, tmp_path: Path
) -> None:
    recorded = {"reference": {"name": "reset", "every": 3, "scored_by": scored_by}}
    source = RunDir.create(make_config(tmp_path, train=recorded))
    train = replay_config(source, source.config(), 12, [override]).train
    assert train.reference.name == "behaviour"
    with pytest.raises(ConfigError, match=r"unknown config key 'train.reference.every': valid are"):
        replay_config(source, source.config(), 12, [override, "train.reference.every=4"])


@pytest.mark.parametrize(("own", "replayed"), [({}, 0.5), ({"value_beta": 0.125}, 0.125)])
def test_what_followed_from_the_recorded_beta_follows_from_the_new_one(
    own: dict[str, object], replayed: float, tmp_path: Path
) -> None:
    source = RunDir.create(make_config(tmp_path, train={"objective": {"name": "oapl", **own}}))
    assert replay_config(source, source.config(), 12, ["train.beta=0.5"]).train.value_beta == replayed
    assert replay_config(source, source.config(), 12, []).train == source.config().train


REFUSED = {
    "generator.temperature=0.5": "is not how the shards of .* were made .1.0.: leave it out",
    "task.name=math": "task.name=math is not how",
    "model.logprob_temperature=2": "model.logprob_temperature=2",
    "train.score_centering=3": "did not record, with train.score_centering=0: leave it out",
    "train.reference=frozen": r"did not record, with train.reference=\{name: behaviour\}",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_was_recorded_stays(override: str, tmp_path: Path) -> None:
    config = make_config(tmp_path, train={"reference": "behaviour"})
    source = RunDir.create(config)
    with pytest.raises(ConfigError, match=REFUSED[override]):
        again(source, override)


def test_shards_that_are_gone_are_told_and_what_is_left_is_replayed_if_asked(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    source = RunDir.create(config)
    shards = _sealed(config, source, 8)
    keep(source)
    assert TrainerParts(config, source).build(ReplayExchange(shards, 0)).run()
    kept = source.kept_files()
    aside = source.kept.rename(source.path / "aside")
    for path in source.shard_files().values():
        path.unlink(missing_ok=True)  # as the pruner does
    with pytest.raises(ConfigError, match=r"6 of the 6 shards .* are gone, .* exchange.keep_shards=1$"):
        again(source, partial=True)
    aside.rename(source.kept)
    for (_, index), path in kept.items():
        if index >= 2:
            path.unlink()
    with pytest.raises(ConfigError, match=r"4 of the 6 shards .*, or replay what is left with --partial"):
        again(source)
    read = read_recorded(source, config, _replay_of(source), partial=True)[0]
    assert [one.shards for one in read.arrivals] == [((0, 0),), ((0, 1),)]


def _replay_of(source: RunDir) -> Config:
    return parse_config(source.config().model_dump(mode="json"), ["run.name=x"])
