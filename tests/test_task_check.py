"""A bad task is refused before anything of its run exists; what cannot be told is left to the ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_random_model, make_tokenizer
from typed import tba

from tba_hpc.checks.config_checks import check_task
from tba_hpc.checks.facts import Facts, refuse
from tba_hpc.checks.task_check import check
from tba_hpc.config import Config, ConfigError, parse_config
from tba_hpc.config.variants import OwnObjective
from tba_hpc.learner.file_tokenizer import FileTokenizer
from tba_hpc.learner.hf_model import load_tokenizer

TASKS = """
import numpy as np
from tba_hpc import Prompt

class Fine:
    def __init__(self, tokenizer, *, train_file=None, test_file=None, size: int = 5):
        self.encode, self.size = tokenizer.encode, size
    def prompts(self, split):
        return [Prompt(i, self.encode("12+3"), "15") for i in range(self.size)]
    def rewards(self, prompt, completions):
        return [0.0] * len(completions)
    def correct(self, prompts, completions):
        return [False] * len(completions)

class Sevens(Fine):
    def prompts(self, split):
        return [Prompt(7, self.encode("12+3"), "15") for _ in range(3)]

class Mute(Fine):
    correct = None

class Serving(Fine):
    def __init__(self, tokenizer, *, serve, train_file=None, test_file=None):
        serve()

class Broken(Fine):
    def prompts(self, split):
        raise RuntimeError("out of memory")
"""

BACKEND = """
import numpy as np
import torch

class Tokenizer:
    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

