"""What a task of the user's own must give: one sentence for each way of falling short."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, get_args
from unittest.mock import Mock

import numpy as np
import pytest
from byte_tokenizer import ByteTokenizer, completion

from tba_hpc.config import ConfigError, TaskSection
from tba_hpc.core.ports import Task
from tba_hpc.core.task_contract import (
    MOST_REASONS,
    Failures,
    checked_correct,
    checked_grades,
    checked_parts,
    checked_rewards,
    class_name,
    with_defaults,
)
from tba_hpc.core.types import Completion, Prompt, Split
from tba_hpc.tasks import load_task
from tba_hpc.tasks.rows import RightOrWrong

TOKENS = np.array([1, 2], np.int32)


class Own:
    """Three prompts a split, unless others are set from outside; so, too, what it gives."""

    made: ClassVar[dict[Split, object]] = {}
    given: ClassVar[object] = (0.0, 1.0)

    def __init__(self, tokenizer: object, *, train_file: object = None, test_file: object = None) -> None:
        """Nothing to keep."""

    def prompts(self, split: Split) -> object:
        """As set."""
        return self.made.get(split, [Prompt(i, TOKENS, "") for i in range(3)])

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> object:
        """As set."""
        return self.given

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> object:
        """As set."""
        return self.given


class WithoutCorrect(Own):
    """Nobody can say how well a model does."""

    correct = None  # type: ignore[assignment]


class Abstract(RightOrWrong):
    """Answers are accepted by nobody."""

    def __init__(self, tokenizer: ByteTokenizer, *, train_file: object = None, test_file: object = None):
        super().__init__(tokenizer)

    def questions(self, split: Split) -> list[tuple[str, str]]:
        """One."""
        return [("1 + 1", "2")]


class Fileless(Own):
    """It does not take what every task is given."""

    def __init__(self, tokenizer: object) -> None:
        """Nothing to keep."""


class Graded(Own):
    """Some of what a task may have."""

    longest_call = math.inf

    def grades(self) -> list[float]:
        """Of two answers."""
        return [0.5, 1.0]


def own(task: type) -> Task:
    made: Task = with_defaults(task, task.__name__)(None)
    return made


def load(task: type) -> Task:
    return load_task(TaskSection(name=f"{__name__}:{task.__name__}"), ByteTokenizer())


def test_a_class_that_derives_from_nothing_gets_the_defaults_of_what_it_lacks() -> None:
    plain, graded, generator = load(Own), load(Graded), Mock()
    assert isinstance(graded, Graded) and class_name(graded) == f"{__name__}:Graded"
    assert (graded.score_name, graded.evaluation_temperature) == ("pass@1", 0.0)
    assert (plain.longest_call, graded.longest_call) == (None, math.inf)
    assert (checked_grades(plain, 2), checked_grades(graded, 2)) == ([None, None], [0.5, 1.0])
    assert checked_parts(graded, 2) == graded.summary([]) == {}
    assert graded.encode_question("1 + 1") is None
    assert graded.converse(generator, ByteTokenizer()) is generator


@pytest.mark.parametrize("split", get_args(Split))
@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        ([Prompt(7, TOKENS, "")] * 3, "[0] has the id 7, but ids count the prompts of a split from 0: give"),
        ([Prompt(0, TOKENS, "")] * 3, "[1] has the id 0, but ids count the prompts of a split from 0: give"),
        ([Prompt("0", TOKENS, "")], "[0] has the id '0', but ids count"),
        ([Prompt(0, [1, 2], "")], "[0] has tokens of type list, but they must be int32 [T]: give np.array("),
        ([Prompt(0, np.arange(2), "")], "[0] has tokens of type int64 [2], but they must be int32 [T]"),
        ([Prompt(0, TOKENS[None], "")], "[0] has tokens of type int32 [1, 2], but they must be int32 [T]"),
        ([Prompt(0, TOKENS[:0], "")], "[0] has no tokens, but a model needs one to continue"),
        ([Prompt(0, TOKENS, 12)], "[0] has the target 12, but a target is text: give a str"),
        ([{"id": 0}], "[0] is a dict: give a tba_hpc.Prompt"),
        (iter(()), " gave a tuple_iterator: give a list or a tuple of prompts"),
    ],
)
def test_ill_formed_prompts_are_refused_at_load(
    monkeypatch: pytest.MonkeyPatch, split: Split, made: object, sentence: str
) -> None:
    monkeypatch.setattr(Own, "made", {split: made})
    with pytest.raises(ConfigError) as caught:
        load(Own)
    assert str(caught.value).startswith(f"the task {__name__}:Own: prompts({split!r}){sentence}")


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (
            WithoutCorrect,
            r"WithoutCorrect has no method correct\(\), which it needs: write it as ports\.Task",
        ),
        (Abstract, r"Abstract has no method accepts\(\), which it needs"),
        (Fileless, r"Fileless cannot be made \(got an unexpected keyword argument 'train_file'\): let its"),
    ],
)
def test_a_class_that_is_no_task_is_refused_at_load(task: type, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(task)


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ([0, 1], [0.0, 1.0]),
        (np.array([0.5, np.inf], np.float32), [0.5, np.inf]),
        ((True, False), [1.0, 0.0]),
        ([1.0], None),
        ([1.0, 0.0, 0.0], None),
        ([1.0, None], None),
        (["1", "0"], None),
        ("10", None),
        ([[1.0], [0.0]], None),
        (1.0, None),
        (None, None),
    ],
)
def test_rewards_are_a_number_for_each_completion(
    monkeypatch: pytest.MonkeyPatch, given: object, numbers: list[float] | None
) -> None:
    monkeypatch.setattr(Own, "given", given)
    task, prompt, completions = own(Own), Prompt(4, TOKENS, ""), [completion("a"), completion("b")]
    if numbers is not None:
        assert checked_rewards(task, prompt, completions) == numbers
        return
    with pytest.raises(ConfigError) as caught:
        checked_rewards(task, prompt, completions)
    sentence = (
        f"the task {__name__}:Own: rewards() gave {given!r} for prompt 4, but 2 completions need a number"
    )
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ([True, False], [True, False]),
        (np.array([False, True]), [False, True]),
        ([1.0, 0], [True, False]),
        ([0.5, 0.0], None),
        ([True], None),
        (None, None),
    ],
)
def test_correct_is_a_truth_value_for_each_completion(
    monkeypatch: pytest.MonkeyPatch, given: object, right: list[bool] | None
) -> None:
    monkeypatch.setattr(Own, "given", given)
    task, prompts, completions = own(Own), [Prompt(0, TOKENS, "")] * 2, [completion("a"), completion("b")]
    if right is not None:
        assert checked_correct(task, prompts, completions) == right
        return
    with pytest.raises(
        ConfigError, match=r"Own: correct\(\) gave .*, but 2 completions need True or False each"
    ):
        checked_correct(task, prompts, completions)


@pytest.mark.parametrize(
    ("parts", "grades"),
    [({"a": [1.0, 2]}, [0.5, np.nan]), ({}, [1, 0])],
)
def test_parts_and_grades_are_a_number_for_each_completion(
    monkeypatch: pytest.MonkeyPatch, parts: object, grades: list[float]
) -> None:
    monkeypatch.setattr(Own, "reward_parts", lambda self: parts, raising=False)
    monkeypatch.setattr(Own, "grades", lambda self: grades, raising=False)
    assert checked_parts(own(Own), 2) == parts
    assert np.array_equal(checked_grades(own(Own), 2), grades, equal_nan=True)


@pytest.mark.parametrize(
    "given", [None, [1.0, 2.0], {"a": [1.0]}, {"a": [1.0, 2.0], "b": ["1", "2"]}, {"a": 3}]
)
def test_parts_of_another_kind_are_refused(monkeypatch: pytest.MonkeyPatch, given: object) -> None:
    monkeypatch.setattr(Own, "reward_parts", lambda self: given, raising=False)
    with pytest.raises(
        ConfigError, match=r"Own: reward_parts\(\) gave .*, but 2 completions need a number each"
    ):
        checked_parts(own(Own), 2)


@pytest.mark.parametrize("given", [None, [1.0], ["1", "2"]])
def test_grades_of_another_kind_are_refused(monkeypatch: pytest.MonkeyPatch, given: object) -> None:
    monkeypatch.setattr(Own, "grades", lambda self: given, raising=False)
    with pytest.raises(ConfigError, match=r"Own: grades\(\) gave .*, but 2 completions need a number each"):
        checked_grades(own(Own), 2)


def note_all(failures: Failures, texts: Sequence[str]) -> None:
    """Note a failure for each text, the error's."""
    for place, text in enumerate(texts):
        failures.note(f"episode {place} failed", ValueError(text))


