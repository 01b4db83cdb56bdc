"""Time to equal pass@1: asynchronous TBA, the same code made synchronous, TRL's GRPO, on the same cores."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.curves import Curve, curve_of, time_to
from lab.results import COLORS, Result, Row, Spread
from lab.runs import QUICKSTART, REPOSITORY, Model, Options, Study, read_json, run, slug
from tba_hpc.config import Config

ASYNCHRONOUS, PEER = "asynchronous TBA", "TRL GRPO"
SYNCHRONOUS = "synchronous, 1 engine, then 1 trainer"

ON_POLICY = ("exchange.max_staleness=0", "exchange.sync_every=1", "buffer.most_on_policy=1")

ARMS = {
    ASYNCHRONOUS: ("launch.searchers=1",),
    SYNCHRONOUS: (*ON_POLICY, "launch.searchers=1"),
    "synchronous, 2 engines, then 2 trainers": (*ON_POLICY, "launch.searchers=2", "launch.trainers=2"),
}

SETTINGS = (
    "train.learning_rate={schedule: constant, peak: 5.0e-6}",
    "buffer.initial_completions=160",
    "buffer.most_on_policy=0.95",
    "generator.prompts_in_flight=8",
    "exchange.seal_seconds=0.2",
    "evaluate.test_prompts=1",
)
"""Of all arms; m is the paper's for GSM8K; the test split is not looked at.

At higher rates little is left to time: a synchronous run reaches 96 % in four steps at the quickstart's own
5e-5 (seed 0), TRL 99 % at 1e-4.
"""

TRL_VENV = REPOSITORY / ".cache/trl-venv"
TRL_PACKAGES = ("trl==1.16.*", "accelerate==1.15.*")
"""What the main environment lacks of TRL's needs, and TRL."""

NOTES = (
    "Seconds run from the first weights in an engine (TRL: from the start of training) to the optimizer step "
    "whose weights reach the threshold, on straight lines between evaluations on the validation prompts; the "
    "start of processes and engines is left out for all.",
    "Evaluations are off the clock for TRL and, by their tokens, for the synchronous arms; the asynchronous "
    "arm pays for its own.",
    "Every arm may use both cores: asynchronous, a trainer and an engine with a core each; synchronous, the "
    "same two in turn, or two engines and two trainers in turn; TRL, both for everything.",
    "÷ asynchronous: at the last of these thresholds that all arms of a seed reach.",
    "All learn at the same constant rate, far below the quickstart's, so that there is something to time.",
    "TRL: defaults of 1.16 (loss dapo, no KL term), no gradient checkpointing, Hugging Face generation; the "
    "same prompts, reward, B, K and lengths as ours.",
)


