"""Summary, tables and report page of runs whose numbers are known."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from recorded import STEPS, evaluate, happen, new_run, resumed_run, search, step, write

import tba_hpc
from tba_hpc.commands.compare import compare, write_comparison
from tba_hpc.config import parse_config
from tba_hpc.config.sections import FIRST_ELASTIC
from tba_hpc.core.ports import MEAN_REWARD
from tba_hpc.core.wording import duration
from tba_hpc.report import page, plots
from tba_hpc.report.data import RunData
from tba_hpc.report.digest import keep_digest
from tba_hpc.report.estimates import Estimate
from tba_hpc.report.run_state import RunMonitor, run_state
from tba_hpc.report.status import cells, facts, plain_line, print_status
from tba_hpc.report.summary import (
    print_summary,
    score_words,
    summarise,
    summary_of,
    summary_rows,
    write_summary,
)
from tba_hpc.report.tables import print_rows
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Answer, Evaluation, find_evaluation, write_evaluation


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


def test_summary_of_a_resumed_run_counts_every_thing_once(run: RunDir) -> None:
    resumed_run(run)
    run.mark_finished()
    summary = summarise(run)
    write_summary(run, summary)
    assert (summary.pass_at_1_before, summary.pass_at_1_after) == (0.41, 0.85)
    assert (summary.test_prompts, summary.steps, summary.attempts, summary.finished) == (100, 10, 2, True)
    assert summary.train_seconds == 60.0 + 50.0  # without the pause
    assert (summary.generated_tokens, summary.redone) == (250, 2)
    assert summary.trainer_wait_share == 0.01
    assert (summary.staleness, summary.publish_stall_seconds) == (2.0, 0.5)
    assert summary.propagation_seconds is None
    stored = json.loads(run.summary.read_text())
    names = {"pass_at_1_before", "pass_at_1_after", "train_seconds", "steps", "trajectories", "tokens"}
    assert names <= stored.keys() and stored["pass_at_1_after"] == 0.85


def test_what_searchers_offered_is_counted_from_their_comings_to_their_last_words(run: RunDir) -> None:
    """A minute of one, killed; 40 s of the next in its place; 100 s of another: 200 s for 1,000 tokens."""
    for place, stays in ((0, ((100, 160), (500, 540))), (5000, ((100, 200),))):
        for began, ended in stays:
            come = {"time": float(began), "event": "started", "searchers": 2}
            write(run.metrics_file("searcher", place), [come, search(float(ended), 700, 50.0)])
    merge = {"event": "merged", "step": 0, "revision": 1, "searcher": 0, "shard": 0, "trajectories": 9}
    write(run.metrics_file("trainer"), [{"time": 90.0, "event": "started", "step": 0}])
    write(run.metrics_file("trainer"), [{**merge, "time": 150.0, "tokens": 1000, "again": 3}])
    summary = summarise(run)
    assert (summary.searcher_seconds, summary.goodput, summary.dropped) == (200.0, 5.0, 3)
    assert (summary.generated_tokens, summary.generated_per_searcher_second) == (3 * 700, 10.5)
    (told,) = (
        tile.note for tile in page.tiles(RunData.read(run), summary) if tile.name == "Tokens generated"
    )
    assert told == "10 per searcher-second, 5 acknowledged"


def test_the_page_counts_the_elastic_searchers_that_took_part(run: RunDir) -> None:
    for index in (0, 1, FIRST_ELASTIC, FIRST_ELASTIC + 2):
        write(run.metrics_file("searcher", index), [search(100.0, 700, 50.0)])
    data = RunData.read(run)
    roles = " · 1 trainer + 2 searchers + 2 elastic searchers"
    assert f"{roles} · as of 20" in page.render(data, summary_of(data))
    run.mark_finished()
    data = RunData.read(run)
    assert f"{roles}<" in page.render(data, summary_of(data))


def test_ettr_is_the_seconds_of_steps_that_count_over_those_that_machines_were_held(run: RunDir) -> None:
    """Steps 1 to 4 of 10 s and 5 to 10 of 5 s count; 65 s on this machine, 110 s of a job, 40 s between."""
    assert summarise(run).ettr is None
    resumed_run(run)
    happen(run, 995.0, "start", attempt="attempt-001", trainers=1, searchers=2)  # ends with its last step
    happen(run, 4600.0, "allocated", job="7", nodes="a,c")
    happen(run, 4650.0, "start", job="7", attempt="attempt-002", trainers=1, searchers=2)
    assert summarise(run).ettr == pytest.approx((4 * 10 + 6 * 5) / (65 + 110))
    assert "ETTR" not in written(run)  # the last attempt has not ended: it is still to fall
    happen(run, 4710.0, "failed", job="7", code=1)
    happen(run, 4750.0, "start", job="7", attempt="attempt-003", trainers=1, searchers=2)
    assert summarise(run).ettr == pytest.approx(70 / (65 + 110 + 40))
    happen(run, 4790.0, "finished", job="7")
    assert f"ETTR {70 / (65 + 110 + 80):.1%}".replace("%", " %") in written(run)


def test_the_start_of_engines_is_neither_training_time_nor_effective(run: RunDir) -> None:
    """A job of 100 s: engines start for 80 s, two steps of 5 s, and 10 s until it has ended."""
    happen(run, 1000.0, "allocated", job="7", nodes="a")
    happen(run, 1000.0, "start", job="7", attempt="attempt-001", trainers=1, searchers=2)
    started = [
        {"time": 1010.0, "event": "started", "step": 0},
        {"time": 1020.0, "event": "waiting", "step": 0},
    ]
    write(run.metrics_file("trainer"), started)
    assert summarise(run).train_seconds == 0
    write(run.metrics_file("trainer"), [step(s, 1080.0 + 5 * s, loss=1.0, seconds=5.0) for s in (1, 2)])
    happen(run, 1100.0, "finished", job="7")
    summary = summarise(run)
    assert (summary.train_seconds, summary.ettr) == (10.0, pytest.approx(0.1))


@pytest.mark.parametrize(("job", "seconds", "shown"), [("", 500, False), ("", 700, True), ("7", 500, True)])
def test_a_short_run_outside_a_job_has_no_ettr(run: RunDir, job: str, seconds: int, shown: bool) -> None:
    happen(run, 1000.0, "start", job=job, attempt="attempt-001", trainers=1, searchers=2)
    write(run.metrics_file("trainer"), [step(1, 1100.0, loss=1.0, seconds=5.0)])
    happen(run, 1000.0 + seconds, "finished", job=job)
    assert (summarise(run).ettr is not None) is shown


def test_tables_are_json_on_request(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    resumed_run(run)
    print_summary(run, summarise(run), as_json=True)
    assert json.loads(capsys.readouterr().out)["pass_at_1_after"] == 0.85
    rows = [{"rank": "searcher 0", "rate": 2000.0}, {"rank": "searcher 1", "rate": None}]
    print_rows(rows, as_json=True)
    assert json.loads(capsys.readouterr().out) == rows
    print_summary(run, summarise(run))
    print_rows(rows)
    text = capsys.readouterr().out
    assert re.search(r"pass@1 after +85.0 %", text) and re.search(r"searcher 0 +2,000", text)
    assert re.search(r"trainer wait +1\.0 %, since the last start", text)


def test_the_wait_of_a_run_with_one_start_is_all_of_it(run: RunDir) -> None:
    once = replace(summarise(run), attempts=1, trainer_wait_share=0.25)
    assert summary_rows(once)["trainer wait"] == "25.0 %"


def test_answers_before_and_after_stand_beside_their_question(run: RunDir) -> None:
    resumed_run(run)
    said = {(0, 0): "<b>41</b>\u202e", (0, 10): "42", (7, 0): "only before", (3, 10): "only after"}
    for step_ in (0, 10):
        (run.evaluations / f"test-step-{step_:06d}.json").unlink()
        kept = [
            Answer(p, f"What is {p}?", text, p == 0 and at > 0)
            for (p, at), text in said.items()
            if at == step_
        ]
        part = Evaluation(
            split="test", step=step_, correct=1, total=2, tokens=9, truncated=0, answers=tuple(kept)
        )
        write_evaluation(run, 0, 1, part)
    found = page.answers(RunData.read(run).evaluated("test"))
    assert found and found.steps == (0, 10)
    (pair,) = found.rows
    assert pair[0].question == "What is 0?" and [a.text for a in pair] == ["<b>41</b>\u202e", "42"]
    text = written(run)
    assert r"&lt;b&gt;41&lt;/b&gt;\u202e" in text and "\u202e" not in text and "<b>41</b>" not in text
    assert text.index("✗ wrong") < text.index("✓ right") and "only before" not in text


def test_answers_that_were_cut_off_are_told_where_there_are_some(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """41 of 100 answers are right before, and 85 after; limits cut off 1 and 30 of these."""
    resumed_run(run)
    run.mark_finished()
    told = "right and ended"
    print_summary(run, summarise(run))
    assert told not in written(run) and told not in capsys.readouterr().out and told not in watched(run)
    for at, cut in ((0, 1), (10, 30)):
        whole = find_evaluation(run, "test", at)
        assert whole
        (run.evaluations / f"test-step-{at:06d}.json").unlink()
        write_evaluation(run, 0, 1, replace(whole, cut_correct=cut))
    print_summary(run, summarise(run))
    assert re.search(rf"{told} +40.0 % → 55.0 %", capsys.readouterr().out)
    assert f"{told}: 40.0 % → 55.0 %" in written(run)
    assert watched(run)[told] == "55.0 %"
    frame = tba_hpc.read(run.path).evaluations.set_index(["split", "step"])
    assert frame["ended_score"].to_dict() == {("test", 0): 0.4, ("test", 10): 0.55, ("validation", 5): 0.6}


def watched(run: RunDir) -> dict[str, str]:
    """The cells that ``tba status`` shows of a run."""
    monitor = RunMonitor(run, lambda run: [])
    monitor.update()
    return cells(monitor)


def test_duration() -> None:
    assert [duration(s) for s in (0, 59.6, 125, 3725)] == ["0:00", "1:00", "2:05", "1:02:05"]


def written(run: RunDir) -> str:
    """The page, made anew."""
    page.write_report(run)
    return run.report.read_text()


def test_the_page_fetches_nothing_and_says_the_figures(run: RunDir) -> None:
    resumed_run(run)
    run.mark_finished()
    text = written(run)
    assert not re.search(r"""<script|<link|src=|href=["'](?!#)|@import|url\((?!#)""", text)
    for figure in ("41.0 %", "85.0 %", "+44.0 points", "1:50", "in 2 attempts", "finished"):
        assert figure in text
    assert "models/&lt;tiny&gt;" in text and "<tiny>" not in text
    assert run.report.stat().st_mode & 0o077 == 0