def test_the_first_failure_for_each_reason_is_logged_and_then_one_in_a_hundred(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Reasons that differ in numbers alone are one."""
    note_all(Failures("failures", "on"), [f"{why}={i / 2}" for i in range(201) for why in ("n", "seed")])
    logged = [(0, 0), (1, 0), (200, 100), (201, 100), (400, 200), (401, 200)]
    assert caplog.messages == [
        f"episode {place} failed; on ({before} before for this reason; one in 100 is logged)"
        for place, before in logged
    ]


def test_errors_of_one_line_have_one_reason_whatever_data_they_quote(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of two lines, or of two classes, they have two."""

    def first(text: str) -> None:
        raise KeyError(text) if text == "a" else ValueError(text)

    def second(text: str) -> None:
        raise ValueError(text)

    failures = Failures("failures", "on")
    for fail in (first, second):
        for text in "abcd":
            try:
                fail(text)
            except (KeyError, ValueError) as error:
                failures.note(f"{fail.__name__} {text}", error)
    assert [said.partition(";")[0] for said in caplog.messages] == ["first a", "first b", "second a"]


def test_failures_without_an_error_have_what_happened_as_their_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = Failures("failures", "on")
    for place in range(50):
        failures.note(f"prompt {place} gave nan", None)
        failures.note(f"prompt {place} gave inf", None)
    assert [said.partition(";")[0] for said in caplog.messages] == ["prompt 0 gave nan", "prompt 0 gave inf"]


def test_reasons_beyond_a_bound_are_counted_together(caplog: pytest.LogCaptureFixture) -> None:
    """If every failure has a reason of its own, the log and the memory stay small."""
    note_all(Failures("failures", "on"), ["x" * i for i in range(MOST_REASONS + 250)])
    assert len(caplog.messages) == MOST_REASONS + 3
    beyond = [said.partition("(")[2] for said in caplog.messages[MOST_REASONS:]]
    assert [said.partition(" before for reasons beyond the first 100;")[0] for said in beyond] == [
        "0",
        "100",
        "200",
    ]


def test_failures_for_different_reasons_count_towards_one_limit() -> None:
    failures = Failures("failures", "on", limit=3)
    note_all(failures, ["a", "b"])
    with pytest.raises(ConfigError, match="3 failures in a row, the last because episode 0 failed: "):
        note_all(failures, ["c"])
