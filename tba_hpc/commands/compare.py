"""``tba compare``: shows side by side how the configs of runs differ, their results, and their curves.

The command reads the runs and changes nothing in them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tba_hpc.config import ConfigError, RewardSection, flat
from tba_hpc.core.wording import mean_reward
from tba_hpc.report.data import RunData, history_text
from tba_hpc.report.estimates import Estimate, difference, paired_difference
from tba_hpc.report.summary import Summary, summary_of, summary_rows
from tba_hpc.report.tables import NOTHING, cell_text, print_rows
from tba_hpc.run.directory import RunDir
from tba_hpc.run.inputs import have_same_prompts

NAMES = ("run.name", "run.root")
"""Config keys that only identify a run, and so differ between any two runs."""

OF_REFERENCE = ("perplexity before", "perplexity after", "KL")
"""Figures that can only be compared between runs with the same reference."""

DIFFERENCES = (
    'those of differences are called "paired" if both runs answered the same prompts, with the number of '
    "prompts whose scores differ; others treat the prompts of two runs as independent"
)
"""Remark on the intervals of differences."""

LEFT_OUT = "KL and perplexity are left out: these runs have different references"
"""Remark in place of the figures OF_REFERENCE."""

OTHER_SCORES = "there is no difference of scores between different tasks or rewards"
"""Remark in place of a difference."""

OTHER_CODE = "the runs' code differs: a difference of scores may be one of their rewards"
"""Remark on scores that different versions of the user's code gave."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One of the runs that are compared.

    gain: final score of this run minus that of the first run. It is None for the first run, if a score is
    missing, or if the scores do not measure the same thing. gaps: the same difference for each prompt, from
    which the interval of ``gain`` is computed. Empty if the two did not answer the same prompts; the interval
    then treats their prompts as independent.
    """

    name: str
    data: RunData
    summary: Summary
    gain: Estimate | None
    gaps: Sequence[float] = ()


def compare(paths: Sequence[Path]) -> list[Compared]:
    """Read at least two runs, finished or not. Raises ConfigError for fewer, or if a path is not a run."""
    if len(set(paths)) < 2:
        raise ConfigError(f"{paths[0]} is the only run given: name at least one other to compare it with")
    runs = [RunDir.open(path) for path in dict.fromkeys(paths)]
    unique = len({run.path.name for run in runs}) == len(runs)
    found: list[Compared] = []
    for run in runs:
        data = RunData.read(run)
        name, summary = run.path.name if unique else str(run.path), summary_of(data)
        after, first, gain, gaps = summary.score_after, found[0] if found else None, None, []
        if first and after and first.summary.score_after and _score_of(first.data) == _score_of(data):
            gaps = _gaps(data, first.data)
            gain = (
                paired_difference(gaps, graded=data.graded)
                if gaps
                else difference(after, first.summary.score_after)
            )
        found.append(Compared(name, data, summary, gain, gaps))
    return found


def _gaps(data: RunData, first: RunData) -> list[float]:
    """Return by how much a run's final score of each test prompt exceeds the first run's.

    Returns [] if the two runs did not answer the same prompts, or if an answer of either was not judged. If
    the score is the mean reward (``data.graded``), it also returns [] if an answer has no reward.
    """
    after, before = (run.evaluated("test")[-1] for run in (data, first))
    if data.graded and (after.graded, before.graded) != (after.total, before.total):
        return []
    if not len(after.results) == len(before.results) == after.total == before.total:
        return []
    if after.results.keys() != before.results.keys() or not have_same_prompts(data.run, first.run, "test"):
        return []
    return [score - before.results[prompt] for prompt, score in after.results.items()]


def _score_of(data: RunData) -> tuple[object, ...]:
    """Return what a run's score measures, in a form that is equal for runs with comparable scores."""
    task = data.config.task
    return data.score_name, task.name, task.reward


def config_rows(runs: Sequence[Compared]) -> list[dict[str, str]]:
    """Return a row for each config key, or file of the user's code, that differs, with a column per run.

    Where a resume changed a key, its earlier values come first: ``0.0005 → 0.0001``. Absolute paths that
    differ only in ``..`` count as equal. Defaults of a reward that another run lacks are left out.
    """
    each = {run.name: _histories(run.data) | _code(run.data.run) for run in runs}
    rows = []
    for key in dict.fromkeys(key for known in each.values() for key in known if key not in NAMES):
        values = {name: known.get(key, [None]) for name, known in each.items()}
        equal = all(history == values[runs[0].name] for history in values.values())
        if not (equal or _is_default(key, values.values())):
            rows.append({"key": key} | {name: history_text(history) for name, history in values.items()})
    return rows


def _is_default(key: str, histories: Iterable[list[object]]) -> bool:
    """Return whether ``key`` belongs to a reward, and each run lacks it or has the default of a reward."""
    field = RewardSection.model_fields.get(key.rpartition(".")[2])
    if field is None or not key.startswith("task.reward."):
        return False
    return all(history in ([None], [field.default]) for history in histories)


def _histories(data: RunData) -> dict[str, list[object]]:
    """Return, by dotted config key, the values that the key has had, the present one last."""
    now, past = flat(data.config.model_dump(mode="json")), data.past_values
    return {key: [_plain(one) for one in [*past.get(key, []), value]] for key, value in now.items()}


