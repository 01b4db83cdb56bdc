"""``tba ask``: the answers are those of the model, and the question is put as its task does."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded import save
from tiny_models import make_random_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typed import tba

from tba_hpc.commands import ask as asking
from tba_hpc.commands.ask import Asked, Reply, _reply, _text, ask, print_answers
from tba_hpc.config import ConfigError, parse_config
from tba_hpc.core.types import BEGIN, Completion, Sampling
from tba_hpc.learner.hf_answers import HfAnswers
from tba_hpc.learner.hf_model import load_tokenizer
from tba_hpc.report.samples.show import SEQUENCE
from tba_hpc.run.directory import RunDir
from tba_hpc.tasks import make_task

QUESTION = "Ida has 3 eggs. Ida finds 4. How many eggs?"
OWN = """
from tba_hpc.tasks.word_problems import GSM8K

class Own(GSM8K):
    TEMPLATE = "Q: {question} A:"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights; its answers are nonsense, and its own."""
    path = tmp_path_factory.mktemp("models") / "m"
    make_random_model(path, tied=True)
    return path


def finished_run(root: Path, model: Path, /, **sections: dict[str, object]) -> RunDir:
    """A run that has exported this model."""
    tree = {
        "run": {"root": str(root)},
        "model": {"path": str(model), "dtype": "float32", "context_length": 96},
        "task": {"name": "arithmetic"},
        "generator": {"max_tokens": 12, "completions_per_prompt": 24},
        **sections,
    }
    run = RunDir.create(parse_config(tree))
    run.export.symlink_to(model)
    return run


def greedy(model: Path, prompt: str, length: int) -> str:
    """Token by token, by nothing but the model's logits."""
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    tokens = tokenizer.encode(prompt)
    begin = len(tokens)
    with torch.inference_mode():
        while len(tokens) < begin + length and tokens[-1] != tokenizer.eos_token_id:
            tokens.append(int(policy(torch.tensor([tokens])).logits[0, -1].argmax()))
    return str(tokenizer.decode(tokens[begin:], skip_special_tokens=True))


def test_the_answer_is_the_models_to_the_question_as_the_task_puts_it(tmp_path: Path, model: Path) -> None:
    run = finished_run(tmp_path, model)
    asked = ask(str(run.path), f"  {QUESTION} ")
    assert asked.prompt == f"{QUESTION}\n" and asked.temperature == 0 and asked.dtype == "float32"
    (reply,) = asked.replies
    assert reply.text == greedy(model, f"{QUESTION}\n", 12) and reply.tokens <= 12
    assert (asked.max_tokens, reply.truncated) == (12, reply.tokens == 12)


def test_an_older_export_and_a_question_without_a_format_are_told(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path, model)
    run.export_step.write_text("60\n")
    for step in (60, 90):
        save(run, 0.0, step)
        print_answers(ask(str(run.path), QUESTION, max_tokens=2))
        said = " ".join(capsys.readouterr().err.split())
        told = "this model is of step 60, and the run has reached step 90; to export that: tba run "
        assert (told in said) == (step == 90)
    print_answers(ask(str(run.export), QUESTION, max_tokens=2))
    answer = capsys.readouterr().out
    assert "the question was asked as it is; --config FILE" in answer
    print_answers(ask(str(run.path), QUESTION, max_tokens=2))
    assert "as it is" not in capsys.readouterr().out


def test_a_model_taken_home_is_asked_without_initial_model_or_data(tmp_path: Path, model: Path) -> None:
    config = tmp_path / "config.yaml"
    task = {"name": "jsonl", "train_file": str(tmp_path / "gone.jsonl"), "reward": "rewards:right"}
    tree = {"model": {"path": str(tmp_path / "gone"), "dtype": "float32"}, "task": task}
    tree["task"]["options"] = {"template": "Q: {prompt}\n"}  # type: ignore[index]
    config.write_text(json.dumps(tree))
    (tmp_path / "rewards.py").write_text("def right(completion): return 1")
    asked = ask(str(model), QUESTION, config=config, max_tokens=4)
    assert asked.prompt == f"Q: {QUESTION}\n" and asked.replies[0].text == greedy(model, asked.prompt, 4)


