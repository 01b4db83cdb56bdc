"""Shards on disk: what is sealed comes back bit by bit, what is broken is refused with a sentence."""

import dataclasses
import io
import itertools
import multiprocessing
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import h5py
import numpy as np
import pytest

from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.types import (
    FINISH_REASONS,
    RECORD,
    Completion,
    Group,
    Prompt,
    Request,
    Sampling,
    Shard,
    Trajectories,
    make_uid,
)
from tba_hpc.exchange import hdf5_shards
from tba_hpc.exchange.hdf5_shards import (
    HEADER_BYTES,
    SCHEMA,
    AnotherVersionError,
    PendingShards,
    ShardError,
    ShardWriter,
    read_arrays,
    read_shard,
    write_arrays,
    write_shard,
)
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import DiskFullError

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=50)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """An empty run directory; the config plays no part here."""
    run = RunDir(tmp_path / "run")
    run.shards.mkdir(parents=True)
    return run


def scored(request_id: int, prompt_id: int, n: int = 4, tokens: int = 12) -> tuple[Group, list[float], list]:
    """A group with random completions, rewards and reference log-probabilities; a few are conversations."""
    random = np.random.default_rng([request_id, prompt_id])
    prompt = Prompt(prompt_id, np.arange(prompt_id, prompt_id + 3, dtype=np.int32), "4")
    completions = [
        Completion(
            random.integers(0, 1000, length).astype(np.int32),
            -random.exponential(size=length).astype(np.float32),
            FINISH_REASONS[length * 3 // (tokens + 1)],
        )
        for length in random.integers(1, tokens + 1, n)
    ]
    for completion in completions:
        completion.logprobs[1 : len(completion.tokens) // 2] = np.nan
    versions = np.sort(random.integers(0, 9, (n, 2)), axis=1).astype(np.int32)
    group = Group(Request(prompt, request_id, n, SAMPLING), tuple(completions), versions)
    references = [completion.logprobs - np.float32(0.5) for completion in completions]
    return group, random.normal(size=n).tolist(), references


def assert_equal(left: Trajectories, right: Trajectories) -> None:
    """Bitwise, dtypes included."""
    for a, b in zip(left.columns, right.columns, strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def sealed(run: RunDir, searcher: int = 3, groups: int = 3) -> tuple[Path, Shard]:
    """One shard on disk and what it holds."""
    writer = ShardWriter(run, searcher)
    for request_id in range(groups):
        writer.append(*scored(request_id, prompt_id=request_id % 2))
    shard = writer.seal()
    assert shard is not None
    return run.shard_file(searcher, shard.index), shard


# --- Round trip ---


def test_a_shard_holds_exactly_what_was_appended(run: RunDir) -> None:
    given = [scored(request_id=7 * i, prompt_id=i % 2) for i in range(3)]
    writer = ShardWriter(run, searcher=5, first_index=17)
    for group, rewards, references in given:
        writer.append(group, rewards, references)
    assert len(writer) == 12
    shard = writer.seal()
    assert shard is not None and len(writer) == 0 and writer.seal() is None
    assert (shard.searcher, shard.index) == (5, 17)

    t = shard.trajectories
    assert len(t.prompts) == 2  # prompt 0 came twice and is stored once
    assert t.record["uid"].tolist() == [make_uid(5, 17, row) for row in range(12)]
    rows = itertools.count()
    for group, rewards, references in given:
        for completion, reward, reference, versions in zip(
            group.completions, rewards, references, group.versions, strict=True
        ):
            row = next(rows)
            record = t.record[row]
            assert record["prompt_id"] == group.request.prompt.id
            assert record["request_id"] == group.request.id
            assert record["reward"] == np.float32(reward)
            assert [record["version_oldest"], record["version_newest"]] == versions.tolist()
            assert record["truncated"] == {"stop": 0, "length": 1, "turns": 2}[completion.finish_reason]
            np.testing.assert_array_equal(t.prompts.row(record["prompt_row"]), group.request.prompt.tokens)
            np.testing.assert_array_equal(t.completions.row(row), completion.tokens)
            span = slice(*t.completions.offsets[row : row + 2])
            np.testing.assert_array_equal(t.logprobs[span], completion.logprobs)
            np.testing.assert_array_equal(t.ref_logprobs[span], reference)


def test_read_returns_what_was_sealed_bit_by_bit(run: RunDir) -> None:
    path, shard = sealed(run)
    again = read_shard(path)
    assert (again.searcher, again.index) == (3, 0)
    assert_equal(again.trajectories, shard.trajectories)
    assert path == run.path / "shards" / "searcher-0003" / "000000.h5"


def test_the_same_shard_gives_the_same_bytes(run: RunDir, tmp_path: Path) -> None:
    path, shard = sealed(run)
    write_shard(tmp_path / "again.h5", shard)
    assert (tmp_path / "again.h5").read_bytes() == path.read_bytes()


def test_arrays_round_trip(tmp_path: Path) -> None:
    arrays = {
        "record": np.zeros(3, RECORD),
        "empty": np.empty(0, np.int64),
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bits": np.packbits(np.array([True, False, True])),
        "scalar": np.array(7, np.int64),
    }
    write_arrays(tmp_path / "buffer.h5", arrays)
    again = read_arrays(tmp_path / "buffer.h5")
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert again[name].dtype == array.dtype and again[name].shape == array.shape
        assert again[name].tobytes() == array.tobytes()


def test_other_programs_read_it_with_hdf5_1_10(run: RunDir) -> None:
    path, shard = sealed(run)
    with h5py.File(path, "r") as file:  # finds the image behind the user block by itself
        assert file.userblock_size == HEADER_BYTES
        assert file.attrs["format"] == "tba-hpc shard"
        assert (file.attrs["schema"], file.attrs["searcher"], file.attrs["index"]) == (SCHEMA, 3, 0)
        assert file.attrs["count"] == len(shard.trajectories)
        np.testing.assert_array_equal(file["completion_tokens"], shard.trajectories.completions.values)
        assert all(dataset.chunks is None for dataset in file.values())
    image = path.read_bytes()[HEADER_BYTES:]
    assert image[:8] == b"\x89HDF\r\n\x1a\n"
    assert image[8] == 0  # superblock version: 2 came with 1.8, 3 with 1.10


# --- The writer ---


def test_age_is_that_of_the_oldest_unsealed_completion(run: RunDir) -> None:
    now = iter([10.0, 12.5, 20.0])
    writer = ShardWriter(run, 0, clock=lambda: next(now))
    assert writer.age == 0.0
    writer.append(*scored(0, 0))  # at 10.0
    assert writer.age == 2.5
    writer.append(*scored(1, 1))  # takes no time: the first one counts
    assert writer.age == 10.0
    writer.seal()
    assert writer.age == 0.0


@pytest.mark.parametrize("others", [[], [3, 5]])
def test_a_request_of_a_group_without_completions_is_noted_as_set_aside(
    run: RunDir, others: list[int]
) -> None:
    """Also in a shard of its own, or a searcher of which all is set aside would be waited for."""
    writer = ShardWriter(run, 0)
    writer.append(*scored(4, 4, n=0))
    for request_id in others:
        writer.append(*scored(request_id, request_id))
    assert writer.age > 0.0
    sealed, (path,) = writer.seal(), run.shard_files().values()
    assert sealed and sealed.set_aside == read_shard(path).set_aside == (4,)
    assert read_shard(path).request_ids.tolist() == [*others, 4]
    assert set(read_shard(path).trajectories.record["request_id"].tolist()) == set(others)
    assert writer.age == 0.0 and writer.seal() is None


def test_an_index_is_never_used_twice(run: RunDir) -> None:
    def seal_one(first_index: int = 0) -> int:
        writer = ShardWriter(run, 2, first_index=first_index)
        writer.append(*scored(0, 0))
        shard = writer.seal()
        assert shard is not None
        return shard.index

    assert [seal_one(), seal_one()] == [0, 1]
    run.shard_file(2, 1).rename(run.shard_file(2, 1).with_suffix(".h5.refused"))
    assert seal_one() == 2  # 1 was set aside and stays taken
    for path in run.shard_files().values():
        path.unlink()
    assert seal_one(first_index=3) == 3  # all pruned: the checkpoint's cursor knows
    assert seal_one(first_index=3) == 4  # more was sealed since that checkpoint


DUELS = 200


def duel(folder: Path, mine: int, together: Barrier, told: Connection) -> None:
    """Be one of two that seal the first shard of a run, again and again; tell which duels were won."""
    won = []
    for number in range(DUELS):
        writer = ShardWriter(RunDir(folder / str(number)), 0)
        writer.append(*scored(number, mine, n=1, tokens=1))
        together.wait(60)
        try:
            writer.seal()
            won.append(number)
        except ExchangeError as error:
            assert "sealed already, by an earlier process of searcher 0" in str(error)
            assert len(writer) == 1
    told.send(won)


def test_of_two_that_seal_one_index_one_is_refused(tmp_path: Path) -> None:
    """Many duels: nothing is overwritten, and what is acknowledged once is on disk once."""
    fork = multiprocessing.get_context("fork")
    together, results = fork.Barrier(2), [fork.Pipe(duplex=False) for _ in range(2)]
    duellists = [
        fork.Process(target=duel, args=(tmp_path, mine, together, told))
        for mine, (_, told) in enumerate(results)
    ]
    for duellist in duellists:
        duellist.start()
    won = [set(heard.recv()) for heard, _ in results]
    for duellist in duellists:
        duellist.join()
    assert not won[0] & won[1] and won[0] | won[1] == set(range(DUELS))
    for mine, numbers in enumerate(won):
        for number in numbers:
            run = RunDir(tmp_path / str(number))
            assert [path.name for path in run.shard_folder(0).iterdir()] == ["000000.h5"]
            assert read_shard(run.shard_file(0, 0)).trajectories.record["prompt_id"].tolist() == [mine]


def test_leftovers_of_a_killed_writer_are_removed(run: RunDir) -> None:
    folder = run.shard_folder(0)
    folder.mkdir()
    (folder / ".000000.h5.123.tmp").write_bytes(b"half")
    ShardWriter(run, 0)
    assert list(folder.iterdir()) == []


def test_inconsistent_trajectories_are_never_sealed(run: RunDir) -> None:
    path, shard = sealed(run)
    path.unlink()
    broken = dataclasses.replace(shard.trajectories, logprobs=shard.trajectories.logprobs[:-1])
    with pytest.raises(ValueError, match="one logprob per token"):
        write_shard(path, Shard(3, 0, broken))
    assert not path.exists()


# --- Broken files ---


def test_every_truncation_is_refused_and_a_longer_file(run: RunDir, tmp_path: Path) -> None:
    path, _ = sealed(run)
    data = path.read_bytes()
    near_edges = [*range(70), 511, 512, 513, len(data) - 1]
    copy = tmp_path / "copy.h5"
    copy.write_bytes(data + b"\0")
    with pytest.raises(ShardError, match="corrupt"):
        read_shard(copy)
    for size in near_edges + random.Random(0).sample(range(len(data)), 200):
        copy.write_bytes(data[:size])
        with pytest.raises(ShardError, match="truncated") as caught:
            read_shard(copy)
        assert "\n" not in str(caught.value)


def test_every_flipped_bit_is_refused(run: RunDir, tmp_path: Path) -> None:
    path, _ = sealed(run, groups=1)
    data = bytearray(path.read_bytes())
    copy = tmp_path / "copy.h5"
    line = data.index(b"\n") + 1
    bits = [*range(8 * line), *random.Random(0).sample(range(8 * line, 8 * len(data)), 600)]
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
        copy.write_bytes(data)
        with pytest.raises(ShardError):
            read_shard(copy)
        data[bit // 8] ^= 1 << bit % 8


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["record"] = np.zeros(3, RECORD)
    with pytest.raises(ShardError, match="another program"):
        read_shard(path)
    path.write_text("not HDF5 at all")
    with pytest.raises(ShardError, match="another program"):
        read_shard(path)
    write_arrays(path, {"record": np.zeros(3, RECORD)})
    with pytest.raises(ShardError, match="is a file of kind arrays, not shard"):
        read_shard(path)


def forge(path: Path, write: Callable[[h5py.File], None]) -> None:
    """Change a shard as somebody may who can compute its checksum."""
    image = io.BytesIO(path.read_bytes())
    with h5py.File(image, "r+") as file:
        write(file)
    data = image.getbuffer()
    data[:HEADER_BYTES] = hdf5_shards._header("shard", data[HEADER_BYTES:], hdf5_shards.SCHEMA)
    path.write_bytes(data)


def put(name: str, *arguments: object, **options: object) -> Callable[[h5py.File], None]:
    """Replace an array."""

    def write(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, *arguments, **options)

    return write


def link(name: str, target: object) -> Callable[[h5py.File], None]:
    """Replace an array by a link."""

    def write(file: h5py.File) -> None:
        del file[name]
        file[name] = target

    return write


FORGED = {
    "another file's bytes": put("logprobs", (4,), "f4", external=[("/etc/hostname", 0, 16)]),
    "another file's array": link("logprobs", h5py.ExternalLink("/tmp/other.h5", "/logprobs")),
    "a soft link": link("logprobs", h5py.SoftLink("/ref_logprobs")),
    "a group": lambda file: file.create_group("more"),
    "numbers that are not there": put("logprobs", (1 << 33,), "f4"),
    "chunks": put("logprobs", (1 << 33,), "f4", chunks=(1024,)),
    "text": put("logprobs", data=["a", "b"]),
    "another type": put("completion_tokens", data=np.zeros(4, np.int64)),
    "another shape": put("logprobs", data=np.zeros((2, 2), np.float32)),
    "offsets that fall": lambda file: file["completion_offsets"].__setitem__(1, -1),
    "nothing": lambda file: file.__delitem__("record"),
    "no index": lambda file: file.attrs.__delitem__("index"),
    "a text for an index": lambda file: file.attrs.__setitem__("index", "one"),
    "many numbers for an index": lambda file: file.attrs.__setitem__("index", np.zeros(4000, np.int64)),
    "a fraction for an index": lambda file: file.attrs.__setitem__("index", 1.7),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_shard_reads_no_other_file_and_takes_no_memory(what: str, run: RunDir) -> None:
    path, _ = sealed(run)
    forge(path, FORGED[what])
    with pytest.raises(ShardError, match=r"was not written by|of another version|completion offsets"):
        read_shard(path)


def of_another_schema(path: Path, schema: int = SCHEMA + 1) -> None:
    shard = dataclasses.replace(read_shard(path), image=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdf5_shards, "SCHEMA", schema)
        path.write_bytes(hdf5_shards.with_image(shard).image or b"")


def of_another_record(path: Path) -> None:
    """As of a version whose RECORD has one field more."""
    record = np.zeros(4, [*RECORD.descr, ("of_another_version", "<f4")])
    forge(path, put("record", data=record))


@pytest.mark.parametrize("other", [SCHEMA - 1, SCHEMA + 1])
def test_another_schema_is_refused_by_its_number(other: int, run: RunDir) -> None:
    path, _ = sealed(run)
    of_another_schema(path, other)
    with pytest.raises(AnotherVersionError, match=f"schema {other}, this one reads schema {SCHEMA}"):
        read_shard(path)


def test_a_schema_that_was_damaged_is_no_other_version(run: RunDir) -> None:
    path, _ = sealed(run)
    path.write_bytes(path.read_bytes().replace(b"schema=%d" % SCHEMA, b"schema=%d" % (SCHEMA ^ 1), 1))
    with pytest.raises(ShardError, match="first line is damaged"):
        read_shard(path)
    assert list(PendingShards(run).read({})) == []
    assert [file.suffix for file in run.shard_folder(3).iterdir()] == [".refused"]


@pytest.mark.parametrize("become", [of_another_schema, of_another_record])
def test_a_shard_of_another_version_is_not_set_aside(become: Callable[[Path], None], run: RunDir) -> None:
    path, _ = sealed(run)
    become(path)
    before = path.read_bytes()
    pending = PendingShards(run)
    for read in (pending.read, pending.read_all):
        with pytest.raises(AnotherVersionError, match=r"of another version of tba-hpc .*: use the version"):
            list(read({}))
    assert [file.name for file in run.shard_folder(3).iterdir()] == [path.name]
    assert path.read_bytes() == before


# --- Resume ---


def test_pending_shards_come_in_order_from_the_cursors_on(run: RunDir) -> None:
    for searcher in (10, 2, 0):
        for _ in range(3):
            sealed(run, searcher, groups=1)
    (run.shard_folder(2) / "notes.h5").write_text("a stranger's file")
    found = [(shard.searcher, shard.index) for shard in PendingShards(run).read({2: 1, 10: 3})]
    assert found == [(0, 0), (0, 1), (0, 2), (2, 1), (2, 2)]


def test_broken_shards_are_set_aside_and_the_rest_goes_on(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    whole = [sealed(run, searcher=0, groups=1)[1] for _ in range(4)]
    run.shard_file(0, 1).write_bytes(run.shard_file(0, 1).read_bytes()[:-10])
    run.shard_file(0, 3).write_bytes(run.shard_file(0, 2).read_bytes())  # a copy: would be merged twice
    shards = list(PendingShards(run).read({}))
    assert [shard.index for shard in shards] == [0, 2]
    assert_equal(shards[1].trajectories, whole[2].trajectories)
    assert "truncated" in caplog.records[0].message and "000001.h5.refused" in caplog.records[0].message
    assert "a copy" in caplog.records[1].message
    assert len(list(PendingShards(run).read({}))) == 2 and len(caplog.records) == 2  # said once
    assert ShardWriter(run, 0).seal() is None
    assert sealed(run, searcher=0)[1].index == 4


def test_a_shard_of_another_run_is_set_aside(
    run: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever sealed without an identity, as version 0.3.0 did, is believed."""
    other = RunDir(tmp_path / "other")
    other.shards.mkdir(parents=True)
    for place, identity in ((run, "a11ce\n"), (other, "b0b\n")):
        sealed(place, searcher=0, groups=1)
        place.identity_file.write_text(identity)
        sealed(place, searcher=0, groups=1)
    sealed(other, searcher=0, groups=1)
    run.shard_file(0, 2).write_bytes(other.shard_file(0, 2).read_bytes())
    assert [(shard.index, shard.run) for shard in PendingShards(run).read({})] == [(0, 0), (1, 0xA11CE)]
    assert "was sealed by another run; set aside as 000002.h5.refused" in caplog.records[0].message


def test_a_shard_that_vanishes_while_others_are_read_is_passed_over(run: RunDir) -> None:
    for _ in range(3):
        sealed(run, searcher=0, groups=1)
    reading = PendingShards(run).read({})
    assert next(reading).index == 0
    run.shard_file(0, 1).unlink()
    assert [shard.index for shard in reading] == [2]


# --- Full disk ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this container does not let root mount a file system: run it privileged")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root("mounting a small file system")
def test_a_full_disk_loses_nothing_that_was_sealed(small_disk: Path) -> None:
    run = RunDir(small_disk)
    writer = ShardWriter(run, 0)
    kept: list[Shard] = []
    with pytest.raises(
        DiskFullError, match=r"No space left on device; free space .* nothing sealed"
    ) as caught:
        for request_id in range(1000):
            writer.append(*scored(request_id, request_id, n=8, tokens=200))
            shard = writer.seal()
            assert shard is not None
            kept.append(shard)
    assert "\n" not in str(caught.value) and len(kept) > 5
    files = sorted(path.name for path in run.shard_folder(0).iterdir())
    assert files == [f"{shard.index:06d}.h5" for shard in kept]  # no half file, visible or hidden
    for shard, again in zip(kept, PendingShards(run).read({}), strict=True):
        assert_equal(shard.trajectories, again.trajectories)

    run.shard_file(0, 0).unlink()  # space is freed: the groups are still there and the same index is taken
    assert len(writer) == 8
    shard = writer.seal()
    assert shard is not None and shard.index == len(kept)


# --- Durability ---


def seal_without_end(run: RunDir, told: Connection) -> None:
    """Tell the uids of each shard once it is sealed."""
    writer = ShardWriter(run, 0)
    for request_id in itertools.count():
        writer.append(*scored(request_id, request_id, n=16, tokens=250))
        shard = writer.seal()
        assert shard is not None
        told.send(shard.trajectories.record["uid"].tolist())


def test_killed_writers_lose_nothing_they_acknowledged(run: RunDir) -> None:
    fork = multiprocessing.get_context("fork")
    acknowledged: set[int] = set()
    for attempt in range(5):
        heard, told = fork.Pipe(duplex=False)
        writer = fork.Process(target=seal_without_end, args=(run, told))
        writer.start()
        told.close()
        acknowledged |= {*heard.recv()}
        time.sleep(0.02 + 0.017 * attempt)
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        with suppress(EOFError):  # at last, or in the middle of a message
            while True:
                acknowledged |= {*heard.recv()}

    found = [
        uid for path in run.shard_files().values() for uid in read_shard(path).trajectories.record["uid"]
    ]
    assert len(found) == len(set(found))
    assert acknowledged <= set(found)