class Own:
    def __init__(self, config):
        pass
    def tokenizer(self):
        return Tokenizer()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a model, ``m``, and the module ``own`` of TASKS."""
    make_random_model(tmp_path / "m", tied=True)
    (tmp_path / "own.py").write_text(TASKS)
    return tmp_path


def config_of(folder: Path, **task: Any) -> Config:
    generator = {"max_tokens": 40, "completions_per_prompt": 24}
    model = {"path": str(folder / "m"), "context_length": 128}
    return parse_config({"model": model, "generator": generator, "task": task})


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (
            {"name": "own:Sevens"},
            r"own:Sevens: prompts\('train'\)\[0\] has the id 7, but ids count the prompts",
        ),
        ({"name": "own:Fin"}, "no function or class 'Fin' in that module: did you mean 'Fine'"),
        (
            {"name": "math:hypot"},
            "task.name=math:hypot is not a class: give one",
        ),
        (
            {"name": "own:Fine", "options": {"size": "few"}},
            "task.options.size has the value 'few', but",
        ),
    ],
)
def test_a_bad_task_is_refused_with_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, task: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(folder)  # where modules of the user's own are found
    with pytest.raises(ConfigError, match=sentence):
        refuse([check_task], Facts(config=config_of(folder, **task), seconds=200))


def test_an_objective_of_ones_own_that_is_not_there_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "losses.py").write_text("def flat(groups, beta): ...")
    monkeypatch.chdir(folder)
    config = config_of(folder, name="own:Fine")
    for name, sentence in (
        ("losses:flat", ""),
        ("losses:flats", "did you mean 'flat'"),
        ("loses:flat", "put"),
    ):
        train = config.train.model_copy(update={"objective": OwnObjective(name=name)})
        with pytest.raises(ConfigError, match=sentence) if sentence else nullcontext():
            refuse([check_task], Facts(config=config.model_copy(update={"train": train}), seconds=200))


def test_a_model_of_ones_own_is_looked_for_and_its_task_is_built(tmp_path: Path) -> None:
    """Found beside the config alone, as by a shell that has set no path."""
    (tmp_path / "own.py").write_text(TASKS)
    (tmp_path / "backends.py").write_text(BACKEND)
    (tmp_path / "empty").mkdir()
    generator = {"max_tokens": 40, "completions_per_prompt": 24}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for beside, model, task, sentence in (
        (tmp_path, "backends:Own", "own:Fine", ""),
        (tmp_path, "backends:Own", "own:Sevens", r"has the id 7"),
        (tmp_path, "backends:Onw", "own:Fine", r"^model.path=backends:Onw: no .*did you mean 'Own'"),
        (tmp_path / "empty", "backends:Own", "own:Fine", r"^model.path=backends:Own cannot be imported"),
    ):
        sections = {"model": {"path": model, "context_length": 128}, "task": {"name": task}}
        config = parse_config({"generator": generator, **sections})
        facts = Facts(config=config, environment=environment, beside=beside, seconds=200)
        with pytest.raises(ConfigError, match=sentence) if sentence else nullcontext():
            refuse([check_task], facts)


def test_a_model_that_cannot_end_or_is_none_is_refused(folder: Path) -> None:
    """In the words of the ranks, which transformers makes wait for seconds."""
    model = make_random_model(folder / "m", tied=True, eos=False)
    sentence = rf"the tokenizer of model\.path={model} has no end-of-sequence token"
    for refused_by in (lambda: check(config_of(folder)), lambda: load_tokenizer(str(model))):
        with pytest.raises(ConfigError, match=sentence):
            refused_by()
    weights = model / "model.safetensors"
    weights.rename(model / "optimizer.bin")  # as trainers leave beside a checkpoint
    with pytest.raises(ConfigError, match=r"it contains no weights \(model\*\.safetensors or pytorch_model"):
        check(config_of(folder))
    (model / "config.json").unlink()
    with pytest.raises(
        ConfigError, match=rf"model\.path={model}, as it contains no config\.json: give a folder"
    ):
        check(config_of(folder))


MISTAKES = {
    "task={name: gsm8k, train_file: nothere}": "cannot read task.train_file=nothere (No such file",
    "task.name=own:Mute": "the task own:Mute has no method correct()",
    "task={name: 'nomodule:Class'}": "task.name=nomodule:Class cannot be imported (No module named",
    "generator.max_tokens=120": "less generator.max_tokens leaves 8: raise context_length, lower",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_before_anything_starts(
    folder: Path, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command; a mistake takes no run's name."""
    (folder / "config.yaml").write_text(
        "model: {path: m, context_length: 128}\ngenerator: {max_tokens: 40}\n"
    )
    monkeypatch.chdir(folder)
    done = tba("run", "config.yaml", "--set", "task.name=arithmetic", "--set", mistake)
    assert done.returncode == 2 and MISTAKES[mistake] in done.stderr, done
    assert done.stderr.count("\n") == 1 and not (folder / "runs").exists()


def test_prompts_are_read_as_the_model_would_and_their_number_counts(folder: Path) -> None:
    problems = [json.dumps({"question": "x" * length, "answer": "#### 1"}) for length in (20, 200)] * 3
    (folder / "train.jsonl").write_text("\n".join(problems))
    files = {"train_file": str(folder / "train.jsonl"), "test_file": str(folder / "train.jsonl")}
    with pytest.raises(ConfigError, match=r"2 of 4 train prompts are too long: 2\d\d tokens .* leaves 88"):
        check(config_of(folder, name="gsm8k", options={"validation_problems": 2}, **files))


def test_a_row_that_is_set_aside_is_told_before_the_run(folder: Path) -> None:
    rows = [json.dumps({"question": "1+1", "answer": "#### 2"})] * 200
    (folder / "train.jsonl").write_text("\n".join([*rows, "{}"]))
    files = {"train_file": str(folder / "train.jsonl"), "test_file": str(folder / "train.jsonl")}
    config = config_of(folder, name="gsm8k", options={"validation_problems": 2}, **files)
    (warning, shared, _, _) = refuse([check_task], Facts(config=config, seconds=200))  # of both splits
    assert re.search(r"train.jsonl, line 201: cannot be used.*1 of 201 rows", warning.sentence)
    assert shared.sentence.startswith("2 of 2 validation rows are also trained on")


