"""What may be trained on: whole runs with bounded staleness and every kind of reference, killed and resumed.

``tabular_run``'s learner refuses every batch that is too stale or scored by the wrong reference.
"""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL, SIGTERM

import numpy as np
import pytest
import tabular_run

from tba_hpc.config import Config, parse_config
from tba_hpc.core.types import BEHAVIOUR
from tba_hpc.exchange.file_exchange import Manifest
from tba_hpc.exchange.hdf5_shards import read_arrays, read_shard
from tba_hpc.loops.restoring import require_reference
from tba_hpc.report.audit import audit
from tba_hpc.run.checkpoints import BUFFER_FILE, StateError, checkpoint_folders
from tba_hpc.run.directory import RunDir
from tba_hpc.run.history import History
from tba_hpc.run.metrics import read_metrics

BOUNDED = {"initial_completions": 15, "capacity_per_prompt": 40, "capacity": 400}


def go(run: RunDir, *, searchers: int, sent: object = None, nth: int = 0) -> None:
    """One start, to its end; what it leaves must be clean."""
    process = tabular_run.start(run, searchers=searchers, sent=sent, nth=nth)  # type: ignore[arg-type]
    process.join(240)
    assert process.exitcode == (-SIGKILL if sent is SIGKILL else 0)
    assert audit(run).problems == ()


def staleness(run: RunDir) -> list[int]:
    """The largest of every step of the surviving history."""
    records = History.read(run).steps
    assert [record["step"] for record in records] == list(range(1, run.config().train.steps + 1))
    return [int(str(record["staleness/max"])) for record in records]


def sealed(run: RunDir) -> int:
    """Groups of all starts."""
    return sum(len(record["request_ids"]) for record in events(run, "merged"))  # type: ignore[arg-type]


def events(run: RunDir, name: str) -> list[dict[str, object]]:
    """The trainer's events of that name."""
    return [dict(r) for r in read_metrics(run.metrics_file("trainer")) if r.get("event") == name]


def make(
    root: Path,
    *,
    train: dict[str, object],
    exchange: dict[str, object],
    buffer: dict[str, object] | None = None,
) -> tuple[Config, RunDir]:
    """A short run with a checkpoint every four steps."""
    config = tabular_run.make_config(
        root,
        train={"steps": 14, **train},
        exchange=exchange,
        checkpoint={"every": 4},
        buffer={**BOUNDED, **(buffer or {})},
    )
    return config, RunDir.create(config)


def test_bound_0_is_the_synchronous_baseline(tmp_path: Path) -> None:
    """Every step learns from its own policy; one publish and B groups a step, none of them in vain."""
    config, run = make(tmp_path, train={}, exchange={"sync_every": 1, "max_staleness": 0})
    go(run, searchers=2)
    assert staleness(run) == [0] * config.train.steps
    assert sealed(run) == config.train.steps * config.train.prompts_per_step
    rounds = [record["sync/publishes"] for record in History.read(run).steps]
    assert rounds == list(range(1, config.train.steps + 1))


def test_bound_0_goes_on_after_a_kill_with_other_searchers(tmp_path: Path) -> None:
    """The resume begins before what is sealed on disk: request_ids done long ago, by weights taken back."""
    config, run = make(tmp_path, train={}, exchange={"sync_every": 1, "max_staleness": 0})
    go(run, searchers=2, sent=SIGKILL, nth=8)
    go(run, searchers=3)
    assert staleness(run) == [0] * config.train.steps
    assert events(run, "resumed")[0]["step"] == 4


def test_a_bound_and_resets_hold_over_a_stop_and_a_kill(tmp_path: Path) -> None:
    """Stopped between two resets, then killed just after one: the third start meets its stale reference."""
    _, run = make(
        tmp_path,
        train={"reference": {"name": "reset", "every": 3}},
        exchange={"sync_every": 2, "max_staleness": 3},
    )
    go(run, searchers=2, sent=SIGTERM, nth=5)
    go(run, searchers=1, sent=SIGKILL, nth=6)
    assert run.reference(9).is_dir()
    go(run, searchers=2)
    assert 0 < max(staleness(run)) <= 3
    assert len(events(run, "reset")) >= 4
    kept = ["step-000009", "step-000012"]  # from that of the older checkpoint, of step 12, where it might end
    assert [folder.name for folder in checkpoint_folders(run, complete=True)] == [
        "step-000012",
        "step-000014",
    ]
    assert sorted(path.name for path in run.references.iterdir()) == kept
    assert run.references.stat().st_mode & 0o777 == 0o700
    require_reference(run, parse_config(run.config().model_dump(mode="json"), ["train.steps=12"]), 12)
    assert events(run, "evicted")


