"""The arithmetic task: problems against Python's own arithmetic, disjoint splits, exact rewards."""

from __future__ import annotations

import numpy as np
import pytest
from byte_tokenizer import ByteTokenizer, completion

from tba_hpc.config import ConfigError, TaskSection
from tba_hpc.core.types import Prompt, Split
from tba_hpc.tasks import load_task
from tba_hpc.tasks.arithmetic import (
    LARGEST,
    Arithmetic,
    Problem,
    draw_problems,
    is_correct,
    split_of,
)

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
EXAMPLE = Problem("Gus", "apples", 17, (-3, 9), ("loses", "finds"))


@pytest.mark.parametrize("split", SPLITS)
def test_every_equation_and_result_is_what_python_computes(split: Split) -> None:
    for problem in draw_problems(split, 500, seed=3):
        *work, answer = problem.solution.split(";")
        assert all(eval(left) == int(right) for left, right in (line.split("=") for line in work))
        assert answer == f"#### {eval(problem.expression)}"
        assert all(0 <= total <= LARGEST for total in problem.totals[1:])
        assert 2 <= len(work) <= 4


def test_splits_share_no_expression_whatever_the_seeds() -> None:
    seen = {s: {p.expression for seed in range(3) for p in draw_problems(s, 800, seed)} for s in SPLITS}
    assert all(split_of(expression) == s for s in SPLITS for expression in seen[s])
    assert len(set.union(*seen.values())) == sum(map(len, seen.values()))


def test_problems_are_distinct_and_a_function_of_the_seed() -> None:
    first, again, other = (draw_problems("test", 600, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert len({problem.expression for problem in first}) == 600
    assert draw_problems("test", 10, 0) == first[:10]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("17-3=14;14+9=23;#### 23", True),
        ("#### 23", True),
        ("####23\n", True),
        ("17-3=14;14+9=24;#### 24", False),
        ("17-3=14;14+9=23;", False),
        ("23", False),
        ("", False),
        ("#### 22 #### 23", False),
        ("#### 23 or 24", False),
        ("#### 2323", False),
        ("#### 023", False),
    ],
)
def test_only_the_number_after_the_first_marker_counts(text: str, right: bool) -> None:
    assert is_correct(text, "23") is right


def test_reward_is_one_or_zero_and_never_for_a_truncated_answer() -> None:
    task = Arithmetic(ByteTokenizer())
    prompt = Prompt(0, np.zeros(1, np.int32), "23")
    assert task.rewards(prompt, [completion(EXAMPLE.solution)]) == [1.0]
    assert task.rewards(prompt, [completion("#### 24")]) == [0.0]
    assert task.rewards(prompt, [completion(EXAMPLE.solution, "length")]) == [0.0]
    answers = [completion(EXAMPLE.solution), completion(EXAMPLE.solution, "length")]
    assert task.correct([prompt] * 2, answers) == [True, False]


def test_prompts_are_numbered_and_encode_the_questions() -> None:
    task = Arithmetic(ByteTokenizer(), train_problems=7, test_problems=5, seed=2)
    prompts = task.prompts("test")
    assert [prompt.id for prompt in prompts] == list(range(5))
    assert [(ByteTokenizer().decode(p.tokens), p.target) for p in prompts] == [
        (problem.question, problem.target) for problem in draw_problems("test", 5, seed=2)
    ]
    assert len(task.prompts("train")) == 7
    assert len(task.prompts("validation")) == 256


def load(**fields: object) -> object:
    return load_task(TaskSection(**fields), ByteTokenizer())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "arithmetik"}, "unknown task 'arithmetik': did you mean 'arithmetic'?"),
        ({"name": "chess"}, "unknown task 'chess': valid are agent, arithmetic"),
        ({"name": "no_such_module:Task"}, "task.name=no_such_module:Task cannot be imported"),
        ({"name": "tba_hpc.tasks.arithmetic:Arithmetics"}, "did you mean 'Arithmetic'?"),
        (
            {"name": "arithmetic", "options": {"test_problem": 3}},
            "no option 'test_problem': did you mean 'test_problems'?",
        ),
        (
            {"name": "arithmetic", "options": {"seed": "one"}},
            "task.options.seed has the value 'one', but input should be a valid integer",
        ),
        (
            {"name": "arithmetic", "options": {"seed": "1"}},
            "task.options.seed has the value '1', but input should be a valid integer",
        ),
        (
            {"name": "arithmetic", "options": {"test_problems": 10**9}},
            "input should be less than or equal to 100000",
        ),
        ({"name": "arithmetic", "options": {"train_problems": 0}}, "has no training problem"),
        ({"name": "arithmetic", "train_file": "x.jsonl"}, "(x.jsonl) are not used by the task arithmetic"),
    ],
)
def test_bad_input_gets_one_sentence(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**fields)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
