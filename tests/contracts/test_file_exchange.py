"""What is particular to the exchange over files: the files themselves, attempts, a full disk."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tba_hpc.backends.file_exchange import FileSearcherExchange, FileTrainerExchange, read_weights
from tba_hpc.ports import ExchangeError
from tba_hpc.prompts import Progress
from tba_hpc.types import Publication, Split, WeightLayout

LAYOUT = WeightLayout.of([("a", (3, 5)), ("b", (7,)), ("c", (2, 1, 2))], "F32")


def trainer(folder: Path, done: set[tuple[Split, int]] | None = None) -> FileTrainerExchange:
    """A leader without shards."""
    return FileTrainerExchange(
        folder,
        LAYOUT,
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


def searcher(folder: Path, deadline: float = 60) -> FileSearcherExchange:
    """A searcher that looks at every call."""
    return FileSearcherExchange(folder, 0, deadline=deadline)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_hpc.backends.file_exchange.POLL_SECONDS", 0.0)


def versions(folder: Path) -> list[int]:
    """Weights on disk."""
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.safetensors"))


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
    layout, data = read_weights(path)
    assert layout == LAYOUT and np.array_equal(data.view(np.float32), values)


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


def test_a_late_searcher_takes_what_is_to_be_evaluated_first_then_the_newest(tmp_path: Path) -> None:
    exchange = trainer(tmp_path)
    for version in range(6):
        publish(exchange, version, {1: "validation", 3: "test"}.get(version))
    late = searcher(tmp_path)
    taken = [late.poll() for _ in range(4)]
    assert [
        (u.publication.version, u.publication.evaluate, int(u.data[0])) if u else None for u in taken
    ] == [
        *((1, "validation", 1), (3, "test", 3), (5, None, 5)),
        None,
    ]
    exchange.close()


def test_held_weights_outlive_their_file(tmp_path: Path) -> None:
    exchange, reader = trainer(tmp_path), searcher(tmp_path)
    publish(exchange, 1)
    update = reader.poll()
    for version in range(2, 6):
        publish(exchange, version)
    assert versions(tmp_path) == [4, 5]
    assert update is not None and (update.data == 1).all()
    exchange.close()


def test_a_resume_goes_on_where_the_attempt_before_ended(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    publish(first, 8, "validation")
    first.close()
    reader = searcher(tmp_path)
    assert not reader.closed, "the end of an earlier attempt is not the end of this one"
    assert (update := reader.poll()) and update.publication.version == 8
    second = trainer(tmp_path)
    publish(second, 4)  # from an older checkpoint
    assert (update := reader.poll()) and update.publication == Publication(version=4)
    second.close()
    assert reader.closed


def test_a_silent_trainer_is_an_error(tmp_path: Path) -> None:
    waiting = searcher(tmp_path, deadline=0.05)
    with pytest.raises(ExchangeError, match=r"the trainer has not changed .*latest\.json for 0\.05 s"):
        while True:
            waiting.poll()


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
        "from tba_hpc.backends.file_exchange import Manifest\n"
        "Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Manifest('first').write(Path(sys.argv[1]))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)])
    assert len(list(tmp_path.iterdir())) == 1
    trainer(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["latest.json"]


def test_a_full_disk_is_a_sentence_and_leaves_nothing_visible(tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow beyond a few kilobytes."""
    program = (
        "import sys; from pathlib import Path\n"
        "from tba_hpc.backends.file_exchange import FileTrainerExchange\n"
        "from tba_hpc.prompts import Progress\n"
        "from tba_hpc.types import Publication, WeightLayout\n"
        "folder, layout = Path(sys.argv[1]), WeightLayout.of([('w', (100_000,))], 'F32')\n"
        "trainer = FileTrainerExchange(\n"
        "    folder, layout, read_pending=lambda c: [], progress=Progress(), evaluated=lambda s, v: True)\n"
        "trainer.publish(Publication(version=0), lambda out: out.fill(0))\n"
    )
    limit: Callable[[], None] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))  # noqa: E731
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, preexec_fn=limit
    )
    assert "DiskFullError: cannot write weights of 0.4 MB" in done.stderr
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
