"""MATH: boxes, equivalence in a worker that cannot be kept busy, the data's form, chat templates."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from pathlib import Path

import psutil
import pytest
from byte_tokenizer import ByteTokenizer, completion

from tba_hpc.config import ConfigError, TaskSection
from tba_hpc.tasks import equivalence, load_task
from tba_hpc.tasks.equivalence import Equivalence
from tba_hpc.tasks.word_problems import Math, boxed


@pytest.fixture(scope="module")
def equal() -> Equivalence:
    return Equivalence()


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{27}.", "27"),
        (r"first \boxed{1}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ \left\{ 1, 2 \right\} }", r"\left\{ 1, 2 \right\}"),
        (r"\boxed{\frac{1}{2}", None),
        (r"hence $x = \boxed 2$.", "2"),  # as row algebra/24014 of MATH
        (r"is \boxed 9$, or so", "9"),  # as row algebra/25040
        (r"The answer is \boxed 12. I hope", "12"),
        (r"$\boxed\frac{1}{2}$", r"\frac{1}{2}"),
        (r"\(\boxed \pi\)", r"\pi"),
        (r"{\bf \boxed 7}", "7"),
        (r"$\boxed {5}$", "5"),
        (r"\fbox{\sqrt{2}}", r"\sqrt{2}"),
        (r"\boxed{1}, no: \fbox{2}", "2"),
        (r"\fbox{1}, no: \boxed 2", "2"),
        (r"\framebox{3}", "3"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a\\}", "a\\\\"),
        (r"\boxedness 3", None),
        (r"\boxed{}", None),
        ("27", None),
        ("", None),
    ],
)
def test_what_the_last_box_holds(text: str, inside: str | None) -> None:
    assert boxed(text) == inside


@pytest.mark.parametrize(
    ("answer", "target", "same"),
    [
        (r"\frac{7}{2}", "3.5", True),
        ("7/2", r"\frac{7}{2}", True),
        (r"\dfrac72", r"\frac{7}{2}", True),
        ("3.49", "3.5", False),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("(x+1)^2", "x^2+1", False),
        (r"\{2, 1\}", r"\{1, 2\}", True),
        (r"(1, 2)", r"(2, 1)", False),
        (r"\text{nothing}", "3.5", False),
        (r"\left(3, \frac{\pi}{2}\right)", r"(3, \pi/2)", True),
    ],
)
def test_equivalence_is_that_of_mathematics(equal: Equivalence, answer: str, target: str, same: bool) -> None:
    assert equal(answer, target) == same


def test_equivalence_works_in_a_thread_and_outlives_what_would_take_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scorer is a thread. A power tower keeps integer arithmetic busy beyond any signal."""
    equal, results = Equivalence(), list[bool]()
    assert equal("1", "1")  # the worker is up
    monkeypatch.setattr(equivalence, "DEADLINE_SECONDS", 6.0)
    thread = threading.Thread(target=lambda: results.append(equal("9^{9^{9^{9}}}", "3.5")), daemon=True)
    begun = time.monotonic()
    thread.start()
    thread.join(timeout=60)
    assert results == [False]
    assert time.monotonic() - begun < 60
    monkeypatch.undo()
    assert equal(r"\frac{7}{2}", "3.5")
    equal.close()


