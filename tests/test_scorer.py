"""What becomes of groups and answers that a task cannot reward or judge, in the real searcher's loop."""

from __future__ import annotations

import inspect
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab.tabular import TabularReference, TabularTask
from test_loops import TABLE, OneShot, answers, make_config, make_searcher

from tba_hpc.config import ConfigError
from tba_hpc.core.ports import EngineError
from tba_hpc.core.types import BEHAVIOUR, Completion, Group, Prompt
from tba_hpc.exchange.hdf5_shards import ShardWriter, read_shard
from tba_hpc.loops.scorer import Judged, Scorer
from tba_hpc.loops.search_log import Sums
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import read_metrics

S = 12
"""Completions of a group."""


class Faulty(TabularTask):
    """Gives the table's rewards, but what ``fault`` gives for a prompt, of so many before."""

    def __init__(self, fault: Callable[[Prompt, list[float], int], list[float]]) -> None:
        super().__init__(TABLE)
        self._fault = fault
        self.groups = 0
        self.last = -1

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """As the fault says."""
        self.groups += 1
        return self._fault(prompt, super().rewards(prompt, completions), self.groups)


def raise_at_prompt_1(prompt: Prompt, rewards: list[float], groups: int) -> list[float]:
    if prompt.id == 1:
        raise KeyError("no\nanswer")
    return rewards


def search(
    folder: Path, task: TabularTask, *, wanted: int = 200, limit: int = 10, seconds: float = math.inf
) -> RunDir:
    config = make_config(folder)
    run = RunDir.create(config)
    exchange = OneShot(wanted=wanted)
    make_searcher(
        config, run, exchange, task=task, pending_shards=1000, most_rejected=limit, call_seconds=seconds
    ).run()
    return run


def prompts_sealed(run: RunDir) -> set[int]:
    records = [read_shard(path).trajectories.record for path in run.shard_files().values()]
    return {*np.concatenate(records)["prompt_id"].tolist()}


def rejected(run: RunDir) -> int:
    return int(str(read_metrics(run.metrics_file("searcher"))[-1]["search/rejected"]))


def test_a_searcher_says_once_that_its_engine_is_ready(tmp_path: Path) -> None:
    """Even if it has been so from the start; status waits for it."""
    run = search(tmp_path, Faulty(lambda _prompt, rewards, _groups: rewards))
    records = read_metrics(run.metrics_file("searcher"))
    assert [record["stage"] for record in records if record.get("event") == "engine"] == ["ready"]


