"""What is particular to the exchange over files: the files themselves, attempts, a full disk."""

import errno
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tba_hpc.config import ConfigError
from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.prompts import Progress
from tba_hpc.core.types import Publication, Split, WeightLayout
from tba_hpc.exchange.file_exchange import (
    MOST_WAITING,
    FileSearcherExchange,
    FileTrainerExchange,
    read_weights,
)
from tba_hpc.exchange.weight_changes import LONGEST_CHAIN

LAYOUT = WeightLayout.of([("a", (3, 5)), ("b", (7,)), ("c", (2, 1, 2))], "F32")


def trainer(
    folder: Path,
    done: set[tuple[Split, int]] | None = None,
    attempt: str = "first",
    layout: WeightLayout = LAYOUT,
) -> FileTrainerExchange:
    """A leader without shards. Of bfloat16 weights it writes what has changed, of float32 all."""
    return FileTrainerExchange(
        folder,
        layout,
        attempt=attempt,
        read_pending=lambda cursors: [],
        progress=Progress(),
        evaluated=lambda split, version: (split, version) in (done or ()),
    )


def publish(exchange: FileTrainerExchange, version: int, evaluate: Split | None = None) -> None:
    """Publish bytes that all equal ``version``; back when they are on disk."""
    while not exchange.publish(
        Publication(version=version, evaluate=evaluate), lambda out: out.fill(version)
    ):
        pass
    while not exchange.gather():
        pass


def searcher(folder: Path, deadline: float = 60, attempt: str = "first") -> FileSearcherExchange:
    """A searcher that looks at every call."""
    return FileSearcherExchange(folder, 0, attempt=attempt, deadline=deadline)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_hpc.exchange.file_exchange.MANIFEST_CHECK_SECONDS", 0.0)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", ["step-000001.safetensors", "latest.json", "progress"])
