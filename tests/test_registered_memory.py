"""Which memory CUDA is told of, and when no longer, by a runtime that only takes notes."""

from __future__ import annotations

import logging
import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tba_hpc.core.weight_files import SHARED_MEMORY, WeightFile
from tba_hpc.learner.registered_memory import MAPS_KEPT, KeptMaps, RegisteredMemory, try_a_page

PAGE = mmap.PAGESIZE


class Cudart:
    """What is registered now, as first byte and length; refuses with an error."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls = 0
        self.ranges: dict[int, int] = {}

    def cudaHostRegister(self, first: int, nbytes: int, flags: int) -> int:
        self.calls += 1
        assert flags == 1 and all(first >= old + size or first + nbytes <= old for old, size in self.now)
        if not self.error:
            self.ranges[first] = nbytes
        return self.error

    def cudaHostUnregister(self, first: int) -> int:
        assert is_mapped(first), "unregistered after its pages were gone"
        del self.ranges[first]
        return 0

    @property
    def now(self) -> list[tuple[int, int]]:
        return list(self.ranges.items())


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as name:
        yield Path(name)


def weights(path: Path, nbytes: int = 10 * PAGE) -> WeightFile:
    path.write_bytes(bytes(nbytes))
    return WeightFile.open(path, nbytes, write=True)


@pytest.mark.parametrize(
    ("start", "end", "pages"),
    [(0, None, (0, 10)), (PAGE, 3 * PAGE, (1, 3)), (PAGE + 1, 3 * PAGE + 1, (1, 4)), (5, 6, (0, 1))],
)
def test_whole_pages_around_a_run_are_registered_once_while_its_map_lives(
    folder: Path, start: int, end: int | None, pages: tuple[int, int]
) -> None:
    cudart = Cudart()
    memory, data = RegisteredMemory(cudart), weights(folder / "0").map("r+")
    base = data.ctypes.data
    for _ in range(2):
        memory.register(data, start, end)
    first, last = pages
    assert cudart.now == [(base + first * PAGE, (last - first) * PAGE)] and cudart.calls == 1
    del data
    assert cudart.now == [] and not is_mapped(base)


def test_a_part_of_a_map_stays_registered_with_it(folder: Path) -> None:
    cudart = Cudart()
    memory, data = RegisteredMemory(cudart), weights(folder / "0").map("r+")
    memory.register(data[2 * PAGE : 4 * PAGE])
    assert cudart.now == [(data.ctypes.data + 2 * PAGE, 2 * PAGE)]


def test_nothing_is_registered_of_an_empty_run_or_without_a_gpu(folder: Path) -> None:
    cudart, data = Cudart(), weights(folder / "0").map("r+")
    RegisteredMemory(cudart).register(data, PAGE, PAGE)
    assert cudart.calls == 0
    assert not RegisteredMemory().works
    RegisteredMemory().register(data)


def test_what_cuda_refuses_is_noted_once_and_what_it_took_stays_right(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cudart = Cudart()
    memory, files = RegisteredMemory(cudart), [weights(folder / str(number)) for number in range(3)]
    maps = [file.map("r+") for file in files]
    memory.register(maps[0])
    cudart.error = 2
    with caplog.at_level(logging.WARNING):
        for data in maps[1:]:
            memory.register(data)
    assert [record.message.count("cudaError 2") for record in caplog.records] == [1]
    assert cudart.calls == 2 and not memory.works
    maps.clear()
    del data
    assert cudart.now == []


@pytest.mark.parametrize("error", [0, 801])
def test_a_page_tells_whether_cuda_registers_shared_memory(error: int) -> None:
    cudart = Cudart(error)
    assert try_a_page(cudart) == f"cudaError {error}"
    assert cudart.calls == 1 and cudart.now == []


def test_a_reader_keeps_the_maps_of_a_node_until_their_pages_are_others(folder: Path) -> None:
    """Two files take turns; one that was given back is mapped, and registered, anew."""
    cudart = Cudart()
    kept, files = KeptMaps(RegisteredMemory(cudart)), [weights(folder / str(number)) for number in range(3)]
    for version in range(6):
        file = files[version % 2]
        file.map("r+")[:] = version
        assert (kept.map(file) == version).all()
    assert cudart.calls == len(cudart.now) == MAPS_KEPT
    files[0].give_back()
    files[0].generation += 1
    files[0].map("r+")[:] = 9
    assert (kept.map(files[0]) == 9).all() and cudart.calls == 3
    kept.map(files[2])
    assert len(cudart.now) == MAPS_KEPT


def test_only_files_in_memory_are_shared_with_what_reads_them(folder: Path, tmp_path: Path) -> None:
    """Pages of other files may be refused, or written back to the disk; these are private copies."""
    cudart = Cudart()
    kept = KeptMaps(RegisteredMemory(cudart))
    for file in (weights(tmp_path / "0"), WeightFile.copy_of(np.zeros(100, np.uint8))):
        kept.map(file)[:] = 1
        assert not file.map("r").any() and not file.in_shared_memory
    assert cudart.calls == 0
    unnamed = weights(folder / "0")
    (folder / "0").unlink()
    assert unnamed.in_shared_memory
    without = KeptMaps(RegisteredMemory())
    without.map(unnamed)[:] = 1
    assert not unnamed.map("r").any()
