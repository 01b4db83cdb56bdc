"""Train the tiny model in lockstep in many ways, a process and a thread each, and keep the figures.

    python tools/screen.py ARMS.json --out FOLDER [--workers 2]

ARMS.json is a list such as

    [{"name": "tb", "lag": [0, 10], "rate": 1e-4, "seed": [0, 1, 2], "steps": 200},
     {"name": "clipped", "overrides": {"train.objective": {"name": "dr_grpo", "ratio_clip": 0.1}}}]

Of every setting in a list each value is run with each of the others. What is left out is as in
lab.lockstep_model.Run. A run whose file is in FOLDER, with the same settings, is not made again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from lab import skill
from lab.lockstep_model import Run, measure
from lab.runs import log, read_json, slug

from tba_hpc.run.files import write_atomic
from tba_hpc.run.signals import die_with

LAST = 3
"""Evaluations at the end whose mean is told as a run's outcome."""


def runs(arms: list[dict[str, Any]]) -> Iterator[tuple[str, Run]]:
    """Every run with the name of its arm, arms innermost, so that they can soon be compared."""
    expanded = [list(_expand(arm)) for arm in arms]
    longest = max(map(len, expanded), default=0)
    yield from (found[i] for i in range(longest) for found in expanded if i < len(found))


def _expand(arm: Mapping[str, Any]) -> Iterator[tuple[str, Run]]:
    varied = {key: value for key, value in arm.items() if key not in ("name", "overrides")}
    lists = [value if isinstance(value, list) else [value] for value in varied.values()]
    for values in product(*lists):
        given = dict(zip(varied, values, strict=True))
        yield arm["name"], Run(overrides=overrides(arm.get("overrides", {})), **given)


def overrides(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """{"train.rate": 1} and {"train": {"rate": 1}} as ``train.rate=1``."""
    return tuple(_overrides(tree))


def _overrides(tree: Mapping[str, Any]) -> Iterator[str]:
    for key, value in tree.items():
        if "." not in key and isinstance(value, dict):
            yield from _overrides({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            yield f"{key}={json.dumps(value)}"


def file_of(folder: Path, name: str, run: Run) -> Path:
    """Where its figures go."""
    what = f"lag{run.lag}-rate{run.rate:g}-steps{run.steps}-seed{run.seed}"
    return folder / f"{slug(name)}-{what}.json"


def line(name: str, found: Mapping[str, Any]) -> str:
    """What is said of a finished run."""
    scores = [100 * score for _, score in found["curve"]]
    curve, seconds = " ".join(f"{score:.0f}" for score in scores), sum(found["seconds"].values())
    what = f"{name} seed {found['seed']} lag {found['lag']} rate {found['rate']:g}"
    return f"{what}: {mean(scores[-LAST:]):.1f} %   [{curve}]   {seconds:.0f} s"


def made(path: Path, run: Run) -> bool:
    """Whether the file is of a run with the same settings."""
    found = read_json(path)
    settings = json.loads(json.dumps(asdict(run)))
    return found is not None and settings == {key: found.get(key) for key in settings}


def keep(path: Path, name: str, run: Run) -> str:
    """Make a run, in a process of its own, and its file; what is said of it."""
    found = {"name": name, **measure(run)}
    write_atomic(path, json.dumps(found) + "\n")
    return line(name, found)


def screen(wanted: Mapping[Path, tuple[str, Run]], workers: int) -> bool:
    """Make what is missing, and tell of each as it ends; whether none failed."""
    missing = {path: of for path, of in wanted.items() if not made(path, of[1])}
    spawned, failed = multiprocessing.get_context("spawn"), False
    end_with_us = (os.getpid(), signal.SIGKILL)
    with ProcessPoolExecutor(workers, spawned, initializer=die_with, initargs=end_with_us) as pool:
        jobs = {pool.submit(keep, path, *of): path for path, of in missing.items()}
        for job in as_completed(jobs):
            error = job.exception()
            failed |= error is not None
            print(f"{jobs[job].stem} failed: {error}" if error else job.result(), flush=True)
    return not failed


def main(argv: list[str] | None = None) -> None:
    """Run what is missing. Exit status 1 where a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", type=Path, help="the list of arms")
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures, one file a run")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, a core each (default 1)")
    arguments = parser.parse_args(argv)
    arms = json.loads(arguments.arms.read_text())
    wanted = {file_of(arguments.out, name, run): (name, run) for name, run in runs(arms)}
    for _, run in wanted.values():
        run.config()  # whatever is wrong is said before hours have gone
    arguments.out.mkdir(parents=True, exist_ok=True)
    skill.MODEL.make(0)
    log.print(f"{sum(made(path, run) for path, (_, run) in wanted.items())} of {len(wanted)} are there")
    sys.exit(0 if screen(wanted, arguments.workers) else 1)


if __name__ == "__main__":
    main()