def test_plots_take_the_colours_of_the_page(run: RunDir) -> None:
    resumed_run(run)
    drawn = plots.plots(RunData.read(run))
    some = {"pass@1", "Reward", "Loss", "Staleness", "Searchers' time", "Weights", "Searchers"}
    assert some <= {plot.title for plot in drawn}
    for plot in drawn:
        assert plot.svg.startswith("<svg") and plot.svg.rstrip().endswith("</svg>")
        assert not re.search(r"#0[0-9a-f]0[0-9a-f]0[0-9a-f]", plot.svg), "a stand-in colour was left"
    known = {match for plot in drawn for match in re.findall(r"var\(--(\w+)\)", plot.svg)}
    defined = set(re.findall(r"--(\w+):", (page.TEMPLATES / "style.css.j2").read_text()))
    assert known <= defined and {"ink", "muted", "grid", "blue", "orange"} <= known


@pytest.mark.parametrize("figures", [(1.0, 0.0, None), (1.5, 0.2, 0.25)])
def test_turns_are_drawn_where_there_is_an_environment(
    run: RunDir, figures: tuple[float, float, float | None], capsys: pytest.CaptureFixture[str]
) -> None:
    write(run.metrics_file("trainer"), [step(1, 5.0, loss=1.0)])
    names = ("turns", "environment_share", "failed_calls")
    write(run.metrics_file("searcher", 0), [search(4.0, 9, 5.0, **dict(zip(names, figures, strict=True)))])
    drawn = {plot.title for plot in plots.plots(RunData.read(run))}
    print_summary(run, summarise(run))
    text, own, some = capsys.readouterr().out, {"Turns", "Failed calls", "Environment"}, figures[0] > 1
    assert drawn & own == (own if some else set()) and "Loss" in drawn
    assert bool(re.search(r"turns per completion +1.5", text)) == some
    assert bool(re.search(r"failed tool calls +25.0 %", text)) == some