@dataclass(frozen=True)
class Asynchrony:
    """The comparison on one task. thresholds: of pass@1, ascending; lockstep: of all arms but the first."""

    question: str
    thresholds: tuple[float, ...]
    steps: int
    settings: tuple[str, ...] = ()
    lockstep: tuple[str, ...] = ()
    model: Model = field(default_factory=Model)

    @property
    def study(self) -> Study:
        """Our own arms."""
        arms = {arm: (*settings, *self.lockstep) for arm, settings in ARMS.items()}
        return Study(
            arms | {ASYNCHRONOUS: ARMS[ASYNCHRONOUS]}, (*SETTINGS, *self.settings), self.steps, self.model
        )

    def arms(self, options: Options) -> dict[str, Config]:
        """The config of every arm's first run; the peer reads that of a synchronous arm."""
        return {arm: self.study.config(arm, options.seeds[0], options) for arm in ARMS}

    def measure(self, options: Options) -> Result:
        """All runs, all arms of a seed after each other, then times and ratios."""
        curves: dict[str, dict[int, Curve]] = {arm: {} for arm in (*ARMS, PEER)}
        for seed in options.seeds:
            for arm, _, run_dir in self.study.runs(replace(options, seeds=(seed,))):
                curves[arm][seed] = curve_of(run_dir, evaluations_count=arm == ASYNCHRONOUS)
            curves[PEER][seed] = peer_curve(self.study, seed, options)
        return self.result(curves)

    def result(self, curves: Mapping[str, Mapping[int, Curve]]) -> Result:
        """Rows: one per arm."""
        rows = [self._row(arm, curves) for arm in curves]
        return Result(rows, lambda figure: self._draw(figure, curves), NOTES)

    def _row(self, arm: str, curves: Mapping[str, Mapping[int, Curve]]) -> Row:
        """Times to each threshold, and how many times the asynchronous arm's, seed by seed."""
        return {
            "arm": arm,
            **{
                f"s to {100 * threshold:g} %": Spread(
                    [time_to(curve, threshold) for curve in curves[arm].values()]
                )
                for threshold in self.thresholds
            },
            "÷ asynchronous": Spread([self._ratio(arm, curves, seed) for seed in curves[arm]]),
            "best pass@1, %": Spread(
                [100 * max(value for _, value in curve) for curve in curves[arm].values()]
            ),
        }

    def _ratio(self, arm: str, curves: Mapping[str, Mapping[int, Curve]], seed: int) -> float | None:
        """Time ÷ the asynchronous arm's at the last threshold that all arms of this seed reach, or None."""
        for threshold in reversed(self.thresholds):
            times = {name: time_to(of_seeds[seed], threshold) for name, of_seeds in curves.items()}
            mine, reference = times[arm], times[ASYNCHRONOUS]
            if mine and reference and None not in times.values():
                return mine / reference
        return None

    def _draw(self, figure: Figure, curves: Mapping[str, Mapping[int, Curve]]) -> None:
        ax = figure.add_subplot()
        for (arm, of_seeds), color in zip(curves.items(), COLORS, strict=False):
            for index, curve in enumerate(of_seeds.values()):
                seconds, values = zip(*curve, strict=True)
                percent = [100 * value for value in values]
                ax.plot(seconds, percent, color=color, label=None if index else arm, alpha=0.85, marker=".")
        ax.axhline(100 * self.thresholds[-1], color="#6b7280", linewidth=1, linestyle=(0, (4, 3)))
        ax.set_xlabel("seconds of training")
        ax.set_ylabel("pass@1, validation, %")
        ax.legend(loc="lower right")


def peer_curve(study: Study, seed: int, options: Options) -> Curve:
    """TRL's curve: as it stands on disk, or measured now."""
    overrides = study.overrides(SYNCHRONOUS, seed, options)
    out = options.folder / "runs" / f"{slug(PEER)}-seed{seed}.json"
    found = read_json(out)
    if found is None or found["overrides"] != overrides:
        sets = [part for text in overrides for part in ("--set", text)]
        program = [trl_python(), str(REPOSITORY / "tools/peer_trl.py"), "--config", str(QUICKSTART)]
        run(*map(str, program), *sets, "--out", str(out))
        found = read_json(out)
    assert found is not None
    points: Any = found["curve"]
    return [(seconds, value) for seconds, value in points]


def trl_python() -> Path:
    """The interpreter of an environment with TRL, made once on top of this one, which it leaves alone."""
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


QUICK = Asynchrony(
    "Does asynchrony pay on the quickstart task?",
    thresholds=(0.7, 0.8, 0.9, 0.94),
    steps=200,
    settings=(
        "generator.completions_per_prompt=16",
        "evaluate.every=5",
        "evaluate.validation_prompts=96",
    ),
)

LONG = Asynchrony(
    "Does it pay where generation dominates: long, uneven answers, small batches?",
    thresholds=(0.6, 0.65, 0.7, 0.8, 0.9),
    steps=450,
    settings=(
        "train.learning_rate={schedule: constant, peak: 4.0e-6}",
        "model.context_length=320",
        "generator.max_tokens=220",
        "generator.prompts_in_flight=12",
        "generator.completions_per_prompt=8",
        "train.prompts_per_step=2",
        "train.completions_per_prompt=8",
        "evaluate.every=30",
        "evaluate.validation_prompts=128",
    ),
    lockstep=("train.steps=300", "evaluate.every=15"),
    model=Model("counting-model", ("--counted", "--steps=1600")),
)
"""The same with long answers.

A model of 10 M parameters would not do: on two CPU cores it takes as long to learn from tokens as to
sample them.
"""
