"""GSM8K: both graders on all real answers, the splits of the data, and sentences for bad files."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import ClassVar, get_args

import pytest
from byte_tokenizer import ByteTokenizer, completion

from tba_hpc.config import ConfigError, TaskSection
from tba_hpc.core.types import Split
from tba_hpc.tasks import load_task
from tba_hpc.tasks.data import HubData
from tba_hpc.tasks.word_problems import GSM8K, Grader, final_expression, final_number

DATA = Path(__file__).parents[1].parent / "shared" / "data" / "gsm8k"
FROM = "train.jsonl and test.jsonl of github.com/openai/grade-school-math"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no GSM8K: put {FROM} into {DATA}")


def answers(name: str) -> list[str]:
    return [json.loads(line)["answer"] for line in (DATA / name).read_text().splitlines()]


def off_by_one(answer: str) -> str:
    """The same solution with a wrong result."""
    work, _, gold = answer.rpartition("#### ")
    return f"{work}#### {Decimal(gold.replace(',', '')) + 1}"


@needs_data
@pytest.mark.parametrize("grader", get_args(Grader))
def test_every_gold_answer_counts_and_no_perturbed_or_truncated_one(grader: str) -> None:
    task = GSM8K(ByteTokenizer(), test_file=str(DATA / "test.jsonl"), grader=grader)  # type: ignore[arg-type]
    prompts, gold = task.prompts("test"), answers("test.jsonl")
    assert len(gold) == 1319
    assert all(task.correct(prompts, [completion(answer) for answer in gold]))
    assert not any(task.correct(prompts, [completion(off_by_one(answer)) for answer in gold]))
    assert not any(task.correct(prompts, [completion(answer, "length") for answer in gold]))
    both = completion(gold[0]), completion(off_by_one(gold[0]))
    assert task.rewards(prompts[0], both) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", "18"),
        ("a 1, b 2\n#### $1,234,567.50.", "1234567.5"),
        ("#### -10", "-10"),
        ("#### -$3", "-3"),
        ("#### 72.0", "72"),
        ("#### .5", "0.5"),
        ("#### 18 dollars", "18"),
        ("#### 3 #### 4", "4"),
        ("#### 3 4", None),
        ("#### 18/5", None),
        ("12 + 6 = 18\n####", None),
        ("She makes 9 * 2 = $18 every day.", "18"),
        ("20-3", "3"),
        ("from 20 to -3", "-3"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_number_rule(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("#### 3.5", "3.5"),
        ("It is\n#### $7/2.", "7/2"),
        ("#### .5", ".5"),
        ("#### $.75$.", ".75"),
        ("It costs about .5", ".5"),
        ("It is so... 5.", "5"),
        (r"Half of seven:" + "\n" + r"\boxed{\frac{7}{2}}" + "\n", r"\boxed{\frac{7}{2}}"),
    ],
)
def test_the_final_expression(text: str, expression: str) -> None:
    assert final_expression(text) == expression


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def problem(i: int) -> dict[str, str]:
    return {"question": f"What is {i}?", "answer": f"It is.\n#### {i:,}"}


def targets(task: GSM8K) -> dict[str, list[int]]:
    return {split: [int(prompt.target) for prompt in task.prompts(split)] for split in get_args(Split)}


def test_held_out_problems_are_the_end_of_the_training_data_and_never_trained_on(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", *(problem(i) for i in range(10)))
    test = write(tmp_path / "test.jsonl", problem(77))
    alone = GSM8K(ByteTokenizer(), train_file=train, validation_problems=3)
    assert targets(alone) == {"train": [0, 1, 2, 3], "test": [4, 5, 6], "validation": [7, 8, 9]}
    both = GSM8K(ByteTokenizer(), train_file=train, test_file=test, validation_problems=3)
    assert targets(both) == {"train": [0, 1, 2, 3, 4, 5, 6], "test": [77], "validation": [7, 8, 9]}


def test_a_question_on_both_sides_is_told_whatever_its_solution(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"question": "What is  1 + 1?\n", "answer": "It is 1 + 1 = 2.\n#### 2.0"}
    train = write(
        tmp_path / "train.jsonl", {"question": "What is 1 + 1?", "answer": "#### 2"}, problem(8), problem(9)
    )
    task = GSM8K(
        ByteTokenizer(),
        train_file=train,
        test_file=write(tmp_path / "test.jsonl", asked),
        validation_problems=1,
    )
    assert [len(task.prompts(split)) for split in ("train", "test")] == [2, 1]
    assert [said[:39] for said in caplog.messages] == ["1 of 1 test rows are also trained on, s"]


def test_without_files_test_is_the_test_split_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder stands for the data set of the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train.jsonl", *(problem(i) for i in range(10)))
    write(folder / "test.jsonl", problem(77), problem(78))

    class Local(GSM8K):
        HUB: ClassVar = {
            "train": HubData(str(folder), None, "train"),
            "test": HubData(str(folder), None, "test"),
        }

    found = targets(Local(ByteTokenizer(), validation_problems=3))
    assert found == {"train": [0, 1, 2, 3, 4, 5, 6], "test": [77, 78], "validation": [7, 8, 9]}


@pytest.mark.parametrize(
    ("answer", "target", "as_number", "as_mathematics"),
    [
        ("#### 72.0", "72", True, True),
        ("#### 072", "72", True, True),
        ("#### 7/2", "3.5", False, True),
        ("#### 3.5 or 4", "3.5", False, False),
        ("It is 72.\nNo, 73", "72", False, False),
    ],
)
def test_the_grader_that_is_asked_for_judges(
    judges: dict[str, GSM8K], answer: str, target: str, as_number: bool, as_mathematics: bool
) -> None:
    assert judges["final_number"].accepts(answer, target) is as_number
    assert judges["math_verify"].accepts(answer, target) is as_mathematics


@pytest.fixture(scope="module")
def judges() -> dict[str, GSM8K]:
    return {grader: GSM8K(ByteTokenizer(), grader=grader) for grader in get_args(Grader)}


def test_a_problem_may_hold_any_character_and_commas_leave_the_target(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"question": "Line\u2028break {x}?", "answer": "#### 12,500"})
    (prompt,) = GSM8K(ByteTokenizer(), test_file=file, template="Q: {question}").prompts("test")
    assert ByteTokenizer().decode(prompt.tokens) == "Q: Line\u2028break {x}?"
    assert prompt.target == "12500"


def load(**fields: object) -> None:
    load_task(TaskSection(name="gsm8k", **fields), ByteTokenizer())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "is empty: it must hold one JSON object per line"),
        (["{not json"], "line 1: cannot be used (no JSON: Expecting property name enclosed in double quotes"),
        ([problem(0), {"question": "No answer?"}], "line 2: cannot be used"),
        ([problem(0), {"question": "Which?", "answer": "12"}], "line 2: cannot be used"),
        ([[1, 2]], "line 1: cannot be used"),
        ([problem(i) for i in range(512)], "has 512 problems, but validation and test take 256 each"),
    ],
)
def test_a_bad_file_gets_one_sentence(tmp_path: Path, rows: list[object], sentence: str) -> None:
    file = write(tmp_path / "train.jsonl", *rows)
    with pytest.raises(ConfigError) as caught:
        load(train_file=file)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"train_file": "no/such.jsonl"}, "cannot read task.train_file=no/such.jsonl (No such file"),
        ({"options": {"grader": "judge"}}, "task.options.grader has the value 'judge', but input should be"),
        (
            {"options": {"template": {"question": None}}},
            "valid string: put a text that begins with { in quot",
        ),
        ({"options": {"template": "Solve."}}, "task.options.template='Solve.' has no place for the problem"),
        ({"options": {"validation_problems": 0}}, "task.options.validation_problems has the value 0, but"),
    ],
)
def test_bad_settings_get_one_sentence(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**fields)
    assert sentence in str(caught.value)


def test_an_unreachable_hub_names_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(ConfigError, match=r"cannot load openai/gsm8k .* or give local JSONL files"):
        load()
