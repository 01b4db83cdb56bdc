"""The weights of a node: two files that take turns, and a third while somebody still reads."""

import subprocess
import sys
from pathlib import Path

import pytest

from mpi.launch import ENVIRONMENT

PROGRAM = """
import os, time
import numpy as np
from mpi4py import MPI
from tba_hpc.core.types import WeightLayout
from tba_hpc.exchange import mpi_world

mpi_world.RELEASE_SECONDS = 0.2
layout = WeightLayout.of([("weight", (1 << 20,))], "F32")
alone = {"trainers": 1, "searchers": 0, "deadline": 60.0, "node_split": lambda comm: comm}
world = mpi_world.MpiWorld(MPI.COMM_SELF, 0, **alone)
memory = mpi_world.NodeMemory(world, layout, 1 << 20)
copies = lambda: sum(os.stat(file.path).st_blocks * 512 for file in memory._files) / layout.nbytes
assert copies() == 2

readers = {}
def write(number):
    memory.writable(number)[:] = number
    readers[number] = memory.reader(number)
    for still, reader in readers.items():
        assert (reader.map("r") == still).all(), (number, still)

write(0)
assert memory.make_room(1)
write(1)
began = time.monotonic()
while not memory.make_room(2):
    time.sleep(0.01)
assert time.monotonic() - began >= 0.2 and copies() == 3, "somebody reads 0"
write(2)
del readers[1]
assert memory.make_room(3)
write(3)
del readers[2]
assert memory.make_room(4) and copies() == 3
write(4)
time.sleep(0.3)
assert not memory.make_room(5) and not memory.make_room(5), "0 and 3 are read"
del readers[0]
time.sleep(0.3)
while not memory.make_room(5):
    time.sleep(0.01)
assert copies() == 3
readers.clear()
maps, spare = list(memory._maps), 3 - sum(memory._order)
assert memory.make_room(6) and copies() == 2
assert memory.writable(6) is maps[memory._order[0]]
kept = [now is before for now, before in zip(memory._maps, maps)]
assert kept == [place != spare for place in range(3)], "CUDA may know the pages that the spare gave back"
assert memory.writable(6) is maps[memory._order[0]] and memory._maps[spare] is memory._maps[spare]
assert memory.reader(4).generation == memory._generations[memory._order[0]]
print("held")
"""


NO_MEMORY = """
import shutil, time
from mpi4py import MPI
from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.types import WeightLayout
from tba_hpc.exchange import mpi_world

mpi_world.RELEASE_SECONDS = 0.0
layout = WeightLayout.of([("weight", (1 << 20,))], "F32")
alone = {"trainers": 1, "searchers": 0, "deadline": 0.5, "node_split": lambda comm: comm}
memory = mpi_world.NodeMemory(mpi_world.MpiWorld(MPI.COMM_SELF, 0, **alone), layout, 1 << 20)
usage = shutil.disk_usage
mpi_world.shutil.disk_usage = lambda path: usage(path)._replace(free=layout.nbytes - 1)
reader = memory.reader(0)
assert not any([memory.make_room(2) or time.sleep(0.01) for _ in range(20)])
del reader
assert memory.make_room(2)
reader, began = memory.reader(1), time.monotonic()
try:
    while not memory.make_room(3):
        time.sleep(0.01)
except ExchangeError as error:
    print(error)
assert 0.5 * mpi_world.READ_DEADLINES <= time.monotonic() - began < 10

mpi_world.shutil.disk_usage = usage
del reader
assert memory.make_room(3)
older = memory.reader(1)
assert memory.make_room(3)
reader = memory.reader(1)
try:
    while not memory.make_room(3):
        time.sleep(0.01)
except ExchangeError as error:
    print(error)
"""


@pytest.mark.mpi
def test_readers_are_waited_for_with_an_end_if_there_is_no_memory_beside_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, env=ENVIRONMENT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "has read old weights for 2 s, and there is no memory for newer ones" in done.stdout
    assert "has read old weights for 2 s, and another rank there has read older ones: it h" in done.stdout


@pytest.mark.mpi
def test_what_somebody_reads_is_not_overwritten_and_two_copies_are_the_rule(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=ENVIRONMENT, timeout=120
    )
    assert done.returncode == 0 and "held" in done.stdout, done.stderr