def test_a_problem_of_the_task_is_put_as_the_task_puts_it(tmp_path: Path, model: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": QUESTION, "answer": "#### 7"}) * 1 + "\n")
    config = {"name": "gsm8k", "train_file": str(rows), "test_file": str(rows)}
    section = parse_config({"model": {"path": "m"}, "task": config}).task
    task = make_task(section, load_tokenizer(str(model)))
    (prompt,) = task.prompts("test")
    np.testing.assert_array_equal(task.encode_question(QUESTION), prompt.tokens)  # type: ignore[attr-defined]


def test_several_answers_are_drawn_alike_from_the_same_seed(tmp_path: Path, model: Path) -> None:
    run = finished_run(tmp_path, model, run={"root": str(tmp_path), "seed": 3})

    def replies(**options: object) -> list[str]:
        return [reply.text for reply in ask(str(run.path), QUESTION, samples=4, **options).replies]  # type: ignore[arg-type]

    drawn = replies()
    assert len(set(drawn)) > 1 and drawn == replies()
    with pytest.raises(ConfigError, match="would give the same answer"):
        replies(temperature=0.0)


def test_samples_follow_the_softmax_of_the_logits_over_the_temperature(tmp_path: Path, model: Path) -> None:
    """First tokens of 4,000 answers against the probabilities, whatever settings the model was saved with."""
    saved = shutil.copytree(model, tmp_path / "m")
    own = GenerationConfig(do_sample=True, temperature=0.1, top_k=2, min_p=0.9, repetition_penalty=5.0)
    own.save_pretrained(saved)
    answers, temperature = HfAnswers(str(saved), "float32"), 0.7
    tokens = answers.tokenizer.encode("12")
    with torch.inference_mode():
        logits = answers._model(torch.tensor(tokens)[None].long()).logits[0, -1]
        expected = (logits / temperature).softmax(-1).numpy()
    drawn = answers.answer(tokens, Sampling(temperature, 1.0, 1), samples=4000, seed=0)
    counts = np.bincount([int(one.tokens[0]) for one in drawn], minlength=len(expected))
    deviation = (counts - 4000 * expected) / np.sqrt(4000 * expected * (1 - expected))
    assert np.abs(deviation).max() < 4.5


def test_a_stop_text_ends_an_answer(model: Path) -> None:
    answers = HfAnswers(str(model), "float32")
    tokens = answers.tokenizer.encode("12")
    (whole,) = answers.answer(tokens, Sampling(0.0, 1.0, 12), seed=0)
    stop = answers.tokenizer.decode(whole.tokens[2:4])
    (cut,) = answers.answer(tokens, Sampling(0.0, 1.0, 12), stop=[stop], seed=0)
    text = answers.tokenizer.decode(cut.tokens)
    assert text.endswith(stop) and cut.finish_reason == "stop" and len(cut.tokens) < len(whole.tokens)


def test_any_model_is_asked_plainly_or_in_its_template(model: Path) -> None:
    asked: Asked = ask(str(model), "12", max_tokens=2)
    assert asked.prompt == "12" and asked.max_tokens == 2
    with pytest.raises(ConfigError, match="no chat template"):
        ask(str(model), "12", chat=True)
    with pytest.raises(ConfigError, match="has no config to change"):
        ask(str(model), "12", overrides=["run.seed=1"])


def test_a_question_without_room_for_an_answer_is_refused(tmp_path: Path, model: Path) -> None:
    run = finished_run(tmp_path, model)
    assert ask(str(run.path), "7" * 90).max_tokens == 5
    with pytest.raises(ConfigError, match="ask a shorter one"):
        ask(str(run.path), "7" * 96)


def test_the_command_finds_a_task_of_the_working_directory(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owntask.py").write_text(OWN)
    run = finished_run(tmp_path, model, task={"name": "owntask:Own", "options": {"chat": False}})
    monkeypatch.chdir(tmp_path)
    asked = json.loads(tba("ask", run.path, "1+1?", "--samples", 2, "--temperature", 0.5, "--json").stdout)
    assert asked["prompt"] == "Q: 1+1? A:" and len(asked["replies"]) == 2
    shown = tba("ask", run.path, "1+1?", "--plain").stdout
    assert shown.startswith("1+1?") and "by transformers on the CPU" in " ".join(shown.split())


def test_a_task_with_an_environment_answers_in_turns(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second turn sees the tool's result; each turn of each answer is drawn from a seed of its own."""
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>'
    folder = tmp_path / "chat"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '|' }}{% endfor %}"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1?", "answer": "2"}))
    prompts, seeds = [], []

    def answer(self: HfAnswers, tokens: np.ndarray, _: Sampling, **options: int) -> list[Completion]:
        prompts.append(self.tokenizer.decode(tokens))
        seeds.append(options["seed"])
        said = self.tokenizer.encode("It is 42." if call in prompts[-1] else call)
        end = np.append(said, self.tokenizer.eos_token_id).astype(np.int32)
        return [Completion(end, np.full(len(end), np.nan, np.float32), "stop")]

    monkeypatch.setattr(HfAnswers, "answer", answer)
    run = finished_run(
        tmp_path,
        folder,
        task={
            "name": "environment",
            "train_file": str(rows),
            "reward": "tba_hpc.environments.tools:same_number",
            "options": {"environment": "tba_hpc.environments.tools:Calculator"},
        },
        generator={"max_tokens": 200, "completions_per_prompt": 24},
        model={"path": str(folder), "dtype": "float32", "context_length": 256},
    )
    asked = ask(str(run.path), "6*7?", samples=2)
    assert asked.prompt == "6*7?|" and prompts == ["6*7?|"] * 2 + [f"6*7?|{call}42|"] * 2
    assert [reply.text for reply in asked.replies] == [f"{call}42|It is 42."] * 2
    assert len(set(seeds)) == 4
    print_answers(asked)
    assert "\ntba ask does not compute task.reward\n" in capsys.readouterr().out
    assert not ask(str(run.path), "6*7?", chat=False).not_computed  # without the task


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("raise KeyError('gold')", "KeyError: 'gold' (shop.py:4 in get_reward)"),
        ("return float('nan')", "the environment's reward is nan"),
        ("return float('inf')", "the environment's reward is inf"),
    ],
)
def test_a_failure_of_an_environment_is_told_once(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    body: str,
    fault: str,
) -> None:
    folder = shutil.copytree(model, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    (tmp_path / "shop.py").write_text(
        "class Shop:\n    def reset(self): ...\n    def get_reward(self):\n"
        f"        {body}\n    def step(self, messages):\n        return [], True, 0\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1?"}')
    monkeypatch.syspath_prepend(tmp_path)
    task = {"name": "environment", "train_file": str(tmp_path / "rows.jsonl")}
    run = finished_run(tmp_path, folder, task={**task, "options": {"environment": "shop:Shop"}})
    (reply,) = ask(str(run.path), "1+1?").replies
    assert (reply.failed, reply.fault, reply.reward) == (True, fault, None)
    assert not caplog.messages


def test_a_slow_answer_is_announced(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told, answer = threading.Event(), HfAnswers.answer

    class Timer(threading.Timer):
        def run(self) -> None:
            super().run()
            told.set()

    def slow(self: HfAnswers, *words: Any, **options: Any) -> list[Completion]:
        assert told.wait(60)
        return answer(self, *words, **options)

    monkeypatch.setattr(HfAnswers, "answer", slow)
    monkeypatch.setattr(asking, "Timer", Timer)
    monkeypatch.setattr(asking, "SLOW_SECONDS", 0.1)
    assert len(ask(str(finished_run(tmp_path, model).path), "1+1?").replies) == 1
    assert capsys.readouterr().err.startswith("still generating after 0.1 s; --max-tokens")


def test_sequences_of_an_episode_are_told_apart() -> None:
    logprobs = np.array([-1, np.nan, BEGIN, -1], np.float32)
    answer = Completion(np.arange(4, dtype=np.int32), logprobs, "stop")
    text = _text(answer, lambda tokens: "".join(map(str, tokens)))
    assert text == f"01\n{SEQUENCE}\n23"


def test_an_answer_whose_environment_failed_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    reply = Reply("", False, 1, failed=True, fault="it is shut")
    print_answers(Asked("m", "float32", "cpu", "1+1?", 0.0, 8, [reply], 1.0))
    assert "[…its environment failed: it is shut]" in capsys.readouterr().out
    nan = Completion(np.array([0]), np.zeros(1, np.float32), "stop", reward=np.nan)
    print_answers(Asked("m", "float32", "cpu", "1+1?", 0.0, 8, [_reply("", nan)], 1.0))
    out = capsys.readouterr().out
    assert "[…its environment failed]" in out and "reward" not in out and "no text" not in out
    cut = Reply("1", True, 1, reward=0.5)
    print_answers(Asked("m", "float32", "cpu", "1+1?", 0.0, 8, [cut], 1.0))
    assert "1 […cut off] [reward 0.5]" in capsys.readouterr().out
    print_answers(Asked("m", "float32", "cpu", "1+1?", 0.0, 8, [Reply(" \n", False, 1)], 1.0))
    assert "(no text: the model ended at once)" in capsys.readouterr().out
