"""A call of a task's code that ends its process is named at the next start, and refused at the one after."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killer import in_a_process
from lab.tabular import TabularReference, TabularTask
from test_loops import TABLE, OneShot, answers, make_config, make_searcher

from tba_hpc.config import ConfigError
from tba_hpc.exchange.hdf5_shards import ShardWriter
from tba_hpc.loops.scorer import Scorer
from tba_hpc.loops.task_calls import TaskCalls
from tba_hpc.run.directory import RunDir
from tba_hpc.run.underway import Underway

CALL = "rewards() of prompt 12"

DEATHS = {
    "left": lambda: os._exit(0),
    "crashed": lambda: ctypes.string_at(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
"""What ends a searcher without a word."""

SCRIPT = """
import os, sys, threading
from pathlib import Path
from tba_hpc.loops.task_calls import TaskCalls
from tba_hpc.run.directory import RunDir
from tba_hpc.run.underway import Underway

underway = Underway(RunDir(Path(sys.argv[1])), 3)
calls = TaskCalls("m:T", 60, underway)
"""

ENDS = {
    "returned": "calls(CALL, lambda: 1)",
    "raised": "calls(CALL, lambda: 1 / 0)",
    "hung": "calls._seconds = 0.1; calls(CALL, threading.Event().wait)",
    "another thread raised": (
        "threading.Thread(target=lambda: calls(CALL, threading.Event().wait), daemon=True).start()\n"
        "while not underway._file or b'12' not in os.pread(underway._file, 99, 0): pass\n"
        "raise OSError('an engine died')"
    ),
    "asked to stop": "calls(CALL, lambda: (underway.close(), os._exit(1)))",
}
"""What else a searcher may do in a call of prompt 12, at whose end the interpreter has a say."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(make_config(tmp_path))


def die(run: RunDir, death: str, call: str = CALL) -> None:
    """One start of the searcher, whose process dies in the call."""
    run.begin_attempt()
    assert in_a_process(_die, run, death, call) is not None


def _die(run: RunDir, death: str, call: str) -> None:
    faulthandler.disable()  # pytest's, which would tell of a crash that is meant
    TaskCalls("m:T", 60, Underway(run, 3))(call, DEATHS[death])


def end(run: RunDir, does: str) -> None:
    """One start of the searcher, an interpreter that ends by itself."""
    run.begin_attempt()
    text = f"{SCRIPT}\nCALL = {CALL!r}\n{does}"
    subprocess.run([sys.executable, "-c", text, str(run.path)], capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize("death", DEATHS)
def test_a_reward_that_ends_its_process_twice_is_refused_and_then_tried_anew(
    run: RunDir, death: str, caplog: pytest.LogCaptureFixture
) -> None:
    die(run, death)
    run.begin_attempt()
    Underway(run, 3).close()
    assert f"ended without an error message during {CALL}, in attempt 1: if that happens again" in caplog.text
    die(run, death)
    Underway(run, 4).close()  # another's
    with pytest.raises(ConfigError, match=r"during rewards\(\) of prompt 12, in attempts 1 and 3: correct"):
        Underway(run, 3)
    assert not Underway(run, 3).ends


def test_two_ends_in_different_calls_are_told(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    for prompt in (12, 13, 14):
        die(run, "left", f"rewards() of prompt {prompt}")
    found = Underway(run, 3)
    assert found.ends == {f"rewards() of prompt {prompt}": [str(prompt - 11)] for prompt in (12, 13, 14)}
    assert all(f"prompt {prompt}, in attempt {prompt - 11}:" in caplog.text for prompt in (12, 13, 14))


@pytest.mark.parametrize("how", ENDS)
def test_an_end_by_another_cause_is_not_held_against_the_call(run: RunDir, how: str) -> None:
    end(run, ENDS[how])
    assert not Underway(run, 3).ends


def test_a_call_that_is_survived_is_acquitted(run: RunDir) -> None:
    """A searcher may be killed from outside in any call."""
    for _ in range(3):
        die(run, "killed")
        end(run, ENDS["returned"])
    assert not Underway(run, 3).ends


def test_where_an_answer_may_have_ended_the_process_each_is_judged_alone(run: RunDir) -> None:
    class Counting(TabularTask):
        def correct(self, prompts: object, completions: object) -> list[bool]:
            sizes.append(len(completions))  # type: ignore[arg-type]
            return super().correct(prompts, completions)  # type: ignore[arg-type]

    sizes: list[int] = []
    die(run, "left", "correct() of test prompt 2")
    task = Counting(TABLE)
    scorer = Scorer(
        task, TabularReference(TABLE), ShardWriter(run, 0), seal_seconds=60, underway=Underway(run, 3)
    )
    wanted = answers("test", 0, task.prompts("test"))
    for answer in wanted:
        scorer.judge(answer)
    judged = 0
    while judged < len(wanted):
        judged += len(scorer.judged())
    scorer.close()
    assert sizes == [1] * len(wanted) and not scorer._underway.ends  # type: ignore[union-attr]


def test_a_searcher_that_is_asked_to_stop_notes_no_call(run: RunDir) -> None:
    config = make_config(run.path.parent)
    searcher = make_searcher(config, run, OneShot(wanted=20), stop_asked=lambda: True)
    searcher.scorer._underway = underway = Underway(run, 3)
    searcher._pass_on_stop()
    with underway(CALL):
        assert not os.pread(underway._file, 99, 0).strip()


def test_a_note_costs_little(run: RunDir) -> None:
    underway, start = Underway(run, 3), time.perf_counter()
    for _ in range(1000):
        with underway(CALL):
            pass
    assert time.perf_counter() - start < 1, "1 ms for each group would be felt"
