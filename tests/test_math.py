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
from tba_hpc.tasks.math import Math, boxed


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
    assert task.rewards(second, [completion(r"\boxed{\frac{9}{2}}")]) == [1.0]
    assert task.rewards(second, [completion(r"\boxed{\frac{7}{2}}")]) == [0.0]


def test_a_chat_template_wraps_the_question(tmp_path: Path) -> None:
    file = write(tmp_path / "test.jsonl", *ROWS)
    task = Math(ByteTokenizer(), test_file=file, template="{question}", chat=True)
    assert ByteTokenizer().decode(task.prompts("test")[0].tokens) == "<What is half of 7?>"


def test_another_form_of_data_is_named_with_what_was_found(tmp_path: Path) -> None:
    file = write(tmp_path / "train.jsonl", {"question": "Which?", "answer": "#### 12"})
    with pytest.raises(ConfigError) as caught:
        load_task(TaskSection(name="math", train_file=file), ByteTokenizer())
    sentence = str(caught.value)
    assert (
        "line 1: cannot be used (found question, answer); write a JSON object with a text 'problem'"
        in sentence
    )
    assert "\n" not in sentence
