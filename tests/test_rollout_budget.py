"""Searchers that cannot give what they owe while staleness is bounded: the real loops, in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from lab.tabular import TabularTask
from test_loops import TABLE, TrainerParts, make_config, make_searcher

from tba_hpc.config import Config, ConfigError, may_change
from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.prompts import refuse_few_prompts
from tba_hpc.core.types import Completion, Prompt
from tba_hpc.exchange.file_exchange import FileSearcherExchange
from tba_hpc.run.directory import RunDir
from tba_hpc.run.history import History

STEPS = 6


def bounded(
    root: Path, *, searchers: int = 1, deadline: float = 20, limit: int | None = None, **train: object
) -> Config:
    """Synchronous: bound 0. Only the trainer's patience ends a run. limit: buffer.replay_limit."""
    return make_config(
        root,
        train={"steps": STEPS, **train},
        exchange={"sync_every": 1, "max_staleness": 0},
        evaluate={"every": STEPS},
        launch={"searchers": searchers, "timeout_seconds": deadline},
        buffer={"replay_limit": limit},
    )


def go(config: Config, task: TabularTask) -> list[int]:
    """A run with searcher 0 alone, however many there should be; the largest staleness of every step."""
    run = RunDir.create(config)
    parts, patience = TrainerParts(config, run), config.launch.timeout_seconds
    exchange = FileSearcherExchange(run.weights, 0, attempt="first", deadline=patience)
    searcher = make_searcher(config, run, exchange, task=task, most_rejected=1_000_000)
    thread = threading.Thread(target=searcher.run)
    thread.start()
    exchange = parts.file_exchange()
    try:
        assert parts.build(exchange).run()
    finally:
        exchange.close()
        thread.join(240)
        assert not thread.is_alive()
    records = History.read(run).steps
    return [int(str(record["staleness/max"])) for record in records]


def test_a_searcher_that_never_comes_is_made_up_for_after_one_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert go(bounded(tmp_path, searchers=2, deadline=4), TabularTask(TABLE)) == [0] * STEPS
    (warning,) = [
        record.message for record in caplog.records if "other searchers are granted" in record.message
    ]
    assert "holds 2 of the 4 groups that step 0 needs and no new one has arrived for 4 s" in warning
    assert "see the logs of searchers 1, which have yet to answer" in warning


def test_too_few_prompts_for_a_step_are_refused(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        train={"prompts_per_step": 5},
        exchange={"max_staleness": 1},
        buffer={"initial_completions": 15, "capacity_per_prompt": 40},
    )
    with pytest.raises(ConfigError, match="prompts_per_step=5 is more than the 4 training prompts"):
        refuse_few_prompts(TabularTask(TABLE), config)


def test_an_initial_buffer_that_the_prompts_can_never_fill_is_refused(tmp_path: Path) -> None:
    """Four prompts of 20 completions each; with a bound on staleness nothing waits for it."""

    def refuse(wanted: int, **exchange: object) -> None:
        buffer = {"initial_completions": wanted, "capacity_per_prompt": 20}
        refuse_few_prompts(TabularTask(TABLE), make_config(tmp_path, buffer=buffer, exchange=exchange))

    refuse(80)
    refuse(81, max_staleness=1)
    sentence = (
        r"initial_completions=81 can never be reached with 4 training prompts and "
        r"buffer.capacity_per_prompt=20: lower initial_completions to at most 80, or raise "
        r"capacity_per_prompt$"
    )
    with pytest.raises(ConfigError, match=sentence):
        refuse(81)


def test_a_queue_that_cannot_hold_a_prompts_groups_is_refused(tmp_path: Path) -> None:
    """Twelve groups of four prompts, asked in epochs, touch four epochs, so four may be of one prompt.

    The rule is of a start alone: a run that breaks it can still be looked at, and resumed with more room.
    """

    def refuse(per_prompt: int, capacity: int = 144) -> None:
        buffer = {"initial_completions": 15, "capacity_per_prompt": per_prompt, "replay_limit": 1}
        buffer["capacity"] = capacity
        config = make_config(tmp_path, exchange={"max_staleness": 2}, buffer=buffer)
        assert config.groups_ahead == 12 and config.generator.completions_per_prompt == 12
        refuse_few_prompts(TabularTask(TABLE), config)

    refuse(48)
    sentence = "per_prompt=47 would drop groups unused: a queue of 12 groups may hold 4 of one"
    with pytest.raises(ConfigError, match=sentence):
        refuse(47)
    sentence = "capacity=143 would drop groups unused: .*max_staleness=2 .* may hold 12 groups; .* least 144"
    with pytest.raises(ConfigError, match=sentence):
        refuse(48, capacity=143)
    assert may_change("buffer.capacity") and may_change("buffer.capacity_per_prompt")


class Sampled(TabularTask):
    """Notes the rewards of every group, in order."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.groups: list[list[float]] = []

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """As ever; single completions are evaluations'."""
        plain = super().rewards(prompt, completions)
        self.groups += [plain] if len(plain) > 1 else []
        return plain


def test_an_on_policy_run_learns_from_what_its_policy_sampled_equal_completions_too(tmp_path: Path) -> None:
    """S = K = 12 of few possible completions: the mean reward of every batch is that of its step's groups."""
    config, task = bounded(tmp_path, objective="rloo", completions_per_prompt=12), Sampled()
    assert go(config, task) == [0] * STEPS
    records = History.read(RunDir.open(config.run_dir)).steps
    sampled = np.mean(task.groups, axis=1).reshape(STEPS, -1).mean(axis=1)
    np.testing.assert_allclose([float(str(r["train/reward"])) for r in records], sampled, rtol=1e-6)
    assert records[-1]["buffer/duplicates"] == 0


class Rewards(TabularTask):
    """Of some groups no reward is a number."""

    def __init__(self, broken: Callable[[int], bool]) -> None:
        super().__init__(TABLE)
        self._broken = broken
        self._groups = 0

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """NaN for the groups whose number is ``broken``."""
        self._groups += 1
        plain = super().rewards(prompt, completions)
        return [float("nan")] * len(plain) if self._broken(self._groups) else plain


@pytest.mark.parametrize("limit", [None, 1])
def test_groups_set_aside_are_made_up_for(tmp_path: Path, limit: int | None) -> None:
    """Every third; another prompt of the sequence takes the place, in a queue as well."""
    assert go(bounded(tmp_path, limit=limit), Rewards(lambda number: number % 3 == 0)) == [0] * STEPS


def test_where_all_are_set_aside_the_run_ends_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ExchangeError, match=r"holds 0 of the 4 groups that step 0 needs .* see the logs of searchers 0"
    ):
        go(bounded(tmp_path, deadline=1), Rewards(lambda number: True))
