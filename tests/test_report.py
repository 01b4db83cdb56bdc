"""Summary, terminal display and report page of runs whose numbers are known."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tba_hpc.config import parse_config
from tba_hpc.report import page
from tba_hpc.report.status import LiveDisplay, RunView, duration, panel, plain_line, print_rows, print_summary
from tba_hpc.report.summary import RunData, summarise, write_summary
from tba_hpc.state import Evaluation, RunDir, write_evaluation

STEPS = 10


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory without a metric."""
    tree = {
        "run": {"root": str(tmp_path), "name": "known"},
        "model": {"path": "models/<tiny>"},
        "train": {"steps": STEPS},
        "launch": {"searchers": 2},
    }
    return RunDir.create(parse_config(tree))


def write(path: Path, records: list[dict[str, object]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def step(number: int, time: float, **values: object) -> dict[str, object]:
    names = {"loss": "train/loss", "wait": "train/wait_share", "stall": "sync/publish_stall_seconds"}
    base = {"step": number, "time": time, "staleness/mean": 2.0, "staleness/histogram": [1, 2, 3]}
    return {**base, **{names[name]: value for name, value in values.items()}}


def evaluate(run: RunDir, split: str, at: int, correct: tuple[int, int], total: int = 50) -> None:
    for searcher, right in enumerate(correct):
        part = Evaluation(split=split, step=at, correct=right, total=total, tokens=9, truncated=0)
        write_evaluation(run, searcher, 2, part)


def search(time: float, tokens: int, rate: float) -> dict[str, object]:
    return {
        "time": time,
        "search/tokens": tokens,
        "search/trajectories": 4,
        "search/tokens_per_second": rate,
        "search/seal_share": 0.01,
        "search/version": 0,
        "search/reward": 0.5,
    }


def resumed_run(run: RunDir) -> None:
    """Two attempts: steps 1-6 in 60 s, an hour's pause, steps 5-10 in 50 s after a resume from 4."""
    trainer = run.metrics_file("trainer")
    write(trainer, [{"time": 1000.0, "event": "started", "step": 0}])
    write(trainer, [step(s, 1000.0 + 10 * s, loss=100.0, stall=0.5) for s in range(1, 7)])
    write(trainer, [{"time": 4660.0, "event": "resumed", "step": 4}])
    write(trainer, [step(s, 4660.0 + 5 * (s - 4), loss=float(s), wait=s / 1000) for s in range(5, 11)])
    write(trainer, [{"time": 4700.0, "event": "checkpoint", "step": 10}])
    write(trainer, [{"time": 4710.0, "event": "finished", "step": 10}])
    write(run.metrics_file("searcher", 0), [search(1005.0, 100, 1000), search(4665.0, 100, 3000)])
    write(run.metrics_file("searcher", 1), [search(1005.0, 50, 500), search(4665.0, 0, 0)])
    evaluate(run, "test", 0, (20, 21))
    evaluate(run, "validation", 5, (30, 30))
    evaluate(run, "test", 10, (40, 45))


def test_summary_of_a_resumed_run_counts_every_thing_once(run: RunDir) -> None:
    resumed_run(run)
    summary = summarise(run, run.config())
    write_summary(run, summary)
    assert (summary.pass_at_1_before, summary.pass_at_1_after) == (0.41, 0.85)
    assert summary.gain == pytest.approx(0.44)
    assert (summary.test_prompts, summary.steps, summary.attempts, summary.finished) == (100, 10, 2, True)
    assert summary.train_seconds == 60.0 + 50.0  # without the pause
    assert (summary.trajectories, summary.tokens) == (16, 250)
    assert summary.searcher_tokens_per_second == 2000 + 500  # idle records do not count as generating
    assert summary.trainer_wait_share == 0.01
    assert (summary.staleness, summary.publish_stall_seconds) == (2.0, 0.5)
    assert summary.propagation_seconds is None
    stored = json.loads(run.summary.read_text())
    names = {"pass_at_1_before", "pass_at_1_after", "train_seconds", "steps", "trajectories", "tokens"}
    assert names <= stored.keys() and stored["pass_at_1_after"] == 0.85


def test_summary_of_an_empty_run_has_no_figures(run: RunDir) -> None:
    summary = summarise(run, run.config())
    assert (summary.steps, summary.attempts, summary.finished, summary.train_seconds) == (0, 0, False, 0.0)
    assert summary.pass_at_1_before is summary.pass_at_1_after is summary.gain is None


def test_an_evaluation_counts_once_all_parts_are_there(run: RunDir) -> None:
    part = Evaluation(split="test", step=0, correct=1, total=2, tokens=9, truncated=0)
    write_evaluation(run, 1, 2, part)
    assert summarise(run, run.config()).pass_at_1_before is None
    write_evaluation(run, 0, 2, part)
    assert summarise(run, run.config()).pass_at_1_before == 0.5


def test_the_view_follows_a_run_through_its_phases(run: RunDir) -> None:
    view = RunView(run, run.config())
    trainer = run.metrics_file("trainer")
    view.update()
    assert view.headline == "starting engines…"
    write(trainer, [{"time": 1.0, "event": "filling", "step": 0, "buffer/size": 312}])
    view.update()
    assert plain_line(view, 65.0) == "[1:05] filling the buffer 312/500"
    evaluate(run, "test", 0, (20, 21))
    write(trainer, [step(s, 10.0 * s, loss=0.25) for s in (1, 2, 3)])
    write(run.metrics_file("searcher", 1), [search(1.0, 5, 1234.0)])
    write(run.metrics_file("searcher", 0), [search(1.0, 5, 2345.0)])
    view.update()
    assert (view.step, view.eta) == (3, 70.0)
    line = plain_line(view, 3665.0)
    assert line.startswith("[1:01:05] training · step 3/10 · test 41.0 % · loss 0.2500 · staleness 2.0")
    assert line.endswith("tokens/s 2,345 + 1,234")
    write(trainer, [{"time": 99.0, "event": "finished", "step": 10}])
    view.update()
    assert view.headline == "last step done, final evaluation"
    evaluate(run, "test", 10, (45, 45))
    view.update()
    assert view.headline == "finished at step 10" and "test 41.0 % → 90.0 %" in plain_line(view, 0.0)


def test_what_an_earlier_attempt_did_is_no_news(run: RunDir) -> None:
    resumed_run(run)
    view = RunView(run, run.config())
    view.skip_past()
    view.update()
    assert view.headline == "starting engines…" and view.step == 0


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_shows_every_number_at_any_width(run: RunDir, width: int) -> None:
    resumed_run(run)
    view = RunView(run, run.config())
    view.update()
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(panel(view, 1.0))
    shown = console.file.getvalue()
    assert all(value in shown for value in view.cells().values())
    assert max(map(len, shown.splitlines())) <= width


def test_without_a_terminal_the_display_is_plain_lines(run: RunDir) -> None:
    out = io.StringIO()
    with LiveDisplay(run, run.config(), console=Console(file=out, width=60)) as display:
        display.refresh()
        display.note("a note")
        write(run.metrics_file("trainer"), [step(10, 5.0), {"time": 6.0, "event": "stopped", "step": 10}])
    assert out.getvalue() == "a note\n[0:00] stopped at step 10 · staleness 2.0\n"


def test_on_a_terminal_the_display_is_redrawn_and_leaves_one_line(run: RunDir) -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    with LiveDisplay(run, run.config(), console=console) as display:
        display.refresh()
    assert "starting engines…" in out.getvalue() and "0/10" in out.getvalue()
    assert out.getvalue().endswith("[0:00] starting engines…\n")


def test_tables_are_json_on_request(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    resumed_run(run)
    print_summary(run, summarise(run, run.config()), as_json=True)
    assert json.loads(capsys.readouterr().out)["pass_at_1_after"] == 0.85
    rows = [{"rank": "searcher 0", "rate": 2000.0}, {"rank": "searcher 1", "rate": None}]
    print_rows(rows, as_json=True)
    assert json.loads(capsys.readouterr().out) == rows
    print_summary(run, summarise(run, run.config()))
    print_rows(rows)
    text = capsys.readouterr().out
    assert re.search(r"pass@1 after +85.0 %", text) and re.search(r"searcher 0 +2,000", text)


def test_duration() -> None:
    assert [duration(s) for s in (0, 59.6, 125, 3725)] == ["0:00", "1:00", "2:05", "1:02:05"]


class Outside(HTMLParser):
    """Collects tags never closed and every address that a page would fetch."""

    VOID = ("meta", "link", "img", "br", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_fetches_nothing_and_says_the_figures(run: RunDir) -> None:
    resumed_run(run)
    path = page.write_report(run)
    text = path.read_text()
    parsed = Outside(text)
    assert parsed.open == [] and all(address.startswith("#") for address in parsed.fetched)
    assert not re.search(r"@import|url\((?!#)", text)
    for figure in ("41.0 %", "85.0 %", "+44.0 points", "1:50", "in 2 attempts", "finished"):
        assert figure in text
    assert "models/&lt;tiny&gt;" in text and "<tiny>" not in text
    assert path.stat().st_mode & 0o077 == 0


def test_plots_take_the_colours_of_the_page(run: RunDir) -> None:
    resumed_run(run)
    drawn = page.plots(RunData.read(run))
    assert {"pass@1", "Reward", "Loss", "Staleness, all batches", "Searchers"} <= {p.title for p in drawn}
    for plot in drawn:
        assert plot.svg.startswith("<svg") and plot.svg.rstrip().endswith("</svg>")
        assert not re.search(r"#0[0-9a-f]0[0-9a-f]0[0-9a-f]", plot.svg), "a stand-in colour was left"
    known = {match for plot in drawn for match in re.findall(r"var\(--(\w+)\)", plot.svg)}
    defined = set(re.findall(r"--(\w+):", page.TEMPLATE.read_text()))
    assert known <= defined and {"ink", "muted", "grid", "blue", "orange"} <= known


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_page_of_a_run_that_has_just_begun(run: RunDir, steps: int) -> None:
    write(run.metrics_file("trainer"), [{"time": 5.0, "event": "started", "step": 0}])
    write(run.metrics_file("trainer"), [step(s, 5.0 + s, loss=1.0) for s in range(1, steps + 1)])
    text = page.write_report(run).read_text()
    assert f"unfinished at step {steps} of {STEPS}" in text
    assert ("No optimizer step has been logged yet" in text) == (steps == 0)
    assert text.count("<figure") == len(page.plots(RunData.read(run)) if steps else [])


def test_an_empty_run_directory_has_a_page(run: RunDir) -> None:
    assert f"unfinished at step 0 of {STEPS}" in page.write_report(run).read_text()


def test_minutes_do_not_run_while_nothing_does(run: RunDir) -> None:
    resumed_run(run)
    minutes = page.run_minutes(RunData.read(run))
    at = np.array([1000.0, 1030.0, 1060.0, 2000.0, 4660.0, 4690.0, 4710.0])
    assert minutes(at).tolist() == pytest.approx([0, 0.5, 1, 1, 1, 1.5, 1 + 50 / 60])


def test_events_of_the_page(run: RunDir) -> None:
    resumed_run(run)
    write(run.metrics_file("searcher", 1), [{"time": 4670.0, "search/rejected": 3}])
    told = [(event.what, event.step, event.into) for event in page.events(RunData.read(run))]
    assert told == [
        ("started", "0", "0:00"),
        ("resumed", "4", "1:00"),
        ("checkpoint", "10", "1:40"),
        ("finished", "10", "1:50"),
        ("searcher 1: 3 × trajectory set aside: reward not finite", "", ""),
    ]


def test_the_moving_mean_keeps_constants_and_length() -> None:
    assert page._smooth(np.full(100, 2.5)).tolist() == pytest.approx([2.5] * 100)
    values = np.arange(200.0)
    assert page._smooth(values)[10:190].tolist() == pytest.approx(values[10:190].tolist())
    assert page._smooth(np.array([3.0])).tolist() == [3.0]


def test_a_goal_is_judged(run: RunDir) -> None:
    resumed_run(run)
    verdicts = {promise.name: promise.verdict for promise in page.promises(RunData.read(run))}
    assert verdicts == {
        "Trainer wait": "good",  # 1 % of at most 5 %
        "Sealing shards": "good",  # exactly 1 %
        **dict.fromkeys(["Publish stall", "Propagation", "Loading weights", "Searcher busy"], ""),
    }
