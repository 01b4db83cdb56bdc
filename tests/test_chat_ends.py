"""A chat template after whose answers no completion ends, or that leads to none, is told before a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conversing import FAMILIES, TEMPLATES, make_tokenizer
from tiny_models import make_random_model

from tba_hpc.checks.chat_ends import odd_ends
from tba_hpc.checks.config_checks import check_task
from tba_hpc.checks.facts import Facts, refuse
from tba_hpc.config import ConfigError, parse_config
from tba_hpc.learner.file_tokenizer import FileTokenizer

END = {
    "Qwen 3": "<|im_end|>",
    "Llama 3": "<|eot|>",
    "Mistral": "<eos>",  # and it has no generation prompt, for an answer follows the question at once
    "Gemma": "<|eot|>",
    "GLM": "<|user|>",  # the head of the next message
    "LFM2": "<|im_end|>",
    "DeepSeek": "<eos>",
}
"""What ends an answer, by family."""

UNASKED = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ALWAYS = UNASKED + "<|im_start|>assistant\n"
FORGETFUL = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
BLANK = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
SHORT = "{% for m in messages %}{{ '>' if m.role == 'user' }}{{ m.content }}{{ eos_token }}{% endfor %}"


def said(template: str, *ends: str, stop: tuple[str, ...] = ()) -> list[str]:
    tokenizer = make_tokenizer("", template)
    ids = [int(tokenizer.encode_rendered(end)[0]) for end in ends]
    return [*odd_ends(tokenizer, ids, stop, {})]


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_of_known_families_raise_no_warning_where_their_end_is_one(family: str) -> None:
    assert said(FAMILIES[family], END[family], "<pad>") == []
    other = next(end for end in END.values() if end != END[family])
    (sentence,) = said(FAMILIES[family], other)
    number = int(make_tokenizer("", FAMILIES[family]).encode_rendered(END[family])[0])
    assert sentence.startswith(f"has '{END[family]}' after an answer, and the engine ends no")
    assert f"add {number} to eos_token_id in its generation_config.json, or set generator.stop=[" in sentence


def test_a_stop_string_ends_completions_too() -> None:
    assert said(TEMPLATES["hermes"], "<eos>", stop=("<|im_end|>",)) == []
    assert "after an answer" in said(TEMPLATES["hermes"], "<eos>", stop=("###",))[0]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            UNASKED,
            "ignores add_generation_prompt, so that prompts end before the '<.im_start.>assistant'",
        ),
        (ALWAYS, None),
        (FORGETFUL, None),  # it shows no answer
        (SHORT, None),  # an answer has no head
        (
            BLANK,
            "has nothing after an answer, and .* set a chat_template in its tokenizer_config.json",
        ),
    ],
)
def test_a_prompt_that_leads_to_no_answer_is_told(template: str, words: str | None) -> None:
    found = said(template, "<|im_end|>", "<eos>")
    assert len(found) == (words is not None)
    assert not words or any(re.search(words, one) for one in found)


def test_doctor_and_run_tell_it_of_tasks_with_chats(tmp_path: Path) -> None:
    """The chat model of a public report, whose tokens of the end were set to others."""
    model = make_random_model(tmp_path / "m", tied=True)
    make_tokenizer("", TEMPLATES["hermes"]).save(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    rows = [{"problem": f"{n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def warnings(*, chat: bool) -> list[str]:
        options = {"chat": chat, "validation_problems": 4}
        task = {"name": "math", "train_file": str(tmp_path / "rows.jsonl"), "options": options}
        task["test_file"] = task["train_file"]
        config = parse_config({"model": {"path": str(model)}, "task": task})
        found = refuse([check_task], Facts(config=config, seconds=200))
        return [one.sentence for one in found if "chat template" in one.sentence]

    (sentence,) = warnings(chat=True)
    assert sentence.startswith(f"the chat template of model.path={model} has '<|im_end|>' after an answer")
    assert "only at the tokens 0, 1, 2:" in sentence
    assert warnings(chat=False) == []
    end = int(make_tokenizer("hermes").encode_rendered("<|im_end|>")[0])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    assert warnings(chat=True) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_quick_tokenizer_renders_as_transformers_does(tmp_path: Path, family: str) -> None:
    slow = make_tokenizer("", FAMILIES[family])
    slow.save(tmp_path)
    quick = FileTokenizer.find(str(tmp_path))
    assert quick is not None and quick.has_chat
    chat = [{"role": "user", "content": "A th?"}, {"role": "assistant", "content": "B."}]
    for ask in (True, False):
        text = quick.render(chat, tools=(), ask=ask)
        assert text == slow.render(chat, tools=(), ask=ask)
        assert quick.encode_rendered(text).tolist() == slow.encode_rendered(text).tolist()
    if family == "Gemma":
        with pytest.raises(ConfigError, match=r"refuses messages of assistant \(roles must alternate"):
            quick.render(chat[1:], tools=(), ask=True)
