"""Stacks of a rank in its log, and a rank whose threads would keep its process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tba_hpc.run.stacks import FRAMES, WENT_ON, late_ranks

HANGS = """
import sys, threading, time
from tba_hpc.run.stacks import watched, write_stacks_to_log
write_stacks_to_log()
stop_asked = watched(lambda: False, 0.5)

def hang(depth):
    if depth:
        return hang(depth - 1)
    print("hanging", flush=True)
    time.sleep(float(sys.argv[1]))

for _ in range(10):
    stop_asked()
    time.sleep(0.1)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
hang(20)
if "goes on" in sys.argv:
    stop_asked()
"""
"""A loop that is in time for a second, twice as long as is allowed, and then hangs."""

BLOCKS = """
import logging, sys, time
from tba_hpc.run.stacks import stacks_if_late
logging.basicConfig()

def hang():
    with stacks_if_late(0.3):
        time.sleep(float(sys.argv[1]))

hang()
time.sleep(0.5)
"""
"""A block that may take .3 s, and a pause after it, which may take longer."""

LEAVES = """
import time
from tba_hpc.run.stacks import watched, watched_inside
with watched_inside():
    watched(lambda: False, 0.2)
time.sleep(0.6)
"""
"""A loop that has ended, and a pause after it."""

STAYS = """
import sys, threading, time
from tba_hpc.launch import rank
rank.THREADS_END_SECONDS = 0.5
with rank.leaving():
    threading.Thread(target=time.sleep, args=(60,), name="a stuck worker").start()
    sys.exit(int(sys.argv[1]))
"""


def python(code: str, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_stack_of_a_late_loop_is_in_its_log(tmp_path: Path) -> None:
    _, err = python(HANGS, 1.5).communicate(timeout=60)
    assert err.count("Timeout (") == 1, "once, and not while the loop was in time"
    (tmp_path / "searcher-0003.log").write_text("a line\n" * 50_000 + err + "another line\n")
    (tmp_path / "trainer-0000.log").write_text("nothing to tell\n")
    ((name, frames),) = late_ranks(tmp_path)
    assert name == "searcher-0003" and len(frames) == FRAMES
    assert all(frame.endswith(" in hang") for frame in frames), "of the main thread, the innermost"


def test_a_rank_that_was_late_and_went_on_is_not_blamed(tmp_path: Path) -> None:
    _, err = python(HANGS, 1.5, "goes on").communicate(timeout=60)
    assert err.count("Timeout (") == 1
    (tmp_path / "searcher-0003.log").write_text(err)
    assert not list(late_ranks(tmp_path))


@pytest.mark.parametrize(("seconds", "stacks"), [(0.1, 0), (0.6, 1)])
def test_a_block_that_is_late_tells_where_it_is_and_that_it_went_on(seconds: float, stacks: int) -> None:
    _, err = python(BLOCKS, seconds).communicate(timeout=60)
    assert (err.count("Timeout ("), err.count(WENT_ON), err.count(" in hang")) == (stacks,) * 3


def test_a_loop_that_has_ended_is_not_watched() -> None:
    assert python(LEAVES).communicate(timeout=60) == ("", "")


def test_a_rank_tells_where_it_is_on_request() -> None:
    rank = python(HANGS, 60)
    assert rank.stdout and rank.stdout.readline() == "hanging\n"
    rank.send_signal(signal.SIGUSR2)
    assert rank.stderr
    while " in hang" not in rank.stderr.readline():
        assert rank.poll() is None, "it goes on"
    rank.kill()
    rank.communicate()


@pytest.mark.parametrize("status", [0, 2])
def test_a_thread_that_stays_is_named_and_does_not_keep_the_process(status: int) -> None:
    stays = python(STAYS, status)
    _, err = stays.communicate(timeout=30)
    assert stays.returncode == status
    assert "although threads of the user's code still run: a stuck worker" in err