def test_rewards_that_raise_cost_their_group(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = Faulty(raise_at_prompt_1)
    run = search(tmp_path, task)
    records = [read_shard(path).trajectories.record for path in run.shard_files().values()]
    kept = np.concatenate(records)["prompt_id"]
    assert set(kept) == {0, 2, 3}
    assert rejected(run) == S * task.groups - len(kept) > 0
    (line,) = [record for record in caplog.records if record.exc_info]
    assert "rewards() of prompt 1 (request " in line.message
    told = r"raised KeyError: 'no\\nanswer' \(test_scorer\.py:\d+ in raise_at_prompt_1\); these .* \(0 before"
    assert re.search(told, line.message)


@pytest.mark.parametrize(
    ("fault", "last"),
    [
        (lambda *_: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_scorer\.py:\d+ in <lambda>\)"),
        (lambda prompt, rewards, groups: [math.nan] * S, r"gave 12 of 12 that are not finite"),
    ],
)
def test_a_searcher_that_only_rejects_ends_with_a_sentence(
    tmp_path: Path, fault: Callable[[Prompt, list[float], int], list[float]], last: str
) -> None:
    """As a mistake of the user's, which no other start would mend."""
    sentence = (
        r"^there were 7 groups without a usable reward in a row, the last because rewards\(\) of "
        rf"prompt \d \(request \d+\) {last}: correct the cause, then start from the config "
        r"file: the run directory has the old code$"
    )
    task = Faulty(fault)
    with pytest.raises(ConfigError, match=sentence):
        search(tmp_path, task, limit=7)
    assert task.groups >= 7


def test_the_end_of_a_searcher_names_why_environments_failed(tmp_path: Path) -> None:
    run, task = (
        RunDir.create(make_config(tmp_path)),
        Faulty(lambda _prompt, rewards, _: [math.nan] * len(rewards)),
    )
    scorer = Scorer(task, None, ShardWriter(run, 0), seal_seconds=60, most_rejected=2)
    for group in answers("train", 0, task.prompts("train")[:2]):
        shut = tuple(replace(one, fault="the shop is shut") for one in group.completions)
        scorer.submit(replace(group, completions=shut))
    last = "1 of 1 episodes of prompt 1 (request 1) gave no usable reward (the shop is shut)"
    sentence = f"in a row, the last because {re.escape(last)}: correct the cause"
    with pytest.raises(ConfigError, match=sentence):
        scorer.close()


class Mute(BaseException):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


def too_deep(depth: int = 0) -> None:
    too_deep(depth + 1)


def leave() -> None:
    sys.exit(3)


def take_all_memory() -> None:
    raise MemoryError


def interrupt() -> None:
    raise KeyboardInterrupt


def be_mute() -> None:
    raise Mute


ENDS = {
    too_deep: "RecursionError: maximum recursion depth exceeded",
    leave: "SystemExit: 3",
    take_all_memory: "MemoryError",
    interrupt: "KeyboardInterrupt",
    be_mute: "Mute: <exception str() failed>",
}
"""What a reward may do, and how it is told."""


@pytest.mark.parametrize(("end", "told"), ENDS.items())
def test_whatever_python_can_raise_costs_its_group_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: Callable[[], None], told: str
) -> None:
    def fault(prompt: Prompt, rewards: list[float], groups: int) -> list[float]:
        if prompt.id == 1:
            end()
        return rewards

    assert prompts_sealed(search(tmp_path, Faulty(fault))) == {0, 2, 3}
    assert f"raised {told}" in caplog.text and "rewards() of prompt 1 " in caplog.text


def test_parts_that_raise_cost_their_group_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Parted(Faulty):
        def reward_parts(self) -> dict[str, list[float]]:
            if self.last == 1:
                leave()
            return {"all": [1.0] * S}

    def note(prompt: Prompt, rewards: list[float], groups: int) -> list[float]:
        task.last = prompt.id
        return rewards

    task = Parted(note)
    run = search(tmp_path, task)
    assert prompts_sealed(run) == {0, 2, 3}
    assert "rewards() of prompt 1 " in caplog.text and f"raised {ENDS[leave]}" in caplog.text


@pytest.mark.parametrize(("end", "told"), ENDS.items())
def test_an_answer_over_which_a_judge_ends_counts_as_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: Callable[[], None], told: str
) -> None:
    judged = judge(tmp_path, Unjudged({2}, end), 3)
    assert [one.correct for one in judged] == [True, True, False, True] * 3
    assert f"prompt 2 raised {told}" in caplog.text


class Stuck(Faulty):
    """Rewards of prompt 1 wait for ever, so often; notes the thread of each call, and when it is let go."""

    def __init__(self, times: float) -> None:
        super().__init__(self._wait)
        self.left = times
        self.threads: list[threading.Thread] = []
        self.released = threading.Event()

    def _wait(self, prompt: Prompt, rewards: list[float], groups: int) -> list[float]:
        self.threads.append(threading.current_thread())
        if prompt.id == 1 and self.left > 0:
            self.left -= 1
            self.released.wait()
        return rewards


@pytest.fixture
def stuck() -> Iterator[Callable[[float], Stuck]]:
    """Makes such tasks, and lets their threads go at the end."""
    made: list[Stuck] = []

    def make(times: float) -> Stuck:
        made.append(Stuck(times))
        return made[-1]

    yield make
    for task in made:
        task.released.set()


def test_a_reward_that_hangs_is_set_aside_with_its_line_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stuck: Callable[[float], Stuck]
) -> None:
    task = stuck(1)
    run = search(tmp_path, task, seconds=1.0)
    (line,) = [record.message for record in caplog.records if "last at" in record.message]
    number = inspect.getsourcelines(Stuck._wait)[1] + 4
    assert re.match(
        r"rewards\(\) of prompt 1 \(request \d+\) ran for 1 s, last at "
        rf"test_scorer\.py:{number} in _wait; these trajectories are set aside",
        line,
    )
    assert rejected(run) == S and len(set(task.threads)) == 2  # one for all calls, until one hangs
    task.released.set()
    for thread in set(task.threads):
        thread.join(20)
        assert not thread.is_alive()