def test_a_task_names_its_score_and_shows_what_it_costs(run: RunDir) -> None:
    """Perplexity under the reference: exp(−Σ log π_ref ÷ tokens) over both searchers' nine tokens."""
    write(run.metrics_file("trainer"), [step(1, 5.0, loss=1.0)])
    evaluate(run, "test", 0, (10, 15), ref_logprob=-0.9)
    assert not {plot.title for plot in plots.plots(RunData.read(run))} & {
        "Score and distance",
        "pass@1",
    }
    evaluate(run, "validation", 8, (40, 45), ref_logprob=-1.8)
    evaluate(run, "test", 10, (40, 45), ref_logprob=-1.8)
    summary = summarise(run)
    assert (summary.score_name, summary.pass_at_1_before, summary.pass_at_1_after) == ("win rate", 0.25, 0.85)
    assert summary.perplexity_before == pytest.approx(math.exp(0.1))
    assert summary.perplexity_after == pytest.approx(math.exp(0.2))
    (drawn,) = [plot.svg for plot in plots.plots(RunData.read(run)) if plot.title == "Score and distance"]
    assert "1.22" in drawn and "perplexity" in drawn
    anchored = re.findall(r"text-anchor: (\w+)[^>]*>(step \d+)<", drawn)
    assert anchored == [("start", "step 0"), ("end", "step 10")], "one beside the other, both in the figure"
    assert re.findall(r">(test|validation)<", drawn) == ["test", "validation"], "small points on large"
    text = written(run)
    assert "win rate before → after" in text and "pass@1" not in text


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_page_of_a_run_that_has_just_begun(run: RunDir, steps: int) -> None:
    write(run.metrics_file("trainer"), [{"time": 5.0, "event": "started", "step": 0}])
    write(run.metrics_file("trainer"), [step(s, 5.0 + s, loss=1.0) for s in range(1, steps + 1)])
    text = written(run)
    assert f"unfinished at step {steps} of {STEPS}" in text
    assert ("No optimizer step has been logged yet" in text) == (steps == 0)
    assert text.count("<figure") == len(plots.plots(RunData.read(run)) if steps else [])


