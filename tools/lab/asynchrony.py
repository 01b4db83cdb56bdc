"""Time to equal pass@1 on the same cores: asynchronous TBA, the same code made synchronous, TRL's GRPO.

All arms are tuned alike: each tries the same learning rates with one seed, and uses its best with other
seeds.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lab import skill
from lab.curves import Course, course_of, time_to
from lab.results import Panel, Result, Row, Series, Spread
from lab.runs import QUICKSTART, REPOSITORY, Options, Study, read_json, run, slug
from tba_hpc.config import Config

ASYNCHRONOUS, PEER = "asynchronous TBA", "TRL GRPO"
SYNCHRONOUS = "synchronous, 1 engine, then 1 trainer"
TWICE = "synchronous, 2 engines, then 2 trainers"

ON_POLICY = ("exchange.max_staleness=0", "exchange.sync_every=1", "buffer.most_on_policy=1")

QUEUE = ("exchange.sync_every=1", "buffer.replay_limit=1", "exchange.max_staleness=8")
"""Overrides of the asynchronous arm, which learns from each trajectory once, at most eight steps after it was
sampled. That is the default of a run without replay."""

ARMS = {
    ASYNCHRONOUS: ("launch.searchers=1", *QUEUE, "train.steps=300", "evaluate.every=40"),
    SYNCHRONOUS: (*ON_POLICY, "launch.searchers=1"),
    TWICE: (*ON_POLICY, "launch.searchers=2", "launch.trainers=2"),
}

TUNED_AS = {TWICE: SYNCHRONOUS}
"""Arm whose best rate another arm shares, because both take the same steps and differ in time alone."""

TUNING_SEED = 100

RATES = (1.25e-4, 2.5e-4, 5e-4)
"""Learning rates that every arm tries."""

SETTINGS = (
    *skill.SAMPLING,
    skill.BETA,
    "buffer.duplicates=none",
    "evaluate.test_prompts=1",
    "evaluate.every=20",
    "evaluate.validation_prompts=128",
)
"""Overrides of all arms. The test split is not used."""

TRL_VENV = REPOSITORY / ".cache/trl-venv"
TRL_PACKAGES = ("trl==1.16.*", "accelerate==1.15.*")
"""TRL, and what it needs beyond this environment."""

NOTES = (
    f"Tuning: all arms try the same constant learning rates with seed {TUNING_SEED}. The best rate is the "
    "first to reach the highest threshold that any rate of the arm reaches. Both synchronous arms take the "
    "same steps, and so share their tuning. All arms start from one model.",
    "Seconds count from the first weights in an engine (TRL: from the start of training) to the optimizer "
    "step whose weights reach the threshold, interpolated linearly between validation evaluations. "
    "They do not include the time of evaluations for TRL and for the synchronous arms (estimated by tokens); "
    "for the asynchronous arm they do.",
    "Every arm may use both cores. Asynchronous: a trainer and an engine have a core each. Synchronous: the "
    "same two take turns, or two engines and two trainers do. TRL uses both cores for everything.",
    "÷ asynchronous: ratio of times to the highest threshold that all arms of a seed reach. End: mean of the "
    "last three evaluations.",
    "TRL: defaults of 1.16 (loss dapo, no KL term), no gradient checkpointing, Hugging Face generation.",
)

Courses = Mapping[str, Mapping[int, Course]]
"""Evaluations of runs by arm and seed."""


def named(arm: str, rate: float) -> str:
    """Return the name of an arm at a learning rate."""
    return f"{arm}, rate {rate:g}"


@dataclass(frozen=True)
class Asynchrony:
    """The comparison. thresholds: values of pass@1 to which the time is measured, ascending."""

    thresholds: tuple[float, ...] = (0.3, 0.5, 0.7, 0.8)

    question: ClassVar = "Does asynchrony pay on a skill that takes hundreds of steps?"

    study: ClassVar = Study(
        {named(arm, rate): (*own, skill.constant(rate)) for arm, own in ARMS.items() for rate in RATES},
        SETTINGS,
        steps=200,
        model=skill.MODEL,
    )
    """Runs of all arms but TRL's, at every rate."""

    def arms(self, options: Options) -> dict[str, Config]:
        """Return the config of each arm's first run; TRL reads that of a synchronous arm."""
        return self.study.configs(options)

    def measure(self, options: Options) -> Result:
        """Run all rates of all arms with the tuning seed, then each arm's best rate with the other seeds."""
        self.study.require_curves(options)
        tuning = {
            arm: {rate: self._course(arm, rate, TUNING_SEED, options) for rate in RATES}
            for arm in (*ARMS, PEER)
            if arm not in TUNED_AS
        }
        best = {arm: best_rate(tuning[TUNED_AS.get(arm, arm)], self.thresholds) for arm in (*ARMS, PEER)}
        found: dict[str, dict[int, Course]] = {arm: {} for arm in best}
        for seed in options.seeds:
            for arm, rate in best.items():
                found[arm][seed] = self._course(arm, rate, seed, options)
        return self.result(best, found)

    def _course(self, arm: str, rate: float, seed: int, options: Options) -> Course:
        if arm == PEER:
            self.study.model.make()
            overrides = self.study.overrides(named(SYNCHRONOUS, rate), seed, options)
            return peer_course(overrides, f"{slug(named(PEER, rate))}-seed{seed}", options)
        run_dir = self.study.run(named(arm, rate), seed, options)
        return course_of(run_dir, evaluations_count=arm == ASYNCHRONOUS)

    def result(self, best: Mapping[str, float], found: Courses) -> Result:
        """Return a row and a line per arm, at its best rate."""
        rows = [
            {
                **self._row(arm, f"{best[arm]:g}", list(courses.values())),
                "÷ asynchronous": Spread([self._ratio(arm, found, seed) for seed in courses]),
            }
            for arm, courses in found.items()
        ]
        lines = [
            Series(arm, [[(t, 100 * value) for t, value in one.over_seconds] for one in courses.values()])
            for arm, courses in found.items()
        ]
        x, y, level = "seconds of training", "pass@1, validation, %", 100 * self.thresholds[-1]
        return Result(rows, [Panel(x, y, lines, banded=False, level=level)], NOTES)

    def _row(self, arm: str, rate: str, courses: list[Course]) -> Row:
        """Return the row of an arm: times to each threshold, steps to the last one, and pass@1 at the end."""
        last = self.thresholds[-1]
        return {
            "arm": arm,
            "rate": rate,
            **{
                f"s to {100 * threshold:g} %": Spread(
                    [time_to(course.over_seconds, threshold) for course in courses]
                )
                for threshold in self.thresholds
            },
            f"steps to {100 * last:g} %": Spread([time_to(course.over_steps, last) for course in courses]),
            "end, %": Spread([100 * course.end for course in courses]),
        }

    def _ratio(self, arm: str, found: Courses, seed: int) -> float | None:
        """Return the ratio of times to the highest threshold that all arms of this seed reach, or None.

        It is the time of ``arm``, divided by that of the asynchronous arm.
        """
        for threshold in reversed(self.thresholds):
            times = {
                name: time_to(of_seeds[seed].over_seconds, threshold) for name, of_seeds in found.items()
            }
            mine, reference = times[arm], times[ASYNCHRONOUS]
            if mine and reference and None not in times.values():
                return mine / reference
        return None


