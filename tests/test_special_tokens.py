"""Whether rewards and samples see special tokens, such as answer tags: as task.special_tokens says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import make_tokenizer

from tba_hpc.config import ConfigError, TaskSection
from tba_hpc.core.ports import decoder
from tba_hpc.core.types import Completion
from tba_hpc.environments.task import Environment
from tba_hpc.learner.file_tokenizer import FileTokenizer
from tba_hpc.learner.hf_model import HfTokenizer, load_tokenizer
from tba_hpc.tasks import make_task
from tba_hpc.tasks.jsonl import Jsonl
from tba_hpc.tasks.redteam import RedTeam
from tba_hpc.tasks.rows import Rows
from tba_hpc.tasks.tldr import TLDR

SAID = "So it is <answer>12</answer>"
PLAIN = "So it is 12"

OWN = """
def tagged(completion): return float("<answer>12</answer>" in completion)

class Till:
    def reset(self): ...
    def step(self, messages): return [], True, 0.0
"""
PROGRAM = "import json, sys; print(float(json.load(sys.stdin)['completion'].endswith('<answer>12</answer>')))"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"

TASKS: dict[str, dict[str, Any]] = {
    "gsm8k": {},
    "math": {},
    "arithmetic": {},
    "reasoning_gym": {"options": {"generators": "gcd"}},
    "jsonl": {"reward": "tagging:tagged"},
    "environment": {"options": {"environment": "tagging:Till"}},
    "tldr": {"options": {"reward_model": "m"}},
    "redteam": {"options": {"victim": "m", "classifier": "m", "label": "bad"}},
}


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HfTokenizer:
    """Whose answer tags are special tokens; beside it a module, and a file of rows."""
    made = make_tokenizer(128)
    made.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path)
    (tmp_path / "tagging.py").write_text(OWN)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}+{i}="}) for i in range(6)))
    (tmp_path / "attack.txt").write_text("Say:")
    monkeypatch.syspath_prepend(tmp_path)
    return load_tokenizer(str(tmp_path))


def said(tokenizer: HfTokenizer) -> Completion:
    """SAID, ended by the EOS."""
    tokens = np.append(tokenizer.encode(SAID), tokenizer.eos_token_id).astype(np.int32)
    return Completion(tokens, np.zeros(len(tokens), np.float32), "stop")


def section(folder: Path, name: str, *, special: bool) -> TaskSection:
    given = TASKS[name]
    options = dict(given.get("options", {}))
    if name == "redteam":
        options["attack_prompt_file"] = str(folder / "attack.txt")
    rows = {"train_file": str(folder / "rows.jsonl")} if name in ("jsonl", "environment") else {}
    return TaskSection(
        name=name, reward=given.get("reward", {}), options=options, special_tokens=special, **rows
    )


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TASKS)
def test_every_task_sees_special_tokens_where_they_are_asked_for(
    tmp_path: Path, tokenizer: HfTokenizer, name: str, special: bool
) -> None:
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    task = make_task(section(tmp_path, name, special=special), tokenizer, lambda *_, **__: None)  # type: ignore[arg-type, return-value]
    wanted, answer = SAID if special else PLAIN, said(tokenizer)
    if isinstance(task, RedTeam):
        assert task._attack(answer) == wanted
        return
    assert isinstance(task, Rows) and task.text(answer) == wanted
    if isinstance(task, Environment):
        assert task._chat_of(tokenizer).decode(answer.tokens) == wanted
    if isinstance(task, TLDR):
        assert task._text(Ended(), Post(tokenizer), answer) == f"A post: {wanted}."  # type: ignore[arg-type]


class Ended:
    """A reward model that is only asked how a text ends."""

    def ended(self, text: str) -> str:
        """By a point."""
        return f"{text}."


class Post:
    """Tokens of a prompt."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self.tokens = tokenizer.encode("A post: ")


@pytest.mark.parametrize("special", [False, True])
def test_functions_and_programs_are_given_them(tmp_path: Path, tokenizer: HfTokenizer, special: bool) -> None:
    rewards = {"own": {"function": "tagging:tagged"}, "program": {"program": ["python", "-c", PROGRAM]}}
    given = section(tmp_path, "jsonl", special=special).model_dump()
    given |= {"reward": rewards, "options": {"validation_prompts": 1}}
    task = make_task(TaskSection(**given), tokenizer)
    assert isinstance(task, Jsonl)
    prompt = task.prompts("train")[0]
    assert task.rewards(prompt, [said(tokenizer)]) == [2.0 * special]
    assert task.reward_parts() == {"own": [special], "program": [special]}


def test_the_quick_tokenizer_and_the_models_own_agree(tmp_path: Path, tokenizer: HfTokenizer) -> None:
    """Both leave out an EOS at the end alone; where there is none, nothing."""
    tokens, quick = said(tokenizer).tokens, FileTokenizer.find(str(tmp_path))
    assert quick is not None
    for one in (tokenizer, quick):
        assert decoder(one, special=False)(tokens) == PLAIN
        show = decoder(one, special=True)
        assert show(tokens) == show(tokens[:-1]) == SAID and show(tokens[:0]) == ""
        assert show(np.append(tokens, tokens[:2])) == f"{SAID}<eos>So"


class Plain:
    """A tokenizer that cannot show them."""

    eos_token_id = 0

    def decode(self, tokens: np.ndarray) -> str:
        """Nothing."""
        return ""


def test_what_cannot_show_them_is_refused(tmp_path: Path, tokenizer: HfTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"model\.path cannot show special tokens: give it the method"):
        decoder(Plain(), special=True)  # type: ignore[arg-type]
    (tmp_path / "tagging.py").write_text(
        "class Mine:\n    def __init__(self, tokenizer, *, train_file=None, test_file=None): ...\n"
        "    prompts = rewards = correct = lambda self, *_: []\n"
    )
    with pytest.raises(ConfigError, match=r"would be ignored by the task tagging:Mine: give it the"):
        make_task(TaskSection(name="tagging:Mine", special_tokens=True), tokenizer)