def test_a_slow_start_of_the_worker_makes_no_answer_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a busy machine: it takes longer than an answer may."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(equivalence, "DEADLINE_SECONDS", 6.0)
    equal = Equivalence()
    assert equal("0.5", r"\frac{1}{2}")
    equal.close()
    monkeypatch.setattr(equivalence, "START_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="the process that compares answers was not ready within"):
        equal("0.5", r"\frac{1}{2}")


def test_the_worker_has_bounded_memory() -> None:
    """Else an answer could take the memory of the whole node."""
    others = {process.pid for process in multiprocessing.active_children()}
    equal = Equivalence()
    assert equal("1", "1")
    (worker,) = {process.pid for process in multiprocessing.active_children()} - others
    assert psutil.Process(worker).rlimit(psutil.RLIMIT_AS) == (8 << 30, 8 << 30)
    equal.close()


def write(path: Path, *rows: dict[str, str]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


ROWS = (
    {"problem": "What is half of 7?", "solution": r"It is \boxed{\frac{7}{2}}.", "level": "Level 1"},
    {"problem": "And of 9?", "solution": "see above", "answer": r"\frac{9}{2}"},
)


def test_the_target_is_the_box_or_the_answer_and_truncated_ones_do_not_count(tmp_path: Path) -> None:
    task = Math(ByteTokenizer(), test_file=write(tmp_path / "test.jsonl", *ROWS))
    first, second = task.prompts("test")
    assert [first.target, second.target] == [r"\frac{7}{2}", r"\frac{9}{2}"]
    text = ByteTokenizer().decode(first.tokens)
    assert (
        text == "What is half of 7?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert task.rewards(first, [completion(r"7/2 is \boxed{3.5}")]) == [1.0]
    assert task.rewards(first, [completion(r"7/2 is \boxed{3.5}", "length")]) == [0.0]
    assert task.rewards(first, [completion("7/2")]) == [0.0]
    thoughts = r"<think>\boxed{3.5}?</think> It is {}.", r"<think>\boxed{3}?</think> It is \boxed{3.5}."
    assert task.rewards(first, [completion(text) for text in thoughts]) == [0.0, 1.0]
    assert task.rewards(second, [completion(r"\boxed{\frac{9}{2}}")]) == [1.0]
    assert task.rewards(second, [completion(r"\boxed{\frac{7}{2}}")]) == [0.0]


def test_an_answer_may_be_a_number(tmp_path: Path) -> None:
    rows = [{"problem": "?", "answer": answer} for answer in (204, 0, -1.5, 1e22)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts = (task := Math(ByteTokenizer(), test_file=str(tmp_path / "test.jsonl"))).prompts("test")
    assert [prompt.target for prompt in prompts] == ["204", "0", "-1.5", "1e+22"]
    texts = r"\boxed{204}", r"\boxed{0}", r"\boxed{-\frac32}", r"\boxed{10^{22}}"
    assert task.correct(prompts, [completion(text) for text in texts]) == [True] * 4
    for no_answer in (True, None, [9], float("nan")):
        assert task.parse({"problem": "?", "answer": no_answer}) is None


def test_a_chat_template_wraps_the_question(tmp_path: Path) -> None:
    file = write(tmp_path / "test.jsonl", *ROWS)
    task = Math(ByteTokenizer(), test_file=file, template="{question}", chat=True)
    assert ByteTokenizer().decode(task.prompts("test")[0].tokens) == "<What is half of 7?>"


def test_rows_of_no_use_are_set_aside_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ids stay consecutive, and held-out problems are the last of those kept, whatever is asked for first."""
    rows: list[object] = [{"problem": f"What is {i}?", "solution": f"$\\boxed {i}$"} for i in range(700)]
    rows[2] = {"problem": "?", "solution": "It is 2."}
    rows[3] = {"problem": "?", "solution": 3}
    rows[4] = {"problem": " ", "solution": r"\boxed{4}"}
    rows[5] = "no object"
    rows[9] = {"problem": "?", "answer": ["9"]}
    rows[698] = {"problem": "?", "solution": r"\boxed{}"}
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = Math(ByteTokenizer(), train_file=str(tmp_path / "train.jsonl"), validation_problems=3)
    found = {split: task.prompts(split) for split in ("validation", "train", "test")}  # type: ignore[arg-type]
    targets = {split: [int(prompt.target) for prompt in prompts] for split, prompts in found.items()}
    kept = [i for i in range(700) if i not in (2, 3, 4, 5, 9, 698)]
    assert targets == {"validation": kept[-3:], "test": kept[-6:-3], "train": kept[:-6]}
    assert all(prompt.id == i for prompts in found.values() for i, prompt in enumerate(prompts))
    (line,) = [record.message for record in caplog.records]
    assert "train.jsonl, lines 3, 4, 5, 6, 10 and 1 more: cannot be used (found problem, solution); " in line
    assert "set aside, 6 of 700 rows: each must be a JSON object with a text 'problem'" in line


def test_more_than_one_in_a_hundred_is_refused(tmp_path: Path) -> None:
    good = {"problem": "?", "solution": r"\boxed{1}"}
    file = write(tmp_path / "train.jsonl", *[good] * 100, {}, {})
    with pytest.raises(
        ConfigError, match=r"lines 101, 102: cannot be used \(found no field\); write .* \(2 of 102 "
    ):
        load_task(TaskSection(name="math", train_file=file), ByteTokenizer())