def best_rate(courses: Mapping[float, Course], thresholds: tuple[float, ...]) -> float:
    """Return the rate that is first at the highest threshold that any reaches, or else that ends best."""
    for threshold in reversed(thresholds):
        times = {rate: time_to(course.over_seconds, threshold) for rate, course in courses.items()}
        reached = {rate: seconds for rate, seconds in times.items() if seconds is not None}
        if reached:
            return min(reached, key=reached.__getitem__)
    return max(courses, key=lambda rate: courses[rate].end)


def peer_course(overrides: list[str], name: str, options: Options) -> Course:
    """Return TRL's evaluations on the quickstart with these overrides: those on disk, or new ones."""
    out = options.folder / "runs" / f"{name}.json"
    found = read_json(out)
    if found is None or found["overrides"] != overrides:
        sets = [part for text in overrides for part in ("--set", text)]
        program = [trl_python(), str(REPOSITORY / "tools/peer_trl.py"), "--config", str(QUICKSTART)]
        run(*map(str, program), *sets, "--out", str(out))
        found = read_json(out)
    assert found is not None
    points: Any = found["points"]
    return Course([tuple(point) for point in points])


def trl_python() -> Path:
    """Return the interpreter of an environment with TRL, which is made once and extends the present one."""
    python, marker = TRL_VENV / "bin/python", TRL_VENV / "installed"
    if not marker.exists():
        venv.create(TRL_VENV, with_pip=True)
        scheme = sysconfig.get_path("purelib", vars={"base": str(TRL_VENV)})
        (Path(scheme) / "main.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *TRL_PACKAGES]
        if subprocess.run(install).returncode:
            sys.exit(f"TRL cannot be installed into {TRL_VENV}: see pip's message above")
        marker.touch()
    return python


QUICK = Asynchrony()
