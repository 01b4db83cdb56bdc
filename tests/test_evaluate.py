"""``tba evaluate``: estimates against brute force, a real engine against transformers, and bad input."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from byte_tokenizer import ByteTokenizer, completion
from forks import fork_engines
from recorded import new_run
from tiny_models import make_random_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from typed import tba

from tba_hpc.config import ConfigError, GeneratorSection, TaskSection
from tba_hpc.core.ports import MEAN_REWARD, Reference
from tba_hpc.core.types import Completion, Group, Prompt, Request, Sampling
from tba_hpc.evaluate import find_target, measure, print_result
from tba_hpc.evaluate.measure import Judged, Result, assess, judge, samplings
from tba_hpc.learner.hf_model import load_tokenizer
from tba_hpc.report.estimates import mean, pass_at_k, passes, wilson
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Answer
from tba_hpc.tasks import load_task
from tba_hpc.tasks.arithmetic import Arithmetic

# --- Estimates ---


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_correct_one(samples: int) -> None:
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations([i < correct for i in range(samples)], k))
        assert pass_at_k(correct, samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(15, 148, 0.0624, 0.1605), (1, 29, 0.0061, 0.1718), (81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611)],
)
def test_wilson_against_published_values(successes: int, trials: int, low: float, high: float) -> None:
    """Newcombe 1998 (Statistics in Medicine 17), table I, method 3."""
    found = wilson(successes, trials)
    assert found.value == successes / trials
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_one_prompt_has_the_interval_of_its_samples() -> None:
    found, one = passes([3], 8), wilson(3, 8)
    assert (found[1].low, found[1].high) == pytest.approx((one.low, one.high))
    assert found[2].value == pytest.approx(1 - (5 * 4) / (8 * 7))
    assert (found[2].low, found[2].high) == pytest.approx((1 - (1 - one.low) ** 2, 1 - (1 - one.high) ** 2))


def test_a_score_is_the_mean_over_prompts() -> None:
    """Of 4 samples 0, 0, 1 and 4 are right: pass@2 is 0, 0, 1/2 and 1."""
    found = passes([0, 0, 1, 4], 4)
    assert {k: estimate.value for k, estimate in found.items()} == {1: 5 / 16, 2: 3 / 8, 4: 1 / 2}


def test_the_interval_of_a_mean_ends_at_the_largest_value() -> None:
    """Rewards 1, 1, 1 and 0.6 have the standard error 0.1."""
    free, bounded = (mean(3.6, 3.36, 4, **ends) for ends in ({}, {"least": 0.6, "most": 1.0}))
    assert (free.low, free.high) == pytest.approx((0.9 - 0.19600, 0.9 + 0.19600), abs=1e-5)
    assert (bounded.low, bounded.value, bounded.high) == (free.low, free.value, 1.0)


def test_pass_at_k_has_an_interval_that_is_wide_at_the_edges_and_normal_in_the_middle() -> None:
    """Known: Wilson's for 40 of 40 and 30 of 40; the standard error of 1000 shares of 0.4 and 0.6."""
    for right in (40, 30):
        sure = passes([4] * right + [0] * (40 - right), 4)
        for one in sure.values():
            assert (one.low, one.high) == pytest.approx(
                (wilson(right, 40).low, wilson(right, 40).high), abs=1e-9
            )
    assert wilson(40, 40).low == pytest.approx(0.9124, abs=5e-5)
    found, half = passes([2, 3] * 500, 5)[1], 1.959964 * 0.1 / math.sqrt(1000)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-4)
    assert passes([2] * 10, 4)[1].low < 0.4, "no spread by chance"


# --- Figures of completions that are known ---


def test_a_temperature_that_is_asked_for_takes_the_place_of_the_configs() -> None:
    task, section = Arithmetic(ByteTokenizer()), GeneratorSection(temperature=0.5, top_p=0.9, max_tokens=12)
    greedy = Sampling(temperature=0.0, top_p=1.0, max_tokens=12)
    assert samplings(task, section) == (greedy, Sampling(temperature=0.5, top_p=0.9, max_tokens=12))
    assert samplings(task, section, 0.25) == (greedy, Sampling(temperature=0.25, top_p=0.9, max_tokens=12))


