"""What was dropped before anything was learned from it, by length: counted, shown, and an alert."""

import re
from pathlib import Path

import numpy as np
import pytest
from recorded import new_run, write
from test_freshness import config_of, shard

from tba_hpc.config import parse_config
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.merger import Merger, by_tenths
from tba_hpc.report import page
from tba_hpc.report.alerts import alerts
from tba_hpc.report.curves import Trends
from tba_hpc.report.data import RunData
from tba_hpc.report.tables import dropped_unlearned
from tba_hpc.run.checkpoints import TrainerState
from tba_hpc.run.metrics import MetricsWriter, read_metrics


def test_lengths_are_counted_by_tenths_of_the_longest() -> None:
    """Of 20 tokens: 1 and 2 are of the first tenth, 19 and 20 of the last."""
    assert by_tenths(np.array([1, 2, 3, 18, 19, 20, 20]), 20) == [2, 1, 0, 0, 0, 0, 0, 0, 1, 3]
    assert by_tenths(np.array([1, 3]), 3) == [1, 0, 0, 0, 0, 0, 1, 0, 0, 0]


def test_an_eviction_tells_of_what_no_step_has_learned_from(tmp_path: Path) -> None:
    """Of three requests of two completions of two tokens, one was in a batch, with one of its two."""
    config = config_of(
        exchange={"max_staleness": 2}, generator={"max_tokens": 20}, train={"completions_per_prompt": 2}
    )
    buffer, metrics = ReplayBuffer(config.buffer, 0), MetricsWriter(tmp_path / "trainer.jsonl")
    merger = Merger(config, buffer, CompletedRequests(), Freshness(config, buffer), metrics)
    state = merger.merge(TrainerState(), [shard(0, request_id) for request_id in range(3)], sync=0)
    buffer.sample(0, groups=1, group_size=1)
    state = merger.evict_stale(TrainerState(step=2, revision=state.revision))
    merger.evict_stale(TrainerState(step=3, revision=state.revision))
    *merged, evicted = read_metrics(tmp_path / "trainer.jsonl")
    assert [record["lengths"] for record in merged] == [[2, *[0] * 9]] * 3
    assert not any("unlearned" in record for record in merged)
    assert (evicted["evicted"], evicted["unlearned"]) == (6, [4, *[0] * 9])


CAME = [1000, 1000, 1000, 500, 400, 300, 200, 100, 0, 0]


def told(*unlearned: int) -> Trends:
    """Of a run that all of these came to."""
    trends = Trends()
    trends.take({"time": 0.0, "event": "merged", "step": 1, "lengths": CAME})
    trends.take({"time": 0.0, "event": "evicted", "step": 1, "unlearned": [*unlearned]})
    return trends


def test_the_share_of_every_tenth_is_told_where_anything_was_dropped(tmp_path: Path) -> None:
    assert dropped_unlearned(Trends().by_length) == dropped_unlearned(told(*[0] * 10).by_length) == ""
    words = "95 of 4,500 trajectories (2.1 %); of each tenth of generator.max_tokens, in %: "
    assert (
        dropped_unlearned(told(10, 0, 0, 0, 0, 0, 20, 65, 0, 0).by_length) == words + "1 0 0 0 0 0 10 65 0 0"
    )
    run = new_run(tmp_path)
    lines = [{"time": 1.0, "event": "merged", "step": 1, "lengths": CAME, "unlearned": [45, *[0] * 9]}]
    write(run.metrics_file("trainer"), lines)
    shown = [row.what for row in page.events(RunData.read(run))]
    words = (
        "45 of 4,500 trajectories (1.0 %); of each tenth of generator.max_tokens, in %: 4 0 0 0 0 0 0 0 0 0"
    )
    assert shown == ["dropped unlearned, too stale or too late: " + words]


@pytest.mark.parametrize(
    ("unlearned", "exchange", "buffer", "remedy"),
    [
        ((0, 0, 0, 0, 0, 0, 5, 10, 0, 0), {"max_staleness": 4}, {}, "Set buffer.replay_limit=1.* Raise ex"),
        (
            (9, 0, 0, 0, 8, 0, 5, 10, 0, 0),
            {"max_staleness": 4},
            {"replay_limit": 1},
            r"2 %.* answers. Raise e",
        ),
        (
            (0, 0, 0, 0, 0, 0, 5, 10, 0, 0),
            {},
            {"max_age_steps": 9},
            "Raise buffer.max_age_steps, or lower gen",
        ),
        ((0, 0, 0, 0, 0, 0, 5, 4, 0, 0), {"max_staleness": 4}, {}, None),
        ((99, 99, 99, 50, 40, 30, 20, 10, 0, 0), {"max_staleness": 4}, {}, None),
    ],
)
def test_that_long_completions_are_dropped_raises_an_alert(
    unlearned: tuple[int, ...], exchange: dict[str, object], buffer: dict[str, object], remedy: str | None
) -> None:
    """Of 1,000 completions beyond the fourth tenth: more than 1 %, and twice the share of the others."""
    config = parse_config({"model": {"path": "m"}, "exchange": exchange, "buffer": buffer})
    found = [alert.sentence for alert in alerts(told(*unlearned), config, [])]
    assert len(found) == (remedy is not None)
    if remedy:
        (sentence,) = found
        assert sentence.startswith("2 % of the completions longer than 4 tenths of generator.max_tokens")
        assert re.search(remedy, sentence)
