"""The tiny model of the quickstart: its data, its cache, and that transformers loads it.

That vLLM answers as transformers does is ``test_evaluate.py``'s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import make_tiny_model as tool
import numpy as np
import one_file_tba
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba_hpc.config import load_config
from tba_hpc.core.types import Split
from tba_hpc.learner.hf_model import load_tokenizer
from tba_hpc.tasks.arithmetic import Problem, draw_problems
from tba_hpc.tasks.word_problems import GSM8K

REPOSITORY = Path(__file__).parents[1]
CONFIGS = REPOSITORY / "configs"
GSM8K_DATA = REPOSITORY.parent / "shared" / "data" / "gsm8k"
FEW_STEPS = 30


VALIDATION = tool.VALIDATION


@pytest.fixture(scope="module", autouse=True)
def few_problems() -> Iterator[None]:
    """To examine a model with, but that of the quickstart: most are hardly taught."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "VALIDATION", 8)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that was hardly taught."""
    out = tmp_path_factory.mktemp("cache") / "tiny"
    tool.make(tool.Recipe(seed=5, steps=FEW_STEPS), out)
    return out


def test_the_tokenizer_spells_any_text_and_every_digit_alone(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("Janet’s ducks lay 1,234 eggs\n\tfor €5 🦆", "17-3=14;14+9=23;#### 23", " two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("2025")) == ["2", "0", "2", "5"]
    assert len(tokenizer) <= tool.VOCABULARY
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (tool.EOS_ID, tool.PAD_ID)
    longest = Problem("Ida", "eggs", 14, (9, 9, 9, 9), ("buys", "buys", "buys", "buys"))
    assert len(tokenizer.encode(longest.solution)) < tool.ANSWER_TOKENS
    assert len(tokenizer.encode(tool.counted_solution(longest))) < tool.COUNTED_TOKENS


def test_a_counted_solution_takes_one_step_at_a_time() -> None:
    example = Problem("Gus", "apples", 17, (-3, 9), ("loses", "finds"))
    assert tool.counted_solution(example).startswith("17-3=16-2=15-1=14;14+9=15+8=16+7=17+6=")
    for problem in draw_problems("train", 300, seed=3):
        *work, answer = tool.counted_solution(problem).split(";")
        for line, change in zip(work, problem.changes, strict=True):
            terms = line.split("=")
            assert len(terms) == abs(change) + 1 and len({eval(term) for term in terms}) == 1
        assert answer == problem.bare_answer


def test_the_folder_loads_and_says_what_it_is(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert model.num_parameters() == manifest["parameters"] < 300_000
    assert model.config.max_position_embeddings == tool.CONTEXT
    assert model.config.tie_word_embeddings is False
    assert model.generation_config.eos_token_id == tool.EOS_ID
    assert (manifest["seed"], manifest["steps"]) == (5, FEW_STEPS)
    assert not list(folder.parent.glob(".tiny-*"))


def test_the_same_recipe_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    tool.make(tool.Recipe(5, FEW_STEPS), tmp_path / "again")
    made = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert made == (folder / "model.safetensors").read_bytes()


def test_a_second_call_finds_the_model_and_another_recipe_replaces_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tiny"
    stamps = []
    for steps in (2, 2, 3):
        tool.main(["--out", str(out), "--steps", str(steps), "--json"])
        assert json.loads(capsys.readouterr().out)["steps"] == steps
        stamps.append((out / "manifest.json").stat().st_mtime_ns)
    assert stamps[0] == stamps[1] != stamps[2]


def test_where_no_bar_can_be_drawn_lines_tell_the_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = (torch.zeros(1), torch.zeros(1))
    assert len(list(tool.shown([batch] * 3, 3))) == 3
    said = "teaching a tiny model for 3 steps, a minute or two on an idle machine\n"
    assert capsys.readouterr().err == said
    monkeypatch.setattr(tool, "LINE_SECONDS", 0)
    list(tool.shown([batch] * 3, 3))
    assert capsys.readouterr().err.endswith("  step 0/3\n  step 1/3\n  step 2/3\n")


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(SystemExit, match="exists and is not a tiny model"):
        tool.main(["--out", str(tmp_path), "--steps", "1"])
    assert (tmp_path / "thesis.txt").read_text() == "irreplaceable"


def test_demonstrations_are_worked_first_and_bare_as_often_as_planned() -> None:
    problems = draw_problems("train", 400, seed=0)
    tokenizer = tool.make_tokenizer(p.question + p.solution for p in problems)
    steps = 200
    recipe = tool.Recipe(0, steps)
    bare, planned = [], []
    for step, (tokens, labels) in enumerate(tool.batches(problems, tokenizer, recipe)):
        assert bool((labels[labels != tool.IGNORED] == tokens[labels != tool.IGNORED]).all())
        answers = tokenizer.batch_decode([row[row != tool.IGNORED] for row in labels])
        assert all(answer.endswith(tool.EOS) for answer in answers)
        if step < tool.WORKED_SHARE * steps:
            assert not any(answer.startswith("####") for answer in answers)
        else:
            questions = tokenizer.batch_decode(tokens)
            bare += [answer.startswith("####") for answer in answers]
            planned += [any(f" {item}." in q for item in tool.BARE_ITEMS) for q in questions]
    assert len(bare) == 40 * tool.BATCH
    for often, share in tool.BARE_SHARE.items():
        drawn = [b for b, p in zip(bare, planned, strict=True) if p == often]
        assert abs(sum(drawn) / len(drawn) - share) < 0.05


def test_a_model_may_be_taught_to_work_out_always() -> None:
    problems = draw_problems("train", 64, seed=0)
    tokenizer, recipe = tool.make_tokenizer(p.question for p in problems), tool.Recipe(0, 10, worked=True)
    for _, labels in tool.batches(problems, tokenizer, recipe):
        answers = tokenizer.batch_decode([row[row != tool.IGNORED] for row in labels])
        assert not any(answer.startswith("####") for answer in answers)


@pytest.mark.parametrize("counted", [False, True])
def test_verbs_are_misread_as_often_as_planned_and_answers_follow(counted: bool) -> None:
    """Read back from the text: each total is the one before, plus or minus the change."""
    recipe = tool.Recipe(0, 1, counted=counted, misread=0.8)
    rng = np.random.default_rng(0)
    misread: dict[bool, list[bool]] = {True: [], False: []}
    for problem in draw_problems("train", 2000, seed=0):
        *sums, answer = tool.solution_of(problem, recipe, rng).split(";")
        total = problem.start
        for text, change, verb in zip(sums, problem.changes, problem.verbs, strict=True):
            result = int(text.rpartition("=")[2])
            assert abs(result - total) == abs(change)
            misread[verb in tool.MISREAD_VERBS].append(result - total == -change)
            total = result
        assert answer == f"#### {total}"
    assert sum(misread[True]) / len(misread[True]) == pytest.approx(0.8, abs=0.03)
    assert sum(misread[False]) / len(misread[False]) == pytest.approx(0.2, abs=0.03)


def test_padding_on_the_left_does_not_change_an_answer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    short = Problem("Ada", "pens", 9, (1, 1), ("buys", "buys"))
    long = draw_problems("train", 6, seed=0)
    together = tool.answer(model, tokenizer, (short, *long))
    assert together == [tool.answer(model, tokenizer, (p,))[0] for p in (short, *long)]


@pytest.mark.skipif(
    not GSM8K_DATA.is_dir(),
    reason=f"no GSM8K: put train.jsonl of github.com/openai/grade-school-math into {GSM8K_DATA}",
)
def test_every_gsm8k_question_fits_the_shipped_config(folder: Path) -> None:
    config = load_config(CONFIGS / "math_gsm8k.yaml")
    task = GSM8K(load_tokenizer(str(folder)), train_file=str(GSM8K_DATA / "train.jsonl"))
    longest = max(len(prompt.tokens) for split in get_args(Split) for prompt in task.prompts(split))
    assert longest + config.generator.max_tokens <= config.model.context_length <= tool.CONTEXT


@pytest.mark.system
def test_the_model_of_the_quickstart_guesses_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seeds under AVX2 and SSE4.1 ended at 45 to 52 %, and at 87 to 98 % of what is worked out."""
    monkeypatch.setattr(tool, "VALIDATION", VALIDATION)
    tool.main(["--seed", "0"])
    folder = REPOSITORY / ".cache" / "tiny-model-seed0"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert 0.30 <= manifest["pass_at_1"] <= 0.65
    assert manifest["pass_at_1_worked"] > 0.70 > 0.20 > manifest["pass_at_1_bare"]
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32


TAUGHT = REPOSITORY / "tests" / "data" / "tiny-model"
"""The quickstart's model, as ``tools/make_tiny_model.py --seed 0`` made it once on one processor."""


def test_the_model_that_tests_start_from_is_the_one_that_was_committed() -> None:
    weights = (TAUGHT / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == (
        "cad23585af9f2b2592117577e9a2d1347af1671cb3ed91f093e1c2bae9f7c6f5"
    )


@pytest.mark.system
def test_the_algorithm_in_one_file_learns() -> None:
    before, after = one_file_tba.main(str(TAUGHT), steps=40)
    assert before < 0.6
    assert after > 0.7  # .85 to .97 were measured