def test_the_page_tells_what_a_resume_changed(run: RunDir) -> None:
    assert "changed by a resume" not in written(run)
    happen(run, 5.0, "changed", keys={"train.learning_rate.peak": (5e-4, 1e-4), "train.steps": (4, 8)})
    run.adapt(["train.learning_rate.peak=1.0e-4", "train.steps=8"])
    told = re.findall(r"changed by a resume: (.*)</p>", written(run))
    assert told == ["train.learning_rate.peak 0.0005 → 0.0001", "train.steps 4 → 8"]


def test_code_that_a_resume_changed_is_told_beside_the_scores(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed_run(run)
    told = "rewards.py, words.txt at a resume; figures from before are of the old code"
    assert told not in written(run)
    happen(run, 4.0, "changed", keys={}, files=["rewards.py", "words.txt"])
    happen(run, 5.0, "changed", keys={}, files=["rewards.py"])
    assert f"held-out prompts; code changed: {told}" in written(run)
    print_summary(run, summarise(run))
    assert re.search(rf"^code changed +{told}$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("job", "kinds", "words"),
    [
        ("", ("signal", "stopped"), "asked to stop"),
        ("7", ("signal", "stopped"), "asked to stop, by you or by Slurm"),
        ("7", ("draining", "signal", "stopped"), "a node drained"),
        ("7", ("stopped",), "ended by Slurm (cancelled or preempted), or out of time"),
        ("7", ("signal", "stopped", "requeue"), "preempted or out of time, back to the queue"),
        ("7", ("draining", "signal", "stopped", "requeue"), "a node drained, back to the queue"),
        ("7", ("stopped", "requeue"), "the ranks were asked to stop, or out of time, back to the queue"),
        ("7", ("stopped", "preempted"), "preempted, cancelled or out of time"),
    ],
)
def test_the_page_tells_why_ranks_stopped(run: RunDir, job: str, kinds: tuple[str, ...], words: str) -> None:
    """As ``tba status`` does: what Slurm ended was not asked to stop by the user."""
    for time, kind in enumerate(("start", *kinds)):
        happen(run, float(time), kind, job=job, attempt="attempt-001", trainers=1, searchers=2)
    (row,) = page.attempt_rows(RunData.read(run))
    assert row["outcome"] == words


def test_the_page_knows_that_a_job_was_asked_to_stop_before_its_ranks_started(run: RunDir) -> None:
    for time, kind in enumerate(("allocated", "signal", "start", "stopped")):
        names = {"attempt": "attempt-001", "trainers": 1, "searchers": 2} if kind == "start" else {}
        happen(run, float(time), kind, job="7", **names)
    (row,) = page.attempt_rows(RunData.read(run))
    assert row["outcome"] == "asked to stop, by you or by Slurm"


def test_the_page_tells_a_requeue_by_slurm_from_a_cancellation(run: RunDir) -> None:
    for restarts in (0, 1):
        for time, kind in enumerate(("allocated", "start", "stopped")):
            happen(run, 10.0 * restarts + time, kind, job="7", restarts=restarts, trainers=1, searchers=2)
    first, second = (row["outcome"] for row in page.attempt_rows(RunData.read(run)))
    assert first == "ended by Slurm (requeued, preempted or a node lost), back to the queue"
    assert second == "ended by Slurm (cancelled or preempted), or out of time"


def test_minutes_do_not_run_while_nothing_does(run: RunDir) -> None:
    resumed_run(run)
    minutes = plots.run_minutes(RunData.read(run))
    at = np.array([1000.0, 1030.0, 1060.0, 2000.0, 4660.0, 4690.0, 4710.0])
    assert minutes(at).tolist() == pytest.approx([0, 0.5, 1, 1, 1, 1.5, 1 + 50 / 60])


def test_the_page_tells_the_attempts_of_a_run(run: RunDir) -> None:
    resumed_run(run)
    happen(run, 995.0, "start", attempt="attempt-001", trainers=1, searchers=2)
    happen(run, 2000.0, "allocated", job="7", nodes="a,b")  # nobody noted how the first attempt ended
    happen(run, 2005.0, "unreachable", job="7", nodes="b")
    happen(run, 2010.0, "requeue", job="7")
    happen(run, 4600.0, "allocated", job="7", restarts=1, nodes="a,c")
    happen(run, 4650.0, "start", job="7", restarts=1, attempt="attempt-002", trainers=1, searchers=2)
    write(run.metrics_file("searcher", 0), [search(4700.0, 1, 1, rebuilds=2)])
    shown = [
        (
            *(row[name] for name in ("name", "job", "lasted", "steps", "outcome", "verdict")),
            round(row["left"]),
        )
        for row in page.attempt_rows(RunData.read(run))
    ]
    assert shown == [  # the bars' scale: 995 to 4710, the trainer's last word
        ("attempt-001", "", "1:05", "0 → 6", "killed, or its node lost", "bad", 0),
        ("no ranks", "job 7, restarts: 0", "0:10", "–", "back to the queue", "", 27),
        ("attempt-002", "job 7, restarts: 1", "1:50", "4 → 10", "finished", "good", 97),
    ]
    text = written(run)
    assert "2 × engine rebuilt · 1 × attempt killed · 1 × node unreachable · 1 × back to the queue" in text


def test_the_terminal_shows_every_alert_and_marks_a_score_with_answers_not_judged(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 100 answers each, 5 before and 3 after have no reward; all others are right."""
    write(run.metrics_file("trainer"), [step(s, 5.0, loss=1.0) for s in range(1, 11)])
    write(run.metrics_file("searcher", 0), [search(6.0, 9, 9.0, rejected=40, trajectories=10)])
    for at, (total, judged) in {0: (50, (47, 48)), 10: (50, (48, 49))}.items():
        for searcher, right in enumerate(judged):
            part = Evaluation(split="test", step=at, correct=right, total=total, tokens=9, truncated=0)
            write_evaluation(run, searcher, 2, replace(part, graded=right, rewards=right, squares=right))
    summary = page.write_report(run)
    print_summary(run, summary)
    text = capsys.readouterr().out
    assert re.search(r"pass@1 before +95.0 % \(.*\), 5 answers not judged", text)
    assert re.search(r"pass@1 after +97.0 % \(.*\), 3 answers not judged", text)
    lines = text.splitlines()
    assert len(summary.alerts) == 2 and all(f"alert        {words}" in lines for words in summary.alerts)
    assert f"report       {run.report}" in lines and f"summary      {run.summary}" in lines


def test_a_run_without_a_step_has_one_sentence_for_results(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run.metrics_file("trainer"), [{"time": 5.0, "event": "started", "step": 0}])
    print_summary(run, summarise(run))
    words = "no optimizer step was done, so there are no results yet; acknowledged: 0 trajectories\n"
    assert capsys.readouterr().out == words


def test_the_page_begins_with_the_alerts(run: RunDir) -> None:
    assert "<h2>Alerts</h2>" not in (text := written(run)) and "no alerts" not in text
    resumed_run(run)
    text = written(run)
    assert "There are no alerts" in text and "<h2>Alerts</h2>" not in text
    write(run.metrics_file("searcher", 0), [search(4666.0, 9, 9.0, rejected=40, trajectories=10)])
    text = written(run)
    where = [text.index(words) for words in ("<h2>Alerts</h2>", "40 trajectories (61 %)", "pass@1 before")]
    assert where == sorted(where) and text.count("40 trajectories (61 %)") == 1
    summary = summarise(run)
    assert summary.rejected == 40 and summary.alerts[0].startswith("40 trajectories (61 %) set aside")


def test_perplexities_under_different_references_are_not_put_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a reset every 4 of 10 steps the last weights are evaluated under the policy of step 8."""
    run = new_run(tmp_path, reference={"name": "reset", "every": 4})
    write(run.metrics_file("trainer"), [step(s, 5.0 + s) for s in range(1, 11)])
    for at in (0, 4, 9, 10):
        evaluate(run, "test" if at in (0, 10) else "validation", at, (10, 15), ref_logprob=-0.9)
    summary = summarise(run)
    assert (summary.perplexity_before, summary.perplexity_reference) == (None, 8)
    assert summary.perplexity_after == pytest.approx(math.exp(0.1))
    (drawn,) = [plot.svg for plot in plots.plots(RunData.read(run)) if plot.title == "Score and distance"]
    assert "perplexity of the answers under the policy of step 8" in drawn
    print_summary(run, summary)
    assert re.search(r"reference of the perplexity +policy of step 8", capsys.readouterr().out)
    assert set(re.findall(r"<text[^>]*>step (\d+)</text>", drawn)) == {"9", "10"}


def test_a_score_of_an_earlier_step_is_named_as_that(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run that was extended and then stopped; once it finishes again the step is left out."""
    write(run.metrics_file("trainer"), [step(s, 5.0 + s) for s in range(1, 9)])
    evaluate(run, "test", 0, (10, 15))
    evaluate(run, "test", 5, (20, 25))
    print_summary(run, summarise(run))
    assert re.search(r"pass@1 after +45\.0 % .*, at step 5\b", capsys.readouterr().out)
    assert "pass@1 before → after step 5<" in written(run)
    print_status(run, lambda _: [])
    assert "25.0 % → 45.0 % (step 5)" in capsys.readouterr().out
    write(run.metrics_file("trainer"), [step(s, 5.0 + s) for s in (9, 10)])
    evaluate(run, "test", 10, (20, 30))
    print_summary(run, summarise(run))
    print_status(run, lambda _: [])
    assert "at step" not in (said := capsys.readouterr().out) and "25.0 % → 50.0 %" in said
    assert "(step" not in said and "pass@1 before → after<" in written(run)


def test_graded_rewards_lead_with_their_mean(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Two searchers with the same four answers each: the interval is ±1.96·sd/√8."""
    write(run.metrics_file("trainer"), [step(1, 5.0, loss=1.0)])
    before, after = (0.2, 0.3, 0.2, 0.3), (0.6, 0.8, 0.6, 0.8)
    evaluate(run, "test", 0, (0, 0), 4, rewards=before, answers=(Answer(0, "Why?", "so", False, 0.25),))
    evaluate(run, "test", 10, (0, 0), 4, rewards=after, answers=(Answer(0, "Why?", "then", False, 0.75),))
    summary = summarise(run)
    assert summary.score_name == "mean reward" and summary.score_before and summary.score_after
    half = 1.959964 * np.std(before * 2, ddof=1) / math.sqrt(8)
    found = (summary.score_before.value, summary.score_before.low, summary.score_before.high)
    assert found == pytest.approx((0.25, 0.25 - half, 0.25 + half))
    print_summary(run, summary)
    text = capsys.readouterr().out
    assert re.search(r"mean reward before +0.250 \(0.2.* … 0.2.*\)", text) and "pass@1" not in text
    page_ = written(run)
    assert "mean reward before → after" in page_ and "0.250" in page_ and "+0.450" in page_
    after_ = f"{0.7 - half * 2:.3f} … {0.7 + half * 2:.3f}"  # twice as spread as before
    assert f"after: {after_} (95 % interval)" in page_
    assert "reward 0.75" in page_ and "✗ wrong" not in page_


def test_the_share_of_correct_answers_is_beside_a_mean_reward(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Correct are 2 of 8 answers, and then 5."""
    write(run.metrics_file("trainer"), [step(1, 5.0, loss=1.0)])
    evaluate(run, "test", 0, (1, 1), 4, rewards=(0.2, 0.3, 0.2, 1.0))
    evaluate(run, "test", 10, (3, 2), 4, rewards=(0.6, 0.8, 1.0, 1.0))
    print_summary(run, summarise(run))
    assert re.search(r"correct answers +25.0 % → 62.5 %", capsys.readouterr().out)
    assert "; correct answers: 25.0 % → 62.5 %" in written(run)


def test_no_answer_is_called_correct_where_the_task_cannot_tell(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with several rewards, of which only the sum is known; also where limits cut off answers."""
    write(run.metrics_file("trainer"), [step(1, 5.0, loss=1.0)])
    for at, correct in ((0, 1), (10, 3)):
        sums = {"graded": 4, "rewards": 2.0 * correct, "squares": 4.0 * correct, "cut_correct": 1}
        counts = {"correct": correct, "total": 4, "tokens": 9, "truncated": 1}
        part = Evaluation(split="test", step=at, score_name=MEAN_REWARD, **counts, **sums)
        write_evaluation(run, 0, 1, part)
    summary = summarise(run)
    assert (summary.pass_at_1_after, summary.ended_after) == (None, None)
    assert summary.score_after and summary.score_after.value == 1.5
    print_summary(run, summary)
    for text in (capsys.readouterr().out, written(run)):
        assert "mean reward" in text and "correct answers" not in text and "right and ended" not in text


def test_the_share_of_correct_answers_is_told_once_if_it_is_the_score(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run.metrics_file("trainer"), [step(1, 5.0, loss=1.0)])
    evaluate(run, "test", 0, (1, 1), 4)
    print_summary(run, summarise(run))
    text = capsys.readouterr().out
    assert "pass@1 before" in text and "correct answers" not in text


@pytest.mark.parametrize(
    ("names", "shown", "note"),
    [
        (("right",), None, ""),
        (("short", "right"), ("right", "short"), "without weights"),
        (("b_is_the_second", "a", "c", "d", "e"), ("a", "s_the_second", "c", "d"), "without weights; 4 of 5"),
    ],
)
def test_rewards_with_names_are_lines_of_one_plot(
    run: RunDir, names: tuple[str, ...], shown: tuple[str, ...] | None, note: str
) -> None:
    write(run.metrics_file("trainer"), [step(s, 10.0 * s, loss=1.0) for s in (1, 2)])
    for searcher in (0, 1):
        rewards = {f"reward/{name}": 0.5 + searcher for name in names}
        write(run.metrics_file("searcher", searcher), [search(5.0, 10, 100, version=1, **rewards)])
    data = RunData.read(run)
    assert data.trends.latest(f"search/reward/{names[0]}") == 1.0  # of as many completions of each searcher
    found = next((plot for plot in plots.plots(data) if plot.title == "Rewards by name"), None)
    assert (found is not None) is (shown is not None)
    if found and shown:
        assert found.note.endswith(note)
        assert all(f">{name}</text>" in found.svg for name in shown) and ">e</text>" not in found.svg


@pytest.mark.parametrize(
    ("names", "shown"), [(("right",), []), (("e", "d", "c", "b", "a"), ["a", "b", "c", "d"])]
)
def test_rewards_with_names_are_rows_of_the_summary_and_a_line_of_status(
    run: RunDir, names: tuple[str, ...], shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two searchers have scored 4 completions each, with 0.5 and 1.5 on average."""
    write(run.metrics_file("trainer"), [step(1, 5.0, loss=1.0)])
    for searcher in (0, 1):
        rewards = {f"reward/{name}": 0.5 + searcher for name in names}
        write(run.metrics_file("searcher", searcher), [search(5.0, 10, 100, version=1, **rewards)])
    assert summarise(run).rewards == dict.fromkeys(shown, 1.0)
    monitor = RunMonitor(run)
    monitor.update()
    means = ", ".join(f"{name} 1.000" for name in shown)
    assert facts(monitor, run_state(monitor)).get("rewards", "") == means
    assert (f"rewards {means}" in plain_line(monitor)) is bool(shown)
    print_summary(run, summarise(run))
    text = capsys.readouterr().out
    assert re.findall(r"reward (\w) +1\b", text) == shown


@pytest.mark.parametrize(("after", "verdict"), [(41, ""), (45, "good"), (40, "bad")])
def test_only_a_change_that_can_be_seen_is_good_or_bad(run: RunDir, after: int, verdict: str) -> None:
    """Before: 82 of 100 answers are right."""
    evaluate(run, "test", 0, (41, 41))
    evaluate(run, "test", 10, (after, 41))
    data = RunData.read(run)
    assert page.tiles(data, summary_of(data))[0].verdict == verdict
    assert f'<b class="{verdict}">' in written(run)


def test_tokens_have_a_unit_in_which_they_are_not_0() -> None:
    assert [page._rounded(tokens) for tokens in (0, 999, 11_400, 999_499, 999_500, 12_345_678)] == (
        ["0", "999", "11 k", "999 k", "1.0 M", "12.3 M"]
    )


def test_rewards_of_0_and_1_are_right_or_wrong(run: RunDir) -> None:
    evaluate(run, "test", 0, (2, 2), 4, rewards=(1.0, 0.0, 1.0, 0.0))
    summary = summarise(run)
    assert summary.score_name == "pass@1" and summary.score_before and summary.score_before.value == 0.5


def test_equal_rewards_are_called_so_instead_of_an_interval_without_width() -> None:
    summary = SimpleNamespace(score_name="mean reward")
    assert score_words(summary, Estimate(1.0, 1.0, 1.0), 0) == "1.000 (all equal)"  # type: ignore[arg-type]


@pytest.mark.parametrize(("fresh", "name"), [(0.5, "pass@1"), (0.1, "mean reward"), (-0.5, "mean reward")])
def test_a_graded_reward_is_known_by_training_while_all_held_out_answers_get_0(
    run: RunDir, fresh: float, name: str
) -> None:
    """Four completions whose rewards are 0 or 1 have a mean of quarters."""
    write(run.metrics_file("searcher", 0), [search(1.0, 4, 100, reward=fresh)])
    evaluate(run, "test", 0, (0, 0), 4, rewards=(0.0,) * 4)
    data = RunData.read(run)
    assert data.score_name == name
    metrics = run.metrics_file("searcher", 0)
    keep_digest(metrics, data.searchers[0], metrics.stat().st_size)
    assert RunData.read(run).score_name == name


HOSTILE = 'x"><script>alert(1)</script><svg a="\\1\x1b\u202e'


def test_a_name_in_a_strangers_run_is_text_in_every_page(run: RunDir, tmp_path: Path) -> None:
    resumed_run(run)
    for path in run.evaluations.glob("*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "score_name": HOSTILE}))
    other = new_run(tmp_path / "other")
    resumed_run(other)
    strange = {f"reward/{HOSTILE}": 1.0, "reward/\ud800\0": 1.0}
    write(run.metrics_file("searcher", 0), [search(4666.0, 10, 100, **strange)])
    assert "Rewards by name" not in written(run)  # matplotlib cannot draw half a character
    write(
        run.metrics_file("searcher", 0),
        [search(4667.0, 10, 100, **{f"reward/<script {i}": 1.0 for i in "ab"})],
    )
    assert "Rewards by name" in written(run)
    write_comparison(tmp_path / "compare.html", compare([run.path, other.path]))
    for text in (written(run), (tmp_path / "compare.html").read_text()):
        assert "<script" not in text and not set(text) & {"\x1b", "\u202e"}
        assert "default-src 'none'" in text and r"\x1b" in text


@pytest.mark.parametrize("name", ["environment", "jsonl"])
def test_the_last_lines_ask_about_a_whole_row_where_conversations_may_need_it_and_for_the_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    task = {"name": name, "train_file": "my rows.jsonl", "reward": "own:score"}
    run = RunDir.create(parse_config({"run": {"root": str(tmp_path)}, "model": {"path": "m"}, "task": task}))
    run.export.mkdir()
    print_summary(run, summarise(run))
    question = """"$(grep -m 1 { 'my rows.jsonl')\"""" if name == "environment" else '"…"'
    first, then = capsys.readouterr().out.splitlines()[-2:]
    assert first == f"try it       tba ask {run.path} {question}"
    assert then == f"its score    tba evaluate {run.path}"