@pytest.mark.parametrize("as_messages", [False, True])
def test_control_tokens_in_rows_are_told_before_the_run(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, as_messages: bool
) -> None:
    """Those of the template, which every prompt has, are meant; an unknown character is no control token."""

    def told(*texts: str) -> list[str]:
        asked = [f"{text} {number}" for number in range(10) for text in texts]
        prompts = [[{"role": "user", "content": text}] for text in asked] if as_messages else asked
        (folder / "r.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
        check(config)
        return [message for message in caplog.messages if "special tokens" in message]

    (folder / "always.py").write_text("def right(completion): return 1.0")
    monkeypatch.syspath_prepend(folder)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    tokenizer.save_pretrained(folder / "m")
    monkeypatch.chdir(folder)
    chat = {"chat": True, "validation_prompts": 1}
    config = config_of(folder, name="jsonl", train_file="r.jsonl", reward="always:right", options=chat)
    assert not told("<eos> is 1+1? é", "<eos> is 2+2?")
    (warning,) = told("1+1? é", "a<eos>b<pad>c")
    assert re.match(r"9 of 18 train prompts contain special tokens .*such as <pad> in 'abc \d'", warning)


def test_rows_that_are_rendered_already_are_told_before_the_run(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "always.py").write_text("def right(completion): return 1.0")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<pad>{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    tokenizer.save_pretrained(folder / "m")
    for chat, text, times in (
        (True, "<pad>user: {}<eos>", 1),
        (False, "<pad>user: {}<eos>", 0),
        (True, "{}", 0),
    ):
        caplog.clear()
        rows = [json.dumps({"prompt": text.format(f"{number}+1?")}) for number in range(9)]
        (folder / "r.jsonl").write_text("\n".join(rows))
        options = {"chat": chat, "validation_prompts": 1}
        check(config_of(folder, name="jsonl", train_file="r.jsonl", reward="always:right", options=options))
        said = [message for message in caplog.messages if "rendered already" in message]
        assert len(said) == times


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["python", "p.py"], ""),
        (["pythn", "p.py"], "KEY begins with pythn, which is neither a program in PATH nor"),
        (["p.py"], "KEY begins with .*/p.py, which is neither .* put the interpreter before it"),
        (["python", "q.py"], "KEY: there is no file q.py beside the config: put it there"),
    ],
)
@pytest.mark.parametrize("task", ["agent", "jsonl"])
def test_a_program_that_cannot_start_is_refused_where_it_would_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, task: str, words: list[str], sentence: str
) -> None:
    """On a login node only a script that is missing: a word that is no file may be a program of the nodes."""
    (folder / "p.py").write_text("print(1.0)")
    (folder / "r.jsonl").write_text("".join(f'{{"prompt": "1+{number}"}}\n' for number in range(10)))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    tokenizer.save_pretrained(folder / "m")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    options: dict[str, Any] = {"validation_prompts": 1}
    reward: dict[str, Any] = {"reward": {"program": words}}
    if task == "agent":
        options, reward = {**options, "command": words}, {}
    config = config_of(folder, name=task, train_file="r.jsonl", options=options, **reward)
    sentence = sentence.replace("KEY", "task.options.command" if task == "agent" else "task.reward.program")
    with pytest.raises(ConfigError, match=sentence) if sentence else nullcontext():
        check(config, try_rewards=True)
    with pytest.raises(ConfigError, match=sentence) if "no file" in sentence else nullcontext():
        check(config)


def test_a_missing_program_is_found_before_the_tokenizer_is_loaded(folder: Path) -> None:
    """A busy machine may take longer for that than the check may."""
    config = config_of(folder, name="agent", train_file="r.jsonl", options={"command": ["python", "q.py"]})
    model = config.model.model_copy(update={"path": "nobody/nothing"})
    with pytest.raises(ConfigError, match=r"task\.options\.command: there is no file q\.py"):
        check(config.model_copy(update={"model": model}))