def test_what_lies_in_the_place_of_a_file_is_named(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    """A folder cannot be mapped, and a pipe would be waited for: a sentence, not the deadline's."""
    exchange = trainer(tmp_path)
    publish(exchange, 1)
    while not exchange.idle:
        time.sleep(0.01)
    (tmp_path / name).unlink()
    make(tmp_path / name)

    def join() -> None:
        reader = searcher(tmp_path)
        reader.progress()
        reader.poll()

    with pytest.raises(
        ConfigError, match=f"{name} is not a regular file but a folder, pipe or device: remove it"
    ):
        join()


FIRST_LOOKS = """
import sys, threading, time
from pathlib import Path
from tba_hpc.exchange.file_exchange import Manifest
def slow(frame, event, argument):
    if frame.f_code.co_name == "get_dataclass_info":
        time.sleep(0.05)
def look(i):
    time.sleep(i * 0.02)
    assert Manifest.read(Path(sys.argv[1])).entries
threading.settrace(slow)
threads = [threading.Thread(target=look, args=(i,)) for i in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_threads_may_look_for_the_first_time_at_once(tmp_path: Path) -> None:
    """While msgspec builds what it knows of a dataclass, slowly here; a process of its own, as that died."""
    exchange = trainer(tmp_path)
    publish(exchange, 1)
    exchange.close()
    assert subprocess.run([sys.executable, "-c", FIRST_LOOKS, str(tmp_path)], timeout=60).returncode == 0


def versions(folder: Path) -> list[int]:
    """Weights on disk."""
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.safetensors"))


def test_weights_whose_copy_fails_are_never_shown(tmp_path: Path) -> None:
    """As if another trainer rank had died while it copied its part."""

    def lost() -> None:
        raise ExchangeError("a rank is gone")

    exchange = trainer(tmp_path)
    assert exchange.publish(Publication(version=7), lambda out: lost)
    with pytest.raises(ExchangeError, match="a rank is gone"):
        rest(exchange)
    assert versions(tmp_path) == [] and searcher(tmp_path).poll() is None


def test_weights_are_plain_safetensors(tmp_path: Path) -> None:
    values = np.arange(LAYOUT.nbytes // 4, dtype=np.float32)
    exchange = trainer(tmp_path)
    exchange.publish(Publication(version=42), lambda out: np.copyto(out, values.view(np.uint8)))
    exchange.close()
    path = tmp_path / "step-000042.safetensors"
    tensors = load_file(path)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "a": (3, 5),
        "b": (7,),
        "c": (2, 1, 2),
    }
    assert np.array_equal(np.concatenate([tensors[name].ravel() for name in "abc"]), values)
    layout, file = read_weights(path)
    assert layout == LAYOUT and np.array_equal(file.map("r").view(np.float32), values)


def test_superseded_weights_go_unless_they_wait_for_their_evaluation(tmp_path: Path) -> None:
    done: set[tuple[Split, int]] = set()
    exchange = trainer(tmp_path, done)
    for version in range(6):
        publish(exchange, version, "validation" if version in (1, 3) else None)
    assert versions(tmp_path) == [1, 3, 4, 5]
    done.add(("validation", 1))
    publish(exchange, 6)
    assert versions(tmp_path) == [3, 5, 6]
    exchange.close()


def test_what_is_never_evaluated_does_not_fill_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that a searcher that has died was to take part in; the newest stay, for one that is slow."""
    exchange = trainer(tmp_path)
    publish(exchange, 0, "test")  # with which all later scores are compared
    for version in range(1, 10):
        publish(exchange, version, "validation")
    assert versions(tmp_path) == [0, *range(9 - MOST_WAITING, 10)]
    told = [record.message for record in caplog.records]
    assert (
        len(told) == 8 - MOST_WAITING
        and "weights of step 1 are removed before their validation is" in told[0]
    )
    exchange.close()


def test_who_follows_one_that_was_killed_lets_go_what_that_held(tmp_path: Path) -> None:
    exchange = trainer(tmp_path)
    publish(exchange, 1)
    update = searcher(tmp_path).poll()
    others = FileSearcherExchange(tmp_path, 3, attempt="first", deadline=60).poll()
    assert update is not None and others is not None
    searcher(tmp_path)
    for version in range(2, 5):
        publish(exchange, version)
    assert [path.name[:11] for path in tmp_path.glob("held-*")] == ["held-0003-0"]
    exchange.close()


def test_a_late_searcher_takes_what_is_to_be_evaluated_first_then_the_newest(tmp_path: Path) -> None:
    exchange = trainer(tmp_path)
    for version in range(6):
        publish(exchange, version, {1: "validation", 3: "test"}.get(version))
    late = searcher(tmp_path)
    taken = [late.poll() for _ in range(4)]
    assert [
        (u.publication.version, u.publication.evaluate, int(u.data[0])) if u else None for u in taken
    ] == [*((1, "validation", 1), (3, "test", 3), (5, None, 5)), None]
    exchange.close()


def test_weights_that_a_full_disk_gives_no_name_are_left_to_another_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def link(source: Path, name: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(name))

    publish(trainer(tmp_path), 4)
    exchange = searcher(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(os, "link", link)
        assert exchange.poll() is None
    update = exchange.poll()
    assert update and (update.data == 4).all()


def test_a_resume_goes_on_where_the_attempt_before_ended(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    publish(first, 8, "validation")
    first.close()
    reader = searcher(tmp_path, attempt="second")
    assert not reader.closed, "the end of an earlier attempt is not the end of this one"
    assert (update := reader.poll()) and update.publication.version == 8
    second = trainer(tmp_path, attempt="second")
    publish(second, 4)  # from an older checkpoint
    assert (update := reader.poll()) and update.publication == Publication(version=4)
    second.close()
    assert reader.closed


def test_a_silent_trainer_is_an_error(tmp_path: Path) -> None:
    waiting = searcher(tmp_path, deadline=0.05)
    with pytest.raises(ExchangeError, match=r"the trainer has not changed .*latest\.json for 0\.05 s"):
        while True:
            waiting.poll()


@pytest.mark.parametrize("ended", [False, True])
def test_a_trainer_has_as_long_to_start_whether_the_attempt_before_ended_or_crashed(
    tmp_path: Path, ended: bool
) -> None:
    before = trainer(tmp_path)
    publish(before, 8)
    if ended:
        before.close()
    waiting = FileSearcherExchange(tmp_path, 0, attempt="second", deadline=60, start_deadline=0.05)
    with pytest.raises(ExchangeError, match=r"the trainer has not changed .*latest\.json for 0\.05 s"):
        give_up = time.monotonic() + 20
        while time.monotonic() < give_up:
            waiting.poll()


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"\x02\0\0\0\0\0\0\0{}x"])
def test_damaged_weights_are_left_out_until_others_come(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    exchange, reader = trainer(tmp_path), searcher(tmp_path)
    publish(exchange, 1)
    rest(exchange)
    (tmp_path / "step-000001.safetensors").write_bytes(data)
    assert reader.poll() is None and "is damaged" in caplog.text
    publish(exchange, 2)
    update = reader.poll()
    assert update is not None and update.publication.version == 2
    exchange.close()


def test_a_resume_names_a_damaged_list_of_weights(tmp_path: Path) -> None:
    """A searcher takes it for one that is not visible yet."""
    trainer(tmp_path).close()
    path = tmp_path / "latest.json"
    path.write_bytes(path.read_bytes().replace(b"attempt", b"attemqt"))
    with pytest.raises(ConfigError, match=r"latest.json is damaged: .* remove it, and start the same run"):
        trainer(tmp_path)
    assert searcher(tmp_path).poll() is None


def test_a_stop_of_the_attempt_before_is_forgotten(tmp_path: Path) -> None:
    def stop_seen(exchange: FileTrainerExchange) -> bool:
        publish(exchange, 1)
        exchange.close()
        return exchange.stop_requested

    first = trainer(tmp_path)
    searcher(tmp_path).request_stop()
    assert stop_seen(first)
    assert not stop_seen(trainer(tmp_path))


def test_what_a_kill_left_of_the_board_is_removed(tmp_path: Path) -> None:
    """By the trainer alone, between writing the file and renaming it."""
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tba_hpc.exchange.file_exchange import Manifest\n"
        "Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Manifest('first').write(Path(sys.argv[1]))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)])
    assert len(list(tmp_path.iterdir())) == 1
    trainer(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {"latest.json", "progress"}


def test_a_full_disk_is_a_sentence_and_leaves_nothing_visible(tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow beyond a few kilobytes."""
    program = (
        "import sys; from pathlib import Path\n"
        "from tba_hpc.exchange.file_exchange import FileTrainerExchange\n"
        "from tba_hpc.core.prompts import Progress\n"
        "from tba_hpc.core.types import Publication, WeightLayout\n"
        "folder, layout = Path(sys.argv[1]), WeightLayout.of([('w', (100_000,))], 'F32')\n"
        "trainer = FileTrainerExchange(\n"
        "    folder, layout, attempt='first', read_pending=lambda c: [], progress=Progress(),\n"
        "    evaluated=lambda s, v: True)\n"
        "trainer.publish(Publication(version=0), lambda out: out.fill(0))\n"
        "trainer.close()\n"
    )
    limit: Callable[[], None] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))  # noqa: E731
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, preexec_fn=limit
    )
    assert "DiskFullError: cannot write " in done.stderr
    assert versions(tmp_path) == []
    assert json.loads((tmp_path / "latest.json").read_text())["entries"] == []


def test_what_an_attempt_allowed_ends_with_it(tmp_path: Path) -> None:
    """A searcher that comes before a resume publishes must not begin groups or ask for the old reference."""
    before = trainer(tmp_path)
    before.publish(Publication(version=8, reference=5, budget_end=100), lambda out: out.fill(8))
    before.close()
    trainer(tmp_path)
    update = searcher(tmp_path).poll()
    assert update is not None
    assert update.publication == Publication(version=8, reference=0, budget_end=0)


# --- Weights as what has changed ---

LARGER = WeightLayout.of([("a", (700, 64)), ("b", (33,))], "BF16")


def weights_of(version: int, share: float = 0.01) -> np.ndarray:
    """uint8 [LARGER.nbytes]: of all versions alike, but for a share of the bytes."""
    rng = np.random.default_rng(version)
    weights = np.random.default_rng(99).integers(0, 256, LARGER.nbytes, np.uint8)
    weights[rng.random(LARGER.nbytes) < share] ^= 1 + version
    return weights


def tell(exchange: FileTrainerExchange, publication: Publication, share: float = 0.01) -> None:
    """Publish the weights of a version; back when they are on disk."""
    weights = weights_of(publication.version, share)
    assert exchange.publish(publication, lambda out: np.copyto(out, weights))
    rest(exchange)


def rest(exchange: FileTrainerExchange) -> None:
    """Wait until no round is under way."""
    while not exchange.idle:
        time.sleep(0.001)


def assert_takes(reader: FileSearcherExchange, version: int, share: float = 0.01) -> None:
    update = reader.poll()
    assert update is not None and update.publication.version == version and update.layout == LARGER
    assert np.array_equal(update.data, weights_of(version, share)) and not update.data.flags.writeable


def files(folder: Path) -> list[str]:
    """Of weights, w, and of changes, c, each with its version."""
    return sorted(
        f"{path.suffix[1].replace('s', 'w')}{int(path.name[5:11])}" for path in folder.glob("step-*")
    )


def test_every_searcher_gets_the_whole_weights_whatever_it_has_missed(tmp_path: Path) -> None:
    """One that takes all, one that skips versions, one that comes late; and their files are few and small."""
    exchange, diligent, idle = trainer(tmp_path, layout=LARGER), searcher(tmp_path), searcher(tmp_path)
    for version in range(8):
        tell(exchange, Publication(version=version))
        assert_takes(diligent, version)
        if version in (2, 5, 7):
            assert_takes(idle, version)
    assert files(tmp_path) == [*(f"c{version}" for version in range(1, 8)), "w0"]
    assert_takes(searcher(tmp_path), 7)
    assert max(path.stat().st_size for path in tmp_path.glob("*.changes")) < 0.1 * LARGER.nbytes
    exchange.close()


def test_weights_lie_there_whole_where_they_are_evaluated_or_have_changed_too_much(tmp_path: Path) -> None:
    exchange, reader = trainer(tmp_path, layout=LARGER), searcher(tmp_path)
    tell(exchange, Publication(version=0))
    tell(exchange, Publication(version=1))
    tell(exchange, Publication(version=2, evaluate="validation"))
    assert files(tmp_path) == ["c1", "w0", "w2"], "the end of a chain may just be read"
    tell(exchange, Publication(version=3))
    assert files(tmp_path) == ["c3", "w2"]
    tell(exchange, Publication(version=4), share=0.9)
    tell(exchange, Publication(version=5, final=True))
    assert files(tmp_path) == ["w2", "w4", "w5"]
    assert_takes(reader, 2)
    assert_takes(reader, 5)
    exchange.close()


@pytest.mark.parametrize(("share", "length"), [(0.001, LONGEST_CHAIN), (0.03, 2)])
def test_a_chain_has_an_end(tmp_path: Path, share: float, length: int) -> None:
    """After so many changes, or where they have come to half of the weights: who comes must read them all."""
    exchange, reader = trainer(tmp_path, layout=LARGER), searcher(tmp_path)
    for version in range(length + 1):
        tell(exchange, Publication(version=version), share)
        assert_takes(reader, version, share)
    assert len(files(tmp_path)) == length + 1 and files(tmp_path)[-1] == "w0"
    tell(exchange, Publication(version=length + 1), share)
    tell(exchange, Publication(version=length + 2), share)
    assert files(tmp_path) == [f"c{length + 2}", f"w{length + 1}"]
    assert_takes(reader, length + 2, share)
    exchange.close()


def test_a_resumed_trainer_goes_on_with_whole_weights(tmp_path: Path) -> None:
    """From an older step; who comes before finds the last weights of the attempt before."""
    first, reader = trainer(tmp_path, layout=LARGER), searcher(tmp_path)
    for version in range(5):
        tell(first, Publication(version=version))
    assert_takes(reader, 4)
    second = trainer(tmp_path, layout=LARGER)
    assert_takes(searcher(tmp_path), 4)
    for version in (3, 4, 5):
        tell(second, Publication(version=version), share=0.02)
        assert_takes(reader, version, share=0.02)
    assert files(tmp_path) == ["c4", "c5", "w3"]
    second.close()


@pytest.mark.parametrize("damage", ["a bit", "cut short"])
def test_damaged_changes_are_left_out_until_whole_weights_come(tmp_path: Path, damage: str) -> None:
    exchange, reader, healthy = trainer(tmp_path, layout=LARGER), searcher(tmp_path), searcher(tmp_path)
    tell(exchange, Publication(version=0))
    assert_takes(reader, 0)
    tell(exchange, Publication(version=1))
    assert_takes(healthy, 1)
    (path,) = tmp_path.glob("*.changes")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data if damage == "a bit" else data[:-3])
    assert reader.poll() is None and reader.poll() is None
    tell(exchange, Publication(version=2))
    assert reader.poll() is None, "these are changes of what is damaged"
    assert_takes(healthy, 2)
    tell(exchange, Publication(version=3), share=0.9)
    assert_takes(reader, 3, share=0.9)
    exchange.close()
    assert reader.closed


@pytest.mark.parametrize("damage", ["a bit", "gone"])
def test_weights_that_were_given_out_stay_until_newer_ones_are_whole(tmp_path: Path, damage: str) -> None:
    """Two changes are missed, of which the second is damaged, or superseded between two looks."""
    exchange, reader = trainer(tmp_path, layout=LARGER), searcher(tmp_path)
    for version in range(2):
        tell(exchange, Publication(version=version))
    taken = reader.poll()
    assert taken is not None
    for version in (2, 3):
        tell(exchange, Publication(version=version))
    (path,) = tmp_path.glob("step-000003*")
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    assert reader.poll() is None
    assert np.array_equal(taken.data, weights_of(1))
    exchange.close()
