"""What a storm reads out of a run's records, on records that are written down here."""

from pathlib import Path

import pytest
from slurm_testbed.trial import History

from tba_hpc.run.directory import RunDir

CHECKPOINTS = [{"event": "checkpoint", "step": 5}, {"event": "checkpoint", "step": 10}]


@pytest.mark.parametrize(
    ("since", "behind"),
    [
        ([{"event": "resumed", "step": 10}], 0),
        ([{"event": "resumed", "step": 5}], 1),
        ([{"event": "started", "step": 0}], 1),
        ([{"event": "damaged", "step": 10}, {"event": "resumed", "step": 5}], 0),
        ([{"event": "damaged", "step": 5}, {"event": "resumed", "step": 5}], 1),
        (
            [
                {"event": "damaged", "step": 10},
                {"event": "damaged", "step": 5},
                {"event": "resumed", "step": 0},
            ],
            0,
        ),
        ([{"event": "resumed", "step": 5}, {"event": "resumed", "step": 5}], 2),
    ],
)
def test_a_resume_is_held_against_the_newest_checkpoint_that_is_whole(
    since: list[dict[str, object]], behind: int, tmp_path: Path
) -> None:
    history = History(RunDir(tmp_path))
    history.trainer = [{"step": 1}, *CHECKPOINTS, *since]
    assert history.resumes_behind() == behind