def test_the_doctor_looks_at_the_rows_of_a_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "r.jsonl").write_text('{"prompt": "Half \\ud83d"}\n')
    (folder / "r.py").write_text("def right(completion): return 1.0")
    (folder / "c.yaml").write_text(
        "model: {path: m, context_length: 128}\ngenerator: {max_tokens: 40}\n"
        "task: {name: jsonl, train_file: r.jsonl, reward: 'r:right'}\n"
    )
    monkeypatch.chdir(folder)
    findings = json.loads(tba("doctor", "--config", "c.yaml", "--json").stdout)
    (found,) = [finding for finding in findings if finding["name"] == "task"]
    assert found["level"] == "problem" and "line 1: cannot be used (it holds half of" in found["found"]


def test_a_check_that_crashes_is_a_finding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (warning,) = refuse([check_task], Facts(config=config_of(folder, name="own:Broken"), seconds=200))
    assert warning.sentence.startswith("the check of the task failed (RuntimeError: out of memory)")


def test_a_check_that_takes_too_long_is_given_up_with_a_warning(folder: Path) -> None:
    (warning,) = refuse([check_task], Facts(config=config_of(folder, name="own:Fine"), seconds=0.1))
    assert "took more than 0.1 s and was given up: ranks repeat it" in warning.sentence
    assert "but try no judge" in warning.sentence
    (warning,) = refuse(
        [check_task], Facts(config=config_of(folder, name="own:Fine"), seconds=0.1, fetched_by="tba fetch")
    )
    assert "judge" not in warning.sentence, "for a job none would be tried"


@pytest.mark.parametrize("task", ["environment", "agent", "jsonl"])
@pytest.mark.parametrize("judge", [{"key_variable": "NO_SUCH_KEY"}, {}])
def test_a_judge_is_tried_whatever_the_task(folder: Path, task: str, judge: dict[str, str]) -> None:
    (folder / "r.jsonl").write_text("".join(f'{{"prompt": "1+{number}"}}\n' for number in range(10)))
    options: dict[str, Any] = {"validation_prompts": 1}
    options |= {"environment": {"environment": "tba_hpc.environments.tools:Calculator"}}.get(task, {})
    options |= {"agent": {"command": ["python", "-c", "0"]}}.get(task, {})
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' }}{% endfor %}"
    )
    tokenizer.save_pretrained(folder / "m")
    reward = {"judge": {"url": "http://127.0.0.1:9/v1", **judge}}  # nobody listens there
    config = config_of(folder, name=task, train_file=str(folder / "r.jsonl"), options=options, reward=reward)
    sentence = "NO_SUCH_KEY is not set" if judge else "judge.url=.* gave no answer .*: start the judge first"
    with pytest.raises(ConfigError, match=sentence):
        check(config, try_rewards=True)


@pytest.mark.parametrize("name", ["Fine", "Serving", "Broken"])
def test_a_good_task_and_one_that_cannot_be_checked_are_not_refused(folder: Path, name: str) -> None:
    command = [sys.executable, "-m", "tba_hpc.checks.task_check"]
    text = config_of(folder, name=f"own:{name}").model_dump_json()
    done = subprocess.run(command, input=text, cwd=folder, capture_output=True, text=True, timeout=200)
    assert [line for line in done.stdout.splitlines() if line and not line.startswith("INFO ")] == []
    assert done.returncode == int(name == "Broken")


def test_the_quick_tokenizer_agrees_with_transformers(folder: Path) -> None:
    quick, slow = FileTokenizer.find(str(folder / "m")), make_tokenizer()
    assert quick is not None
    for text in ("12+3=15", "", "a\nb"):
        assert quick.encode(text).tolist() == slow.encode(text)
        assert quick.decode(quick.encode(text)) == text
    assert (quick.eos_token_id, quick.vocab_size) == (slow.eos_token_id, len(slow))
    assert FileTokenizer.find("nobody/nothing") is None
