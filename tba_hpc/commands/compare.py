"""``tba compare``: runs beside one another: what differs in their configs, what they came to, their curves.

It reads runs and changes nothing of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tba_hpc.config import Config, ConfigError, differences, value_text
from tba_hpc.evaluate.estimates import Estimate, difference, wilson
from tba_hpc.report.summary import RunData, Summary, summary_of
from tba_hpc.report.tables import NOTHING, Cell, duration, percent, print_rows
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation
from tba_hpc.run.files import write_atomic

NAMES = ("run.name", "run.root")
"""Keys that tell runs apart and nothing else."""


OF_REFERENCE = ("perplexity before", "perplexity after", "KL")
"""Figures that say nothing beside those to another reference."""

LEFT_OUT = "KL and perplexity are left out: these runs have different references"


@dataclass(frozen=True, slots=True)
class Compared:
    """A run among others. before, after: the score on the held-out prompts, None if it was not measured.

    gain: of ``after`` over that of the first run, as of unpaired prompts; None of the first run itself.
    """

    name: str
    config: Config
    data: RunData
    summary: Summary
    before: Estimate | None
    after: Estimate | None
    gain: Estimate | None


def compare(paths: Sequence[Path]) -> list[Compared]:
    """Read some runs, at any moment of them. Raises ConfigError if there is only one, or one is no run."""
    if len(set(paths)) < 2:
        raise ConfigError(f"{paths[0]} alone is nothing to compare: name two runs or more")
    runs = [RunDir.open(path) for path in dict.fromkeys(paths)]
    found = [(run, run.config(), RunData.read(run)) for run in runs]
    unique = len({run.path.name for run in runs}) == len(runs)
    first = _after(found[0][2].test())
    return [
        Compared(
            name=run.path.name if unique else str(run.path),
            config=config,
            data=data,
            summary=summary_of(data, config),
            before=_score(data.test()[:1]),
            after=(after := _after(data.test())),
            gain=difference(after, first) if after and first and run is not runs[0] else None,
        )
        for run, config, data in found
    ]


def _after(test: list[Evaluation]) -> Estimate | None:
    return _score(test[-1:]) if len(test) > 1 else None


def _score(evaluations: list[Evaluation]) -> Estimate | None:
    return next((wilson(e.correct, e.total) for e in evaluations), None)


def config_rows(runs: Sequence[Compared]) -> list[dict[str, str]]:
    """A row for each key whose values differ, by run."""
    base = runs[0].config
    each = [differences(base, run.config) for run in runs]
    keys = dict.fromkeys(key for pairs in each for key in pairs if key not in NAMES)
    of_base = {key: was for pairs in each for key, (was, _) in pairs.items()}
    return [
        {
            "key": key,
            **{
                run.name: value_text(pairs[key][1] if key in pairs else of_base[key])
                for run, pairs in zip(runs, each, strict=True)
            },
        }
        for key in keys
    ]


def score_rows(runs: Sequence[Compared]) -> list[dict[str, str]]:
    """A row for each figure, by run."""
    columns = [_figures(run) for run in runs]
    left_out = () if share_reference(runs) else OF_REFERENCE
    return [
        {"figure": figure, **{run.name: column[figure] for run, column in zip(runs, columns, strict=True)}}
        for figure in columns[0]
        if figure not in left_out
    ]


def share_reference(runs: Sequence[Compared]) -> bool:
    """Whether KL and perplexity of these runs are to one reference; those to what sampled have none."""
    models = {
        (
            config.model.path,
            config.model.logprob_temperature,
            config.train.reference.name == "frozen" or run.name,
        )
        for run in runs
        if (config := run.config).train.reference.scored
    }
    return len(models) < 2


def _figures(run: Compared) -> dict[str, str]:
    summary, figures = run.summary, run.summary.figures
    last = {name: figures.get(f"search/{name}") for name in ("reward", "kl", "entropy", "length")}
    return {
        "score": summary.score_name,
        "before": _share(run.before),
        "after": _share(run.after),
        "more than the first": _points(run.gain),
        "held-out prompts": _number(summary.test_prompts),
        "perplexity before": _number(summary.perplexity_before),
        "perplexity after": _number(summary.perplexity_after),
        "reward": _number(last["reward"]),
        "KL": _number(last["kl"]),
        "entropy": _number(last["entropy"]),
        "tokens per completion": _number(last["length"]),
        "staleness": _number(summary.staleness),
        "optimizer steps": f"{summary.steps:,}" + ("" if summary.finished else ", unfinished"),
        "training time": duration(summary.train_seconds),
        "trajectories": f"{summary.trajectories:,}",
        "alerts": f"{len(summary.alerts)}",
    }


def _share(found: Estimate | None) -> str:
    return f"{percent(found.value)} ({100 * found.low:.1f} … {100 * found.high:.1f})" if found else NOTHING


def _points(found: Estimate | None) -> str:
    if found is None:
        return NOTHING
    text = f"{100 * found.value:+.1f} points ({100 * found.low:+.1f} … {100 * found.high:+.1f})"
    return text.replace("-", "−")


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def print_comparison(runs: Sequence[Compared], *, as_json: bool = False) -> None:
    """Two tables, or JSON."""
    if as_json:
        print(json.dumps(values(runs), indent=2))
        return
    differing: list[dict[str, Cell]] = [dict(row) for row in config_rows(runs)]
    print_rows(differing or [{"key": "their configs do not differ"}])
    print()
    print_rows([dict(row) for row in score_rows(runs)])
    print("\nin brackets: 95 % intervals; differences as of unpaired prompts")
    if not share_reference(runs):
        print(LEFT_OUT)


def values(runs: Sequence[Compared]) -> dict[str, Any]:
    """Everything but the curves in plain values: keys that differ, and by run its scores and its summary."""
    each = {
        run.name: {
            **{name: asdict(found) if found else None for name, found in _scores(run).items()},
            "summary": asdict(run.summary),
        }
        for run in runs
    }
    return {"config": config_rows(runs), "runs": each}


def _scores(run: Compared) -> dict[str, Estimate | None]:
    return {"before": run.before, "after": run.after, "gain": run.gain}


def write_comparison(path: Path, runs: Sequence[Compared]) -> None:
    """Write both tables and the curves, laid over each other, as one page. Raises ConfigError."""
    from tba_hpc.report.page import footer, template  # matplotlib costs a second
    from tba_hpc.report.plots import overlays, run_line

    text = template("compare.html.j2").render(
        title=" · ".join(run.name for run in runs),
        names=[run.name for run in runs],
        lines=[run_line(i) for i in range(len(runs))],
        tables=[config_rows(runs), score_rows(runs)],
        plots=overlays([run.data for run in runs], kl=share_reference(runs)),
        note="" if share_reference(runs) else LEFT_OUT,
        footer=footer(),
    )
    try:
        write_atomic(path, text)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path} ({error.strerror}): choose another place with --html"
        ) from None
