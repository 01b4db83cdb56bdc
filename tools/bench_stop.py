"""Measures how soon a run stops when asked to, at any moment, and proves that nothing is lost.

    python tools/bench_stop.py [--moments 100] [--seed 0] [--within 60] [--transport files] [--json]

The run is started, sent SIGUSR1 at a random moment (start-up and last evaluation included), and goes on in
the next start; once finished, another run begins. Starts that end before they are asked do not count. In the
end ``tba audit`` looks at every run; where it finds a problem, the exit status is 1.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import typer

from tba_hpc.report.audit import Audit, audit
from tba_hpc.report.tables import Cell, print_rows
from tba_hpc.run.checkpoints import latest_checkpoint, read_state
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import Record, number, read_metrics, step_records

app = typer.Typer(add_completion=False, help=__doc__)

SOON = 10.0
"""Seconds from the signal to the checkpoint that are promised."""

LEAVE_SECONDS = 2.0
"""Time that the kernel has to end engines whose searcher is gone."""

PATIENCE = 300.0
"""Longest wait for the run to end after the signal, s."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One request to stop. Seconds count from the signal.

    after: seconds from the start of ``tba run`` to the signal. saved: until the checkpoint was complete; None
    where there was nothing to save. gone: until the launcher had ended, with exit status ``code``.
    unsaved: optimizer steps that the newest checkpoint lacks. left: processes that outlived the launcher.
    """

    phase: str
    after: float
    saved: float | None
    gone: float
    code: int
    unsaved: int
    left: int

    @property
    def good(self) -> bool:
        """Whether the stop was as promised."""
        return (self.saved or 0.0) <= SOON and not self.unsaved and not self.left


@dataclass
class Bench:
    """Runs in ``root``, one after the other."""

    root: Path
    config: str
    settings: Sequence[str]
    runs: list[RunDir] = field(default_factory=list)

    def moments(self, delays: Iterator[float]) -> Iterator[Moment]:
        """What happened at each, starts that had ended before left out."""
        for delay in delays:
            if not self.runs or self.runs[-1].finished:
                name = f"stop-{len(self.runs)}"
                self.runs.append(RunDir(self.root / f"{name}-seed0"))
            if moment := self._live(delay):
                yield moment

    def finish(self) -> None:
        """Let the last run come to its end."""
        while not self.runs[-1].finished:
            subprocess.run(self._command(), check=True, capture_output=True)

    def _command(self) -> list[str]:
        name = self.runs[-1].path.name.removesuffix("-seed0")
        pairs = [f"run.root={self.root}", f"run.name={name}", *self.settings]
        words = [word for pair in pairs for word in ("--set", pair)]
        return [sys.executable, "-m", "tba_hpc", "run", self.config, "--json", *words]

    def _live(self, delay: float) -> Moment | None:
        """One start, asked to stop after ``delay`` seconds; None where it ended before."""
        began = time.time()
        with (self.root / "output.log").open("ab") as output:
            launcher = subprocess.Popen(self._command(), stdout=output, stderr=output)
        if _ends_within(launcher, delay):
            return None
        processes = psutil.Process(launcher.pid).children(recursive=True)
        phase, asked = _phase(self.runs[-1], began), time.time()
        os.kill(launcher.pid, signal.SIGUSR1)
        code = launcher.wait(PATIENCE)
        gone = time.time() - asked
        _, left = psutil.wait_procs(processes, LEAVE_SECONDS)
        saved, unsaved = _saved(self.runs[-1])
        return Moment(
            phase=phase,
            after=delay,
            saved=saved - asked if saved > asked else None,
            gone=gone,
            code=code,
            unsaved=unsaved,
            left=len(left),
        )


@app.command()
def main(
    moments: Annotated[int, typer.Option(min=1, help="Requests to stop.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    within: Annotated[float, typer.Option(help="Latest moment after a start, s.")] = 60.0,
    config: Annotated[str, typer.Option(help="What is run.")] = "configs/quickstart.yaml",
    transport: Annotated[str, typer.Option(help="mpi or files.")] = "mpi",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Stop a run again and again."""
    draw = random.Random(seed)
    delays = iter(lambda: draw.uniform(0.0, within), None)
    with tempfile.TemporaryDirectory(prefix="tba-stop-") as folder:
        bench = Bench(Path(folder), config, [f"exchange.transport={transport}"])
        found: list[Moment] = []
        for moment in bench.moments(delays):
            found.append(moment)
            print(f"{len(found)}: {moment}", file=sys.stderr)
            if len(found) == moments:
                break
        bench.finish()
        verdicts = [audit(run) for run in bench.runs]
    _show(found, verdicts, as_json=as_json)
    if not all(moment.good for moment in found) or not all(verdict.clean for verdict in verdicts):
        raise typer.Exit(1)


def _show(found: Sequence[Moment], verdicts: Sequence[Audit], *, as_json: bool) -> None:
    totals = {
        "runs": len(verdicts),
        "trajectories": sum(verdict.trajectories for verdict in verdicts),
        "lost": sum(verdict.lost for verdict in verdicts),
        "doubled": sum(verdict.doubled for verdict in verdicts),
        "steps redone": sum(verdict.steps_redone for verdict in verdicts),
    }
    if as_json:
        print(json.dumps({**totals, "moments": [asdict(moment) for moment in found]}, indent=2))
        return
    phases = sorted({moment.phase for moment in found}, key=[moment.phase for moment in found].count)
    rows = [_row(phase, [moment for moment in found if moment.phase == phase]) for phase in phases]
    print_rows([*rows, _row("all", found)])
    print_rows([totals])
    for problem in (problem for verdict in verdicts for problem in verdict.problems):
        print(problem)


def _row(phase: str, moments: Sequence[Moment]) -> dict[str, Cell]:
    saved = [moment.saved for moment in moments if moment.saved is not None]
    gone = [moment.gone for moment in moments]
    return {
        "asked during": phase,
        "moments": len(moments),
        "good": sum(moment.good for moment in moments),
        "saved, s": statistics.median(saved) if saved else None,
        "at most": max(saved, default=None),
        "gone, s": statistics.median(gone),
        "at most, s": max(gone),
        "unsaved": sum(moment.unsaved for moment in moments),
        "left": sum(moment.left for moment in moments),
    }


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _phase(run: RunDir, since: float) -> str:
    """What the start at ``since`` is doing, from the trainer's records."""
    records = [r for r in read_metrics(run.metrics_file("trainer")) if number(r, "time", 0.0) >= since]
    if not records:
        return "start-up"
    if any(record.get("event") == "finished" for record in records):
        return "last evaluation"
    return "training" if any(_is_step(record) for record in records) else "first buffer fill"


def _is_step(record: Record) -> bool:
    return "event" not in record


def _saved(run: RunDir) -> tuple[float, int]:
    """When the newest checkpoint was complete (unix seconds, 0 for none), and the steps that it lacks."""
    steps = step_records(read_metrics(run.metrics_file("trainer")))
    done = int(number(steps[-1], "step", 0)) if steps else 0
    folder = latest_checkpoint(run) if run.checkpoints.exists() else None
    if folder is None:
        return 0.0, done
    return (folder / "COMPLETE").stat().st_mtime, done - read_state(folder).step


if __name__ == "__main__":
    app()