def _code(run: RunDir) -> dict[str, list[object]]:
    """Return the beginning of the SHA-256 of each file of the user's code in the run, by its path there."""
    files = [path for path in sorted(run.modules.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    digests = (hashlib.sha256(path.read_bytes()).hexdigest()[:8] for path in files)
    return {f"{path.relative_to(run.path)}": [digest] for path, digest in zip(files, digests, strict=True)}


def _plain(value: object) -> object:
    """Return ``value``; if it is an absolute path, resolve each ``..`` in it."""
    return os.path.normpath(value) if isinstance(value, str) and value.startswith("/") else value


def score_rows(runs: Sequence[Compared]) -> list[dict[str, str]]:
    """Return a row for each figure of the runs' summaries, with a column per run."""
    columns = [_figures(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    left_out = () if share_reference(runs) else OF_REFERENCE
    return [
        {
            "figure": name,
            **{run.name: column.get(name, NOTHING) for run, column in zip(runs, columns, strict=True)},
        }
        for name in names
        if name not in left_out
    ]


def share_reference(runs: Sequence[Compared]) -> bool:
    """Return whether all runs that compute log π_ref use the same frozen model, at the same temperature."""
    models = {
        (
            config.model.path,
            config.model.logprob_temperature,
            config.train.reference.name == "frozen" or run.name,
        )
        for run in runs
        if (config := run.data.config).train.reference.scored
    }
    return len(models) < 2


def remarks(runs: Sequence[Compared]) -> list[str]:
    """Return what to bear in mind when the figures of these runs are compared."""
    codes = [_code(run.data.run) for run in runs]
    measures = [_score_of(run.data) for run in runs if run.summary.score_after]
    found = {
        LEFT_OUT: not share_reference(runs),
        OTHER_SCORES: any(measure != measures[0] for measure in measures),
        OTHER_CODE: any(code != codes[0] for code in codes),
    }
    return [*over_seeds(runs), *(remark for remark, holds in found.items() if holds)]


def over_seeds(runs: Sequence[Compared]) -> list[str]:
    """Return the mean and the sample standard deviation of the final scores of runs that differ only in seed.

    Each group of at least two such runs has a sentence. Unfinished runs are left out.
    """
    groups: dict[str, list[Compared]] = {}
    for run in runs:
        setup = _histories(run.data) | _code(run.data.run)
        if run.summary.finished and run.summary.score_after:
            alike = {key: history for key, history in setup.items() if key not in (*NAMES, "run.seed")}
            groups.setdefault(repr(alike), []).append(run)
    return [_mean_over_seeds(group) for group in groups.values() if len(group) > 1]


def _mean_over_seeds(runs: Sequence[Compared]) -> str:
    data = runs[0].data
    scores = [run.summary.score_after.value for run in runs if run.summary.score_after]
    spread = stdev(scores)
    deviation = mean_reward(spread) if data.graded else f"{100 * spread:.1f} points"
    seeds = ", ".join(str(run.data.config.run.seed) for run in runs)
    average = f"{data.show(fmean(scores))} on average, with a standard deviation of {deviation}"
    return f"{data.config.run.name}, seeds {seeds}: {data.score_name} after is {average}"


def _figures(run: Compared) -> dict[str, str]:
    rows = {name: cell_text(value) for name, value in summary_rows(run.summary).items()}
    rows["optimizer steps"] += "" if run.summary.finished else ", unfinished"
    before, after = (f"{run.summary.score_name} {when}" for when in ("before", "after"))
    scores = {before: rows[before], after: rows[after], f"{after}, minus the first": _difference(run)}
    return {**scores, **rows}


def _difference(run: Compared) -> str:
    if (found := run.gain) is None:
        return NOTHING
    if run.data.graded:
        value, low, high = (mean_reward(one, "+") for one in (found.value, found.low, found.high))
        text = f"{value} ({low} … {high})"
    else:
        text = f"{100 * found.value:+.1f} points ({100 * found.low:+.1f} … {100 * found.high:+.1f})"
    unequal = f", paired, {sum(gap != 0 for gap in run.gaps)} of {len(run.gaps)} differ"
    return text.replace("-", "−") + (unequal if run.gaps else "")


def print_comparison(runs: Sequence[Compared], *, as_json: bool = False) -> None:
    """Print a table of differing config keys and one of figures; or both and more as JSON, see ``values``."""
    if as_json:
        print(json.dumps(values(runs), indent=2))
        return
    print_rows(config_rows(runs) or [{"key": "their configs and code do not differ"}])
    print()
    print_rows(score_rows(runs))
    print("", f"in brackets: 95 % intervals; {DIFFERENCES}", *remarks(runs), sep="\n")


def values(runs: Sequence[Compared]) -> dict[str, Any]:
    """Return, as plain values, the config keys that differ, and the scores and summary of each run."""
    each = {}
    for run in runs:
        scores = {"before": run.summary.score_before, "after": run.summary.score_after, "gain": run.gain}
        known = {name: asdict(found) if found else None for name, found in scores.items()}
        each[run.name] = {**known, "paired": bool(run.gaps), "summary": asdict(run.summary)}
    return {"config": config_rows(runs), "runs": each}


def write_comparison(path: Path, runs: Sequence[Compared]) -> None:
    """Write both tables, and the runs' curves in common plots, as an HTML page.

    Raises ConfigError if the file cannot be written.
    """
    from tba_hpc.report.page import write_page  # matplotlib costs a second
    from tba_hpc.report.plots import overlays, run_line

    title = " · ".join(run.name for run in runs)
    write_page(
        path,
        "compare.html.j2",
        title=title,
        subtitle=title,
        names=[run.name for run in runs],
        lines=[run_line(i) for i in range(len(runs))],
        tables=[config_rows(runs), score_rows(runs)],
        plots=overlays([run.data for run in runs], kl=share_reference(runs)),
        remarks=[DIFFERENCES, *remarks(runs)],
    )