def test_after_the_last_step_nothing_is_reset_unless_the_run_goes_on(tmp_path: Path) -> None:
    """Stopped with all twelve steps done, it has its end left to do, under the reference of the last step."""
    _, run = make(tmp_path, train={"steps": 12, "reference": {"name": "reset", "every": 3}}, exchange={})
    go(run, searchers=1, sent=SIGTERM, nth=12)
    assert not run.finished
    for steps, last in ((12, 9), (14, 12)):
        run.adapt([f"train.steps={steps}"])
        go(run, searchers=1)
        manifest = Manifest.read(run.weights)
        assert run.finished and manifest and manifest.entries[-1].publication.reference == last
        assert [event["step"] for event in events(run, "reset")] == list(range(3, last + 1, 3))


def test_with_a_replay_limit_the_trainer_waits_for_searchers_over_a_kill(tmp_path: Path) -> None:
    """S = 12, K = 8, once: no more is learned from than was merged, and all of it leaves."""
    queue = {"replay_limit": 1, "duplicates": "none", "capacity": 432, "capacity_per_prompt": 432}
    config, run = make(tmp_path, train={}, exchange={}, buffer=queue)
    go(run, searchers=2, sent=SIGKILL, nth=7)
    go(run, searchers=2)
    last = History.read(run).steps[-1]
    a_step = config.train.prompts_per_step * config.train.completions_per_prompt
    assert last["step"] == config.train.steps
    assert int(str(last["buffer/added"])) >= config.train.steps * a_step
    assert int(str(last["buffer/evicted"])) >= (config.train.steps - 1) * a_step, "the last leave later"
    assert events(run, "evicted")


def test_resets_alone_do_not_bound_staleness_and_old_references_are_missed(tmp_path: Path) -> None:
    """k does not divide ρ; the reference is given out at once. A resume without it is refused."""
    config, run = make(
        tmp_path, train={"reference": {"name": "reset", "every": 5}}, exchange={"sync_every": 4}
    )
    go(run, searchers=2)
    assert max(staleness(run)) <= 5 + 4
    require_reference(run, config, 14)
    for file in run.reference(10).iterdir():
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(StateError, match=r"reference of step 14, is damaged \(.* corrupt.* put a copy"):
            require_reference(run, config, 14)
        file.write_bytes(whole)
    require_reference(run, config, 14)
    run.reference(10).rename(tmp_path / "elsewhere")
    with pytest.raises(StateError, match="step-000010, the reference of step 14, is gone"):
        require_reference(run, config, 14)
    longer = parse_config(config.model_dump(mode="json"), ["train.steps=16"])
    require_reference(run, longer, 15)


def test_behaviour_is_its_own_reference_bit_by_bit(tmp_path: Path) -> None:
    _, run = make(tmp_path, train={"steps": 6, "reference": "behaviour"}, exchange={})
    go(run, searchers=1)
    for path in run.shard_files().values():
        shard = read_shard(path).trajectories
        assert (shard.record["reference"] == BEHAVIOUR).all()
        np.testing.assert_array_equal(shard.ref_logprobs, shard.logprobs)
    assert list(run.references.iterdir()) == []


@pytest.mark.parametrize(
    "reference", [pytest.param({}, marks=pytest.mark.nightly), {"name": "reset", "every": 3}]
)
def test_what_the_trainer_scores_is_scored_once_and_outlives_a_kill(
    reference: dict[str, object], tmp_path: Path
) -> None:
    """Shards leave it open; batches have it to the bit; a checkpoint keeps what was computed."""
    _, run = make(
        tmp_path, train={"reference": {**reference, "scored_by": "trainer"}}, exchange={"sync_every": 2}
    )
    go(run, searchers=2, sent=SIGKILL, nth=9)
    go(run, searchers=1)
    for path in run.shard_files().values():
        assert np.isnan(read_shard(path).trajectories.ref_logprobs).all()
    records = History.read(run).steps
    assert len(records) == 14 and all("time/learn_seconds" in record for record in records)
    assert "time/reference_seconds" in records[0]
    assert not any("search/kl" in record for record in read_metrics(run.metrics_file("searcher", 0)))
    kept = read_arrays(checkpoint_folders(run, complete=True)[-1] / BUFFER_FILE)["ref_logprobs"]
    known = np.isfinite(kept)
    assert known.any()
    if not reference:
        assert known.mean() > 0.5, "a buffer this small is sampled through"