def test_a_searcher_whose_rewards_hang_again_and_again_ends_in_time_with_their_line(
    tmp_path: Path, stuck: Callable[[float], Stuck]
) -> None:
    """Before others give up on it, who wait twice as long as the first call may take."""
    sentence = (
        rf"^the task {__name__}:Stuck had 3 calls that do not end; the last, rewards\(\) of prompt 1 "
        r"\(request \d+\), ran for 0\.5 s, last at test_scorer\.py:\d+ in _wait: set a timeout on "
        r"what it waits for, or raise launch\.timeout_seconds: a call may take half of that$"
    )
    start = time.monotonic()
    with pytest.raises(ConfigError, match=sentence):
        search(tmp_path, stuck(math.inf), wanted=10_000, seconds=2.0)
    assert 3.5 <= time.monotonic() - start < 20


def test_a_task_may_take_its_own_time(tmp_path: Path) -> None:
    """Where its calls load models, say."""

    class Slow(Faulty):
        longest_call = math.inf

    def slow(prompt: Prompt, rewards: list[float], groups: int) -> list[float]:
        time.sleep(0.2)
        return rewards

    assert not rejected(search(tmp_path, Slow(slow), wanted=20, seconds=0.01))


def test_a_searcher_whose_reward_hangs_still_takes_weights_and_begins_no_more_than_it_can_score(
    tmp_path: Path, stuck: Callable[[float], Stuck]
) -> None:
    task = stuck(1)
    run = RunDir.create(make_config(tmp_path))
    scorer = Scorer(task, TabularReference(TABLE), ShardWriter(run, 0), seal_seconds=60)
    for group in answers("train", 0, task.prompts("train")) * 16:
        assert not scorer.full
        scorer.submit(group)
    start = time.monotonic()
    while not scorer.full:  # until what came before the one that hangs is taken
        scorer.submit(group)
    assert not sum(len(scorer.finished()) for _ in range(3)) and time.monotonic() - start < 20
    task.released.set()
    scorer.close()


def test_a_process_ends_while_a_reward_hangs() -> None:
    script = (
        "import threading; from tba_hpc.loops.task_calls import TaskCalls\n"
        "TaskCalls('m:T', 0.1)('rewards()', threading.Event().wait)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "OverranError: ran for 0.1 s, last at threading.py" in ended.stderr


@pytest.mark.parametrize("unusable", [math.nan, 1e300], ids=["NaN", "more than float32 holds"])
def test_one_group_with_a_reward_is_enough_to_go_on(tmp_path: Path, unusable: float) -> None:
    def fault(prompt: Prompt, rewards: list[float], groups: int) -> list[float]:
        return [unusable] * (S - (groups % 3 == 0)) + rewards[: groups % 3 == 0]

    run = search(tmp_path, Faulty(fault), wanted=20, limit=3)
    kept = sum(len(read_shard(path).trajectories) for path in run.shard_files().values())
    assert kept >= 20 and rejected(run) >= 20 * (3 * S - 1)


@pytest.mark.parametrize(
    ("fault", "error", "sentence"),
    [
        (lambda prompt, rewards, groups: rewards[1:], ConfigError, "but 12 completions need a number each"),
        (lambda prompt, rewards, groups: _raise(EngineError("died 4 times")), EngineError, "died 4 times"),
        (lambda prompt, rewards, groups: _raise(ConfigError("no model")), ConfigError, "no model"),
    ],
)
def test_what_is_no_single_groups_fault_ends_the_searcher_at_once(
    tmp_path: Path,
    fault: Callable[[Prompt, list[float], int], list[float]],
    error: type[Exception],
    sentence: str,
) -> None:
    with pytest.raises(error, match=sentence):
        search(tmp_path, Faulty(fault), limit=1_000_000)


def _raise(error: Exception) -> list[float]:
    raise error


def test_the_time_that_rewards_take_is_logged(tmp_path: Path) -> None:
    """Three tenths of a second for each group: nearly all that a searcher does."""

    def slow(prompt: Prompt, rewards: list[float], groups: int) -> list[float]:
        time.sleep(0.3)
        return rewards

    records = read_metrics(search(tmp_path, Faulty(slow), wanted=60).metrics_file("searcher"))
    timed = [record for record in records if "search/reward_seconds" in record]  # a slow machine logs several
    assert timed and all(0.3 <= float(str(record["search/reward_seconds"])) < 3 for record in timed)
    assert max(float(str(record["search/reward_share"])) for record in timed) > 0.5


def test_a_job_at_a_lower_priority_keeps_it(tmp_path: Path) -> None:
    """An ordinary user may not raise it again."""
    seen: set[int] = set()

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def note(prompt: Prompt, rewards: list[float], groups: int) -> list[float]:
        seen.add(priority())
        return rewards

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(8, priority()))
        seen.add(priority())
        search(tmp_path, Faulty(note), wanted=20)

    searcher = threading.Thread(target=run)
    searcher.start()
    searcher.join()
    assert len(seen) == 1


