"""A run as pandas tables, as ``tba_hpc.read`` returns it to a notebook.

pandas is imported only when a table is requested, since nothing else in this package needs it.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_hpc.config import Config
from tba_hpc.report.data import RunData
from tba_hpc.report.samples.select import Query, run_decoder, select
from tba_hpc.run.directory import RunDir
from tba_hpc.run.history import History
from tba_hpc.run.metrics import read_metrics

if TYPE_CHECKING:
    from pandas import DataFrame


class RunFrames:
    """Tables of a run, each read from disk when it is first requested and then kept.

    To see newer data, call ``tba_hpc.read`` again. path: the run directory. Raises ConfigError for a path of
    another kind. Tables raise ModuleNotFoundError if pandas is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.run = RunDir.open(path)

    def __repr__(self) -> str:
        return f"tba_hpc.read({str(self.run.path)!r})"

    @cached_property
    def config(self) -> Config:
        """Config of the run."""
        return self.run.config()

    @cached_property
    def metrics(self) -> DataFrame:
        """One row per optimizer step, indexed by ``step``, with a column for each metric of trainer.jsonl.

        If a resume repeated a step, its row has the later values.
        """
        records = History.read(self.run).steps
        return _frame([{"step": 0, **record} for record in records], ["step", "time"]).set_index("step")

    @cached_property
    def searchers(self) -> DataFrame:
        """One row per record of a searcher, in order of time; column ``searcher`` is its index.

        A searcher writes about one record per second, or fewer if there are more than eight searchers.
        """
        records = [
            {"searcher": index, **record}
            for index, path in self.run.searcher_files().items()
            for record in read_metrics(path)
            if "event" not in record
        ]
        return _frame(records, ["searcher", "time"]).sort_values("time", ignore_index=True)

    @cached_property
    def evaluations(self) -> DataFrame:
        """One row per complete evaluation: split, step, score with its 95 % interval, perplexity, counts.

        score: the run's score, see ``RunData.score_name``. low, high: ends of its interval. reward: mean over
        the answers that have a reward. correct: number of correct answers. ended_score: share of answers that
        are correct and not cut off by a limit. The last two are missing if the task calls no answer correct.
        Other columns: see ``Evaluation``.
        """
        counts, of_correct = ["perplexity", "total", "tokens", "truncated"], ["ended_score", "correct"]
        names = ["split", "step", "score", "low", "high", "reward", *of_correct, *counts]
        rows, data = [], RunData.read(self.run)
        for found in data.evaluations.values():
            score = data.score(found)
            reward = found.rewards / found.graded if found.graded else None
            known = (found.split, found.step, score.value, score.low, score.high, reward)
            right = (getattr(found, name) if found.tells_correct else None for name in of_correct)
            more = (getattr(found, name) for name in counts)
            rows.append(dict(zip(names, (*known, *right, *more), strict=True)))
        return _frame(rows, names).sort_values(["split", "step"], ignore_index=True)

    @cached_property
    def samples(self) -> DataFrame:
        """One row per trajectory on disk, oldest weights first, with the fields of ``tba samples --json``."""
        found = select(self.run, Query(order="oldest", limit=None), run_decoder(self.run))
        return _frame([sample.values() for sample in found.samples], ["uid", "reward"])


def _frame(rows: list[dict[str, Any]], columns: list[str]) -> DataFrame:
    """Return a table of ``rows``, or an empty table with ``columns`` if there are no rows.

    Raises ModuleNotFoundError if pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "tba_hpc.read gives pandas tables, and pandas is not installed: pip install 'tba-hpc[notebook]'"
        ) from None
    return pandas.DataFrame(rows) if rows else pandas.DataFrame(columns=columns)