class AsSampled:
    """A reference that is the policy that sampled."""

    def logprobs_of(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Return the log-probabilities of the completions."""
        return [[completion.logprobs for completion in group.completions] for group in groups]


def test_figures_of_known_completions() -> None:
    """Two prompts, two completions each; every token has probability 1/2."""
    answers = [[("#### 7", "stop"), ("#### 8", "stop")], [("#### 7", "length"), ("17-3=14;", "stop")]]
    groups = []
    for i, texts in enumerate(answers):
        request = Request(Prompt(i, np.zeros(3, np.int32), "7"), i, 2, Sampling(0.5, 1.0, 12))
        made = [completion(text, finish) for text, finish in texts]
        halved = tuple(Completion(c.tokens, c.logprobs - math.log(2), c.finish_reason) for c in made)
        groups.append(Group(request, halved, np.zeros((2, 2), np.int32)))
    found = assess(Arithmetic(ByteTokenizer()), cast(Reference, AsSampled()), groups)
    assert (found.temperature, found.samples) == (0.5, 2)
    assert {name: score.value for name, score in found.scores.items()} == {"pass@1": 1 / 4, "pass@2": 1 / 2}
    assert found.ended == found.scores["pass@1"]  # this task says that what is cut off is wrong
    assert found.truncated_share == 1 / 4
    assert found.tokens == (7 + 7 + 6 + 9) / 4  # the end is a token
    assert found.perplexity == pytest.approx(2)
    assert found.summary == {}


class Lenient(Arithmetic):
    """Accepts an answer that goes on after it."""

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[bool]:
        """Tell whether each has the target."""
        ended = [replace(completion, finish_reason="stop") for completion in completions]
        return super().correct(prompts, ended)


@pytest.mark.parametrize("n", [1, 2])
def test_right_and_ended_is_shown_where_it_differs(n: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four completions three are right, and one of these was cut off."""
    texts = [("#### 7", "stop"), ("#### 7", "length"), ("#### 7", "stop"), ("#### 8", "stop")]
    made, groups = [completion(text, finish) for text, finish in texts], []
    for i in range(4 // n):
        request = Request(Prompt(i, np.zeros(3, np.int32), "7"), i, n, Sampling(0.0, 1.0, 12))
        groups.append(Group(request, tuple(made[n * i : n * (i + 1)]), np.zeros((n, 2), np.int32)))
    lenient, strict = (assess(task(ByteTokenizer()), None, groups) for task in (Lenient, Arithmetic))
    assert (lenient.scores["pass@1"].value, lenient.ended.value) == (3 / 4, 2 / 4)
    assert strict.scores["pass@1"] == strict.ended == lenient.ended
    for decoding, shown in ((lenient, True), (strict, False)):
        print_result(Result("m", "float32", None, "t", "test", 4 // n, "pass@1", decoding, None))
        assert bool(re.search(r"right and ended +50\.0 %", capsys.readouterr().out)) == shown


# --- A real engine ---


@pytest.mark.engine
def test_figures_are_those_of_transformers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy answers token by token from transformers; their perplexity under the model itself."""
    fork_engines(monkeypatch)
    model = Path(__file__).parent / "data/tiny-model"
    settings = ["model.context_length=128", "generator.max_tokens=40"]
    settings += ["generator.kv_cache_mb=16", "generator.temperature=1.0"]
    target = find_target(str(model), config=None, task="arithmetic", overrides=settings, reference=str(model))
    result = measure(target, split="validation", samples=4, temperature=0.9, limit=24, show=3)
    print_result(result, as_json=True)
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "starting an engine for 120 answers to 24 prompts" in err and "judging the answers" in err

    task = Arithmetic(load_tokenizer(str(model)))
    prompts = task.prompts("validation")[:24]
    policy = AutoModelForCausalLM.from_pretrained(model)
    answers, logprobs = zip(*(_greedy(policy, prompt.tokens, 40) for prompt in prompts), strict=True)
    right = sum(task.correct(prompts, answers))
    assert (found["score_name"], found["prompts"], found["task"]) == ("pass@1", 24, "arithmetic")
    assert found["dtype"] == "float32"  # as the model is stored
    assert found["single"]["scores"]["pass@1"]["value"] == right / 24
    shown = [(answer["prompt"], answer["text"]) for answer in found["answers"]]
    decode = load_tokenizer(str(model)).decode
    assert shown == [(i, decode(answers[i].tokens)) for i in range(3)]
    assert [a["correct"] for a in found["answers"]] == list(task.correct(prompts[:3], answers[:3]))
    print_result(result)
    verdict = "right" if found["answers"][0]["correct"] else "wrong"
    assert f"prompt 0: {verdict}" in capsys.readouterr().out
    assert found["single"]["tokens"] == sum(len(answer.tokens) for answer in answers) / 24
    assert found["single"]["truncated_share"] == sum(a.finish_reason == "length" for a in answers) / 24
    perplexity = math.exp(-np.concatenate(logprobs).mean())
    assert found["single"]["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    scores = [found["sampled"]["scores"][name]["value"] for name in ("pass@1", "pass@2", "pass@4")]
    assert scores == sorted(scores) and found["sampled"]["samples"] == 4
    assert (found["single"]["temperature"], found["sampled"]["temperature"]) == (0, 0.9)
    assert found["sampled"]["perplexity"] > found["single"]["perplexity"]


def _greedy(policy: PreTrainedModel, prompt: np.ndarray, max_tokens: int) -> tuple[Completion, np.ndarray]:
    """A greedy answer, and the log-probabilities of its tokens."""
    with torch.inference_mode():
        tokens = policy.generate(
            torch.tensor(prompt, dtype=torch.long)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_tokens,
        )[0]
        logprobs = policy(tokens[None, :-1]).logits[0, len(prompt) - 1 :].log_softmax(-1)
    answer = tokens[len(prompt) :].numpy().astype(np.int32)
    ended = answer[-1] == policy.config.eos_token_id
    chosen = logprobs.gather(1, tokens[len(prompt) :, None])[:, 0].numpy()
    return Completion(answer, chosen, "stop" if ended else "length"), chosen


# --- What is evaluated ---


def export(run: RunDir) -> None:
    """As a finished run has it, as far as finding it goes."""
    run.export.mkdir()
    (run.export / "config.json").write_text("{}")


def test_a_run_brings_its_export_its_task_and_its_reference(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    export(run)
    target = find_target(str(run.path), config=None, task=None, overrides=["task.name=math"], reference=None)
    assert target.config.model.path == str(run.export) and target.reference == "models/<tiny>"
    assert target.config.task.name == "math"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_config_a_model_is_evaluated_in_its_own_dtype(tmp_path: Path, dtype: str) -> None:
    """The quickstart's model, stored in float32: 48.4 % in it, 50.4 % in the config's default, bfloat16."""
    model = str(make_random_model(tmp_path / "model", tied=True, dtype=getattr(torch, dtype)))
    config = tmp_path / "config.yaml"
    config.write_text("model: {path: org/base, dtype: float32}\n")

    def dtype_of(**words: Any) -> str:
        named = {"config": None, "task": None, "overrides": [], "reference": None, **words}
        return find_target(model, **named).config.model.dtype

    assert dtype_of(task="arithmetic") == dtype
    assert dtype_of(task="arithmetic", overrides=["model.dtype=bfloat16"]) == "bfloat16"
    assert dtype_of(config=config, overrides=["task.name=arithmetic"]) == "float32"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{run}"], "has no model yet; .*export is written when the run is finished: go on with tba run"),
        (["org/model"], "org/model is not a run directory: check the path, or say on which task"),
        (["./nowhere", "--task", "math"], "tba: ./nowhere does not exist"),
        (["org/model", "--task", "math", "--set", "task.nam=x"], "did you mean 'task.name'"),
        (
            ["org/model", "--task", "math", "--reference", "./nowhere"],
            r"\./nowhere, the reference of the perplexity, is not a folder: name another with --reference",
        ),
        (["{run}", "--task", "math"], "is a run, which has a config of its own: leave out math"),
    ],
)
def test_bad_input_gets_one_sentence(words: list[str], sentence: str, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    words = [word.format(run=run.path) for word in words]
    done = tba("evaluate", *words)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    with pytest.raises(ConfigError, match=sentence):
        raise ConfigError(done.stderr)


def test_a_task_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``tba run`` finds it. Told before any engine is started: its split is empty."""
    (tmp_path / "herebefore.py").write_text(
        "from tba_hpc.tasks.arithmetic import Arithmetic\n\nclass Own(Arithmetic):\n"
        "    def questions(self, split):\n        return []\n"
    )
    monkeypatch.chdir(tmp_path)
    model = make_random_model(tmp_path / "model", tied=True)
    refused = tba("evaluate", model, "--task", "herebefore:Own")
    assert "the task herebefore:Own has no prompt in its test split" in refused.stderr


def test_an_empty_split_and_another_vocabulary_get_one_sentence(tmp_path: Path) -> None:
    """Before any engine is started."""
    one, other = (make_random_model(tmp_path / f"{size}", tied=True, vocab=size) for size in (128, 160))
    settings = ["task.options.validation_problems=0"]
    target = find_target(str(one), config=None, task="arithmetic", overrides=settings, reference=str(other))
    with pytest.raises(ConfigError, match="the task arithmetic has no prompt in its validation split"):
        measure(target, split="validation")
    with pytest.raises(ConfigError, match=r"has 128 tokens and .* has 160 tokens: name a model with the"):
        measure(target, split="test")


def test_the_mean_reward_is_that_of_the_answers_which_have_one() -> None:
    """A judge may leave one out; a prompt without any is left out, too."""
    correct_PN = np.array([[True, False], [False, False], [False, False]])
    grade_PN = np.array([[1.0, 0.5], [np.nan, 0.25], [np.nan, np.nan]])
    reward = Judged(correct_PN, grade_PN).reward
    assert reward and reward.value == pytest.approx((0.75 + 0.25) / 2)
    assert not Judged(correct_PN, correct_PN.astype(float)).is_graded


class Summing(Lenient):
    """Does not say which answers are correct, as several rewards are summed."""

    score_name = MEAN_REWARD


def test_answers_of_several_rewards_are_not_called_right(capsys: pytest.CaptureFixture[str]) -> None:
    """Even if all rewards happen to be 0 and 1."""
    request = Request(Prompt(0, np.zeros(3, np.int32), "7"), 0, 1, Sampling(0.0, 1.0, 12))
    groups = [Group(request, (completion(text),), np.zeros((1, 2), np.int32)) for text in ("#### 7", "well")]
    found = assess(Summing(ByteTokenizer()), None, groups)
    assert (found.scores, found.ended) == ({}, None)
    assert found.reward and found.reward.value == 0.5
    answers = (Answer(0, "3+4=", "#### 7", True, 1.0),)
    print_result(Result("m", "float32", None, "t", "test", 2, MEAN_REWARD, found, None, answers))
    text = capsys.readouterr().out
    assert "mean reward" in text and "prompt 0: reward 1" in text and "right" not in text
    assert re.findall(".*pass@.*", text) == [
        "no pass@k    the task calls no answer correct; with several rewards, task.options.correct_from does"
    ]


def test_named_rewards_of_greedy_answers_have_a_mean_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second answer has the length 4, and no usable rank."""
    (tmp_path / "named_parts.py").write_text(
        "def size(completion): return len(completion)\n"
        "def rank(completion): return float('nan') if completion == 'well' else -0.5\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(4)))
    monkeypatch.syspath_prepend(tmp_path)
    rewards = {name: {"function": f"named_parts:{name}", "weight": 0.5} for name in ("size", "rank")}
    section = TaskSection(
        name="jsonl",
        train_file=str(tmp_path / "rows.jsonl"),
        reward=rewards,  # type: ignore[arg-type]
        options={"validation_prompts": 1},
    )
    task = load_task(section, ByteTokenizer())
    request = Request(task.prompts("train")[0], 0, 1, Sampling(0.0, 1.0, 12))
    groups = [Group(request, (completion(text),), np.zeros((1, 2), np.int32)) for text in ("ab", "well")]
    found = assess(task, None, groups)
    assert found.rewards == {"size": 3.0, "rank": -0.5}
    result = Result("m", "float32", None, "jsonl", "test", 2, task.score_name, found, None)
    print_result(result)
    text = capsys.readouterr().out
    assert re.search(r"reward size +3\.000", text) and re.search(r"reward rank +-0\.500", text)
    print_result(result, as_json=True)
    assert json.loads(capsys.readouterr().out)["single"]["rewards"] == found.rewards


class Judging(Lenient):
    """Cannot judge the second of two answers."""

    def grades(self) -> list[float]:
        """Return the rewards of the last call."""
        return [1.0, math.nan]


def test_answers_that_cannot_be_judged_are_counted_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    request = Request(Prompt(0, np.zeros(3, np.int32), "7"), 0, 2, Sampling(0.0, 1.0, 12))
    group = Group(request, (completion("#### 7"), completion("well")), np.zeros((2, 2), np.int32))
    left_out = "1 of 2 answers could not be judged: they count as wrong, and a mean reward leaves them out"
    for task, told in ((Judging, [left_out]), (Lenient, [])):
        caplog.clear()
        judge(task(ByteTokenizer()), [group])
        assert caplog.messages == told