@pytest.mark.parametrize(("temperature", "compared"), [(None, 4), (0.0, 4), (1.0, 0)])
def test_groups_of_another_temperature_are_left_out_of_kl(
    tmp_path: Path, temperature: float | None, compared: int
) -> None:
    """The answers are greedy, hence tempered where requests are sampled at 1."""
    run, task = RunDir.create(make_config(tmp_path)), TabularTask(TABLE)
    writer, reference = ShardWriter(run, 0), TabularReference(TABLE)
    scorer = Scorer(task, reference, writer, seal_seconds=60, temperature=temperature)
    for group in answers("train", 0, task.prompts("train")):
        scorer.submit(group)
    sums = Sums()
    while sums.groups < 4:
        sums = sum((scored.sums for scored in scorer.finished()), sums)
    scorer.close()
    assert sums.compared == compared and bool(sums.sampled) == bool(compared)


@pytest.mark.parametrize("step", [BEHAVIOUR, 0])
def test_without_a_model_the_sampler_is_the_reference_or_the_trainer_scores_it(
    tmp_path: Path, step: int
) -> None:
    run, task = RunDir.create(make_config(tmp_path)), TabularTask(TABLE)
    scorer = Scorer(task, None, ShardWriter(run, 0), seal_seconds=60)
    scorer.refer_to(step)
    for group in answers("train", 0, task.prompts("train")):
        scorer.submit(group)
    scorer.close()
    (path,) = run.shard_files().values()
    found = read_shard(path).trajectories
    assert (found.record["reference"] == step).all()
    expected = found.logprobs if step == BEHAVIOUR else np.full_like(found.logprobs, np.nan)
    np.testing.assert_array_equal(found.ref_logprobs, expected)


def test_the_end_of_a_run_does_not_wait_for_every_slow_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was scored in time is sealed; nothing is noted of the rest, which a resume samples again."""

    def slow(_prompt: Prompt, rewards: list[float], _groups: int) -> list[float]:
        time.sleep(0.2)
        return rewards

    monkeypatch.setattr("tba_hpc.loops.scorer.CLOSING_SECONDS", 1.0)
    run, task = RunDir.create(make_config(tmp_path)), Faulty(slow)
    scorer = Scorer(task, TabularReference(TABLE), ShardWriter(run, 0), seal_seconds=60)
    groups = answers("train", 0, task.prompts("train")) * 15
    for number, group in enumerate(groups):
        scorer.submit(replace(group, request=replace(group.request, id=number)))
    began = time.monotonic()
    results = scorer.close()
    assert time.monotonic() - began < 6, "12 s of rewards wait"
    (shard,) = [one.shard for one in results if one.shard]
    assert 0 < len(shard.request_ids) == task.groups < 30


class Unjudged(TabularTask):
    """All answers are right, but it cannot judge what answers some prompts."""

    def __init__(self, prompts: set[int], end: Callable[[], None] | None = None) -> None:
        super().__init__(TABLE)
        self._broken = prompts
        self._end = end

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[bool]:
        """Raises for these, whatever is beside them."""
        if any(prompt.id in self._broken for prompt in prompts):
            if self._end:
                self._end()
            raise ValueError("unreadable")
        return [True] * len(prompts)


def judge(folder: Path, task: TabularTask, times: int) -> list[Judged]:
    """Answers to every prompt, ``times`` over."""
    run = RunDir.create(make_config(folder))
    scorer = Scorer(task, TabularReference(TABLE), ShardWriter(run, 0), seal_seconds=60, most_rejected=4)
    wanted = answers("test", 0, task.prompts("test")) * times
    for answer in wanted:
        scorer.judge(answer)
    judged: list[Judged] = []
    try:
        while len(judged) < len(wanted):
            judged += scorer.judged()
    finally:
        scorer.close()
    assert [one.answer for one in judged] == wanted
    return judged


def test_a_task_that_can_judge_nothing_ends_the_searcher(tmp_path: Path) -> None:
    sentence = (
        r"there were 4 answers that could not be judged in a row, the last because correct\(\) of test "
        r"prompt 3 raised ValueError: unreadable \(test_scorer\.py:\d+ in correct\): correct the cause"
    )
    with pytest.raises(ConfigError, match=sentence):
        judge(tmp_path, Unjudged({0, 1, 2, 3}), 10)


class Silent(TabularTask):
    """Its judge answers for all prompts but one."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self._grades: list[float] = []

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[bool]:
        """Right, all of them."""
        self._grades = [math.nan if prompt.id == 2 else 1.0 for prompt in prompts]
        return [True] * len(prompts)

    def grades(self) -> list[float]:
        """NaN for the one."""
        return self._grades


