"""Weights in files that processes of a node map: shared, private, held by their readers, given back."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tba_hpc.core.types import Publication, WeightLayout, WeightUpdate
from tba_hpc.core.weight_files import WeightFile

READER = """
import sys
from pathlib import Path
from tba_hpc.core.weight_files import WeightFile
reader = WeightFile.open(sys.argv[1], 1000).reader()
print(int(reader.map("r").sum()), flush=True)
sys.stdin.readline()
"""


def test_readers_hold_weights_until_they_end(tmp_path: Path) -> None:
    """Also one in another process, which is killed, and one whose file has lost its name."""
    (tmp_path / "weights").write_bytes(bytes(1000))
    file = WeightFile.open(tmp_path / "weights", 1000, write=True)
    command = [sys.executable, "-c", READER, str(tmp_path / "weights")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "0\n"
        assert file.has_readers
        other.kill()
    assert not file.has_readers
    (tmp_path / "weights").unlink()
    reader = file.reader()
    copy = reader.map("r")
    file.map("r+")[:] = 3
    assert file.has_readers and (copy == 3).all()
    del reader
    assert not file.has_readers


def test_what_is_written_privately_nobody_else_sees() -> None:
    data = np.arange(200, dtype=np.uint8)
    file = WeightFile.copy_of(data)
    private = WeightFile.open(file.path, 150).map("c")
    private[:] = 0
    np.testing.assert_array_equal(file.map("r"), data)


def test_what_is_given_back_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(1 << 20))
    file, size = WeightFile.open(tmp_path / "weights", 1 << 20, write=True), (tmp_path / "weights").stat
    memory = file.map("r+")
    memory[:] = 1
    file.give_back()
    assert size().st_blocks == 0 and size().st_size == 1 << 20 and not memory.any()
    file.allocate()
    assert size().st_blocks * 512 >= 1 << 20


@pytest.mark.parametrize("in_file", [True, False])
def test_a_private_copy_of_received_weights_may_be_changed(in_file: bool) -> None:
    data, layout = np.arange(4, dtype=np.uint8), WeightLayout(())
    data.flags.writeable = False
    received = WeightUpdate(
        Publication(version=1), layout, data, WeightFile.copy_of(data) if in_file else None
    )
    received.private().data[0] = 9
    assert received.private().data.tolist() == received.data.tolist() == [0, 1, 2, 3]
