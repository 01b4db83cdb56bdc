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
from typing import Any

from lab import skill
from lab.lockstep_model import Run, measure
from lab.runs import read_json, slug

from tba_hpc.run.files import write_atomic
from tba_hpc.run.signals import die_with


def runs(arms: list[dict[str, Any]]) -> Iterator[tuple[str, Run]]:
    """Every run with the name of its arm."""
    for arm in arms:
        varied = {key: value for key, value in arm.items() if key not in ("name", "overrides")}
        lists = [value if isinstance(value, list) else [value] for value in varied.values()]
        for values in product(*lists):
            given = dict(zip(varied, values, strict=True))
            yield arm["name"], Run(overrides=overrides(arm.get("overrides", {})), **given)


def overrides(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """As ``--set`` takes them: {"train.beta": 1} as ``train.beta=1``."""
    return tuple(f"{key}={json.dumps(value)}" for key, value in tree.items())


def file_of(folder: Path, name: str, run: Run) -> Path:
    """Where its figures go."""
    what = f"lag{run.lag}-rate{run.rate:g}-steps{run.steps}-seed{run.seed}"
    return folder / f"{slug(name)}-{what}.json"


def made(path: Path, run: Run) -> bool:
    """Whether the file is of a run with the same settings."""
    found, settings = read_json(path), json.loads(json.dumps(asdict(run)))
    return found is not None and settings == {key: found.get(key) for key in settings}


def keep(path: Path, name: str, run: Run) -> str:
    """Make a run, in a process of its own, and its file; returns its scores, %."""
    found = {"name": name, **measure(run)}
    write_atomic(path, json.dumps(found) + "\n")
    return " ".join(f"{100 * score:.0f}" for _, score in found["curve"])


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
            print(f"{jobs[job].stem}: {f'failed: {error}' if error else job.result()}", flush=True)
    return not failed


def main(argv: list[str] | None = None) -> None:
    """Run what is missing. Exit status 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", type=Path, help="the list of arms")
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures, one file a run")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, a core each (default 1)")
    arguments = parser.parse_args(argv)
    named = list(runs(json.loads(arguments.arms.read_text())))
    for _, run in named:
        run.config()  # whatever is wrong is said before hours have gone
    arguments.out.mkdir(parents=True, exist_ok=True)
    skill.MODEL.make(0)
    wanted = {file_of(arguments.out, name, run): (name, run) for name, run in named}
    sys.exit(0 if screen(wanted, arguments.workers) else 1)


if __name__ == "__main__":
    main()