def test_an_answer_without_a_reward_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert [one.correct for one in judge(tmp_path, Silent(), 1)] == [True, True, False, True]
    (told,) = [record.message for record in caplog.records if "grades()" in record.message]
    assert told.startswith(
        "grades() gave nan for test prompt 2; this one counts as wrong, and a mean reward leaves it out (0 "
    )


class Numbered(TabularReference):
    """Gives every token the log-probability −step, so that an answer tells which reference it met."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.step = 0

    def load(self, step: int) -> None:
        """Become the reference of ``step``."""
        self.step = step

    def logprobs(self, group: Group) -> list[np.ndarray]:
        """−step for each token."""
        return [np.full(len(completion.tokens), -self.step, np.float32) for completion in group.completions]


class Gate(Numbered):
    """Waits at its first call; notes how many groups came with each."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.calls: list[tuple[int, int]] = []

    def logprobs_of(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        assert self.opened.wait(30)
        self.calls.append((self.step, len(groups)))
        return super().logprobs_of(groups)


def test_what_waits_is_scored_together_and_by_the_reference_that_was_wanted(tmp_path: Path) -> None:
    """One group, then five while it is being scored, then two of the next reference."""
    task, reference = TabularTask(TABLE), Gate()
    scorer = Scorer(task, reference, ShardWriter(RunDir.create(make_config(tmp_path)), 0), seal_seconds=60)
    groups = answers("train", 0, task.prompts("train")[:1]) * 8
    scorer.submit(groups[0])
    while scorer._unscored:
        time.sleep(0.01)  # until the worker has it
    for group in groups[1:6]:
        scorer.submit(group)
    scorer.refer_to(3)
    for group in groups[6:]:
        scorer.submit(group)
    reference.opened.set()
    results = scorer.close()
    assert reference.calls == [(0, 1), (0, 5), (3, 2)]
    assert sum(one.sums.scored for one in results) == sum(one.sums.groups for one in results) == 8
    (shard,) = [one.shard for one in results if one.shard]
    assert shard.trajectories.record["reference"].tolist() == [0] * 6 + [3] * 2


def test_answers_are_judged_under_the_reference_that_was_in_force_for_their_weights(tmp_path: Path) -> None:
    task = TabularTask(TABLE)
    scorer = Scorer(task, Numbered(), ShardWriter(RunDir.create(make_config(tmp_path)), 0), seal_seconds=60)
    queued = answers("test", 0, task.prompts("test")) * 10
    for answer in queued:
        scorer.judge(answer)
    scorer.refer_to(3)
    for answer in queued:
        scorer.judge(answer)
    judged: list[Judged] = []
    while len(judged) < 2 * len(queued):
        judged += scorer.judged()
    scorer.close()
    per_token = [
        (one.ref_logprob or 0.0) / -sum(len(c.tokens) for c in one.answer.completions) for one in judged
    ]
    assert [one.answer for one in judged] == queued * 2
    assert per_token == [0.0] * len(queued) + [3.0] * len(queued)
