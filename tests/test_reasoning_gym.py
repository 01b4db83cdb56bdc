"""The task reasoning_gym: which problems it asks, and what answers are worth."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import ByteTokenizer, completion

from tba_hpc.config import ConfigError, TaskSection, load_config
from tba_hpc.tasks import load_task
from tba_hpc.tasks.reasoning_gym import Item, ReasoningGym, score

pytest.importorskip("reasoning_gym", reason="pip install 'reasoning-gym==0.1.25'")

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "docs/examples/reasoning_gym.yaml"


def make(**options: Any) -> ReasoningGym:
    sizes = {"train_problems": 40, "validation_problems": 10, "test_problems": 10}
    section = TaskSection(name="reasoning_gym", options={**sizes, **options})
    task = load_task(section, ByteTokenizer())
    assert isinstance(task, ReasoningGym)
    return task


def texts(task: ReasoningGym, split: Any = "train") -> list[str]:
    return [ByteTokenizer().decode(prompt.tokens) for prompt in task.prompts(split)]


def one(name: str, place: int = 0, **options: Any) -> Item:
    task = make(generators={name: options})
    return task.row(task.prompts("train")[place])


PROGRAM = """
import zlib
from test_reasoning_gym import make, texts
print(zlib.crc32("".join(texts(make(generators={"chain_sum": {}, "aiw": {}}, seed=3))).encode()))
"""


def test_problems_are_the_same_in_every_process_and_others_for_another_seed() -> None:
    environment, command = {**os.environ, "PYTHONHASHSEED": "1"}, [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=HERE)
    here = texts(make(generators={"chain_sum": {}, "aiw": {}}, seed=3))
    assert int(done.stdout) == zlib.crc32("".join(here).encode())
    first, again, other = (texts(make(generators="chain_sum", seed=seed)) for seed in (0, 0, 1))
    assert first == again and not set(first) & set(other)


def test_a_question_of_somebody_else_is_put_as_the_problems_are() -> None:
    task = make(generators="chain_sum")
    (prompt, *_) = task.prompts("test")
    question = task.row(prompt).entry["question"]
    assert task.encode_question(question).tolist() == prompt.tokens.tolist()


def test_no_problem_is_in_two_splits_however_few_there_are() -> None:
    """Sums of two digits, of which there are 190: 100 · 2, less those that are written twice."""
    small = {"chain_sum": {"max_terms": 2, "max_digits": 1}}
    task = make(generators=small, train_problems=300)
    parts = [set(texts(task, split)) for split in ("train", "validation", "test")]
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    assert [len(task.prompts(split)) for split in ("train", "validation", "test")] == [300, 10, 10]
    with pytest.raises(ConfigError, match="makes too few different problems: lower the sizes"):
        make(generators={"coin_flip": {"min_trials": 1, "max_trials": 1}}, test_problems=400)


def test_generators_share_the_problems_by_weight_and_levels_make_them_harder() -> None:
    mixed = make(generators={"chain_sum": {"weight": 3}, "gcd": {}}, train_problems=400)
    sums = sum("arithmetic" in text for text in texts(mixed))
    assert 270 < sums < 330  # 300, and four standard deviations of 8.7 less
    for level, terms in ((0, {2}), (2, {2, 3, 4})):
        task = make(generators={"chain_sum": {"level": level}})
        found = {task.row(p).entry["metadata"]["num_terms"] for p in task.prompts("train")}
        assert found == terms
    assert one("chain_sum", level=2, min_terms=4).entry["metadata"]["num_terms"] == 4


def test_the_answer_is_graded_where_it_stands() -> None:
    tagged, whole = make(generators="gcd"), make(generators="gcd", answer="whole")
    prompt = tagged.prompts("train")[0]
    right = prompt.target
    answers = {
        f"hm <answer>0</answer>, no: <answer> {right} </answer>": 1.0,
        f"<answer>It is {right}.</answer>": 0.0,
        right: 0.0,
        f"<answer>{right}</answer>x": 1.0,
        f"<think><answer>{right}</answer></think>It is 0.": 0.0,
    }
    assert tagged.rewards(prompt, [completion(text) for text in answers]) == list(answers.values())
    assert tagged.rewards(prompt, [completion(f"<answer>{right}</answer>", "length")]) == [0.0]
    prompt = whole.prompts("train")[0]
    texts = f"{prompt.target}\n", f"It is {prompt.target}", "x", f"<think>x</think>\n\n{prompt.target}"
    given = [completion(text) for text in texts]
    assert whole.rewards(prompt, given) == [1, 0, 0, 1]
    assert whole.correct([prompt] * 4, given) == [True, False, False, True]


@pytest.mark.parametrize(
    ("name", "answer", "exact", "partial"),
    [
        ("chain_sum", "The answer is {}.", 0, 0),  # the library: a share of the text's length
        ("chain_sum", "{}.0", 1, 1),  # as a number, the same
        ("prime_factorization", "no idea, sorry", 0, 0),  # the library raises
        ("prime_factorization", "1 × {}", 0, 0.5),  # the right product, and not all factors are prime
        ("advanced_geometry", "no idea", 0, 0),  # the library: .01 for any answer
        ("game_of_life_halting", "well", 0, 0),  # the library: right, as it does not say True
    ],
)
def test_partial_credit_is_for_what_the_grader_means(
    name: str, answer: str, exact: float, partial: float
) -> None:
    item = one(name)
    if name == "prime_factorization":
        item = Item(item.generator, {**item.entry, "answer": "2 × 3", "metadata": {"factors": [2, 3]}})
    text = answer.format(item.entry["answer"])
    if name == "prime_factorization" and "{}" in answer:
        text = "6"
    assert (score(item, text, partial=False), score(item, text, partial=True)) == (exact, partial)
    assert score(item, str(item.entry["answer"]), partial=False) == 1


@pytest.mark.parametrize(
    ("generators", "sentence"),
    [
        (
            "chain_sums",
            "generators.chain_sums is not a generator of reasoning-gym: did you mean 'chain_sum'?",
        ),
        ({"chain_sum": {"max_term": 3}}, "chain_sum has no option 'max_term': did you mean 'max_terms'?"),
        ({"chain_sum": {"max_terms": 1}}, "max_terms must be >= min_terms; correct its options"),
        ({"chain_sum": {"level": 99}}, "chain_sum.level=99 does not exist: give 0 … 10"),
        ({"chain_sum": {"weight": 0}}, "chain_sum.weight=0 must be a number above 0"),
        ({"acre": {"level": 1}}, "acre has no levels"),
        ({"composite": {}}, "composite is not a generator"),
        ("word_ladder", "export PYTHONHASHSEED=0"),
    ],
)
def test_a_generator_that_cannot_be_made_is_refused(
    generators: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError) as error:
        make(generators=generators)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_without_the_library_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=r"pip install 'reasoning-gym==0\.1\.25'"):
        make(generators="gcd")


def test_the_example_asks_both_generators() -> None:
    task = load_task(load_config(EXAMPLE).task, ByteTokenizer())
    sums = sum("arithmetic" in ByteTokenizer().decode(prompt.tokens) for prompt in task.prompts("train"))
    assert 600 < sums < 733 and len(task.prompts("train")) == 1000
