"""Rows of JSONL are read, set aside with their line, or refused before anything starts."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import ByteTokenizer
from conversing import make_tokenizer

from tba_hpc.config import ConfigError, TaskSection, parse_config
from tba_hpc.core.ports import Tokenizer
from tba_hpc.tasks import load_task
from tba_hpc.tasks.data import MOST_LEVELS
from tba_hpc.tasks.fields import filled_in
from tba_hpc.tasks.jsonl import Jsonl

REWARD = "rows_reward:nothing"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
SHOWN = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
LEAVES_OUT = (
    "{% for m in messages if m.role != 'developer' %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
)
MODULE = """
def nothing(completion):
    return 0.0


class Shop:
    def reset(self, coins):
        return None

    def buy(self, things: int) -> str:
        return "bought"

    def get_reward(self):
        return 0.0
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward and an environment that look at nothing."""
    (tmp_path / "rows_reward.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def lines(number: int) -> list[str]:
    return [json.dumps({"prompt": f"{i} + 2?", "answer": str(i + 2)}) for i in range(number)]


def load(folder: Path, data: str | bytes, tokenizer: Tokenizer | None = None, **fields: Any) -> Jsonl:
    (folder / "rows.jsonl").write_bytes(data.encode() if isinstance(data, str) else data)
    fields = {"name": "jsonl", "reward": REWARD} | fields
    fields["options"] = {"validation_prompts": 1} | fields.get("options", {})
    section = TaskSection(train_file=str(folder / "rows.jsonl"), **fields)
    task = load_task(section, tokenizer or ByteTokenizer())
    assert isinstance(task, Jsonl)
    return task


def texts(task: Jsonl) -> list[str]:
    return [bytes(prompt.tokens.tolist()).decode() for prompt in task.prompts("train")]


# --- Lines ---


@pytest.mark.parametrize(
    ("begin", "between", "end"),
    [
        ("\ufeff", "\n", ""),
        ("\n \n", "\n\n", "\n\n\n"),
        ("", "\r\n", "\r\n"),
        ("\ufeff\r\n", "\n\ufeff", "\n\ufeff\n"),
    ],
    ids=["mark", "blank lines", "Windows", "files with marks, joined"],
)
def test_marks_blank_lines_and_other_line_ends_cost_no_row(
    tmp_path: Path, begin: str, between: str, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = load(tmp_path, begin + between.join(lines(40)) + end)
    assert texts(task) == [f"{i} + 2?" for i in range(38)] and not caplog.text


def test_characters_that_end_lines_elsewhere_are_text(tmp_path: Path) -> None:
    odd = json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False)
    assert texts(load(tmp_path, "\n".join([odd, *lines(2)]))) == ["a\u2028b\x85c"]


BAD = {
    "half of a pair": (rb'{"prompt": "Half \ud83d, how many?"}', "half of a surrogate pair"),
    "half in a name": (rb'{"prompt": "x", "\uDE00": 1}', "half of a surrogate pair"),
    "digits": (b'{"prompt": "x", "answer": 1' + b"0" * 5000 + b"}", "a number with over 4300 digits"),
    "far too deep": (b'{"prompt": "x", "tree": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "over 100 deep"),
    "too deep": (
        b'{"prompt": "x", "tree": ' + b"[" * MOST_LEVELS + b"]" * MOST_LEVELS + b"}",
        "nested over 100 deep",
    ),
    "Latin-1": ('{"prompt": "Wie süß?"}'.encode("latin-1"), "it is not UTF-8 text"),
    "cut off": (b'{"prompt": "x', "no JSON: Unterminated string starting at at column 12"),
    "no object": (b'"x"', "it holds no JSON object)"),
    "a long array": (b"[", "no JSON: Expecting value at column 2: one row a line, not an array)"),
    "an array": (b'[{"prompt": "x"}]', "it holds no JSON object: one row a line, not an array)"),
    "twice": (
        b'{"prompt": "x", "tests": [{"a": 1, "b": 2, "a": 3}]}',
        "it has the key 'a' twice in one object",
    ),
}
FINE = {
    "a pair": (rb'{"prompt": "\ud83d\ude00?"}', "\U0001f600?"),
    "digits": (b'{"prompt": 1' + b"0" * 4000 + b"}", "1" + "0" * 4000),
    "deep": (b'{"prompt": "x", "tree": ' + b"[" * 99 + b"]" * 99 + b"}", "x"),
    "brackets": (b'{"prompt": "' + b"[" * 5000 + b'"}', "[" * 5000),
}


@pytest.mark.parametrize("kind", BAD)
def test_one_bad_line_is_set_aside_with_its_number(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    line, reason = BAD[kind]
    good = "\n".join(lines(120)).encode()
    assert len(load(tmp_path, b"\n" + line + b"\n" + good).prompts("train")) == 118
    (said,) = caplog.messages
    assert "rows.jsonl, line 2: cannot be used (" in said and reason in said and "1 of 121 rows" in said
    with pytest.raises(ConfigError, match=r"line 1: cannot be used .*; write a JSON object .* \(1 of 3 rows"):
        load(tmp_path, line + b"\n" + "\n".join(lines(2)).encode())


@pytest.mark.parametrize("kind", FINE)
def test_what_every_rank_can_handle_is_read(tmp_path: Path, kind: str) -> None:
    line, prompt = FINE[kind]
    assert texts(load(tmp_path, line + b"\n" + "\n".join(lines(2)).encode()))[0] == prompt


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x1f\x8b\x08\x00packed", "it is not UTF-8 text"),
        ("\n".join(lines(3)).encode("utf-16"), "it is not UTF-8 text"),
        (b"prompt,answer\n2 + 3?,5\n", "no JSON: Expecting value"),
        (b'[\n{"prompt": "x"},\n{"prompt": "y"}\n]', "no JSON: Expecting value"),
    ],
    ids=["gzip", "UTF-16", "CSV", "array"],
)
def test_files_of_other_kinds_are_refused_with_the_reason(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot be used \({reason}.*; write a JSON object"):
        load(tmp_path, data)


# --- Fields ---


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (MESSAGES, "'prompt' is a list of messages, which needs task.options.chat=true"),
        ({"text": "x"}, "'prompt' is an object, but must be a text or a number"),
        (True, "'prompt' is true or false"),
        (None, "'prompt' is null"),
        (float("nan"), "'prompt' is null"),
        ("", "'prompt' is empty"),
        (" \n\u3000", "'prompt' is empty"),
    ],
)
def test_a_prompt_that_is_no_text_is_refused_with_line_and_field(
    tmp_path: Path, value: object, reason: str
) -> None:
    rows = [*lines(3), json.dumps({"prompt": value, "answer": "5"})]
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "\n".join(rows))
    assert f"rows.jsonl, line 4: cannot be used ({reason}" in str(caught.value)


def test_a_number_is_a_text_and_a_field_that_is_missing_is_named(tmp_path: Path) -> None:
    assert texts(load(tmp_path, "\n".join(['{"prompt": 17}', *lines(2)]))) == ["17"]
    with pytest.raises(ConfigError, match=r"line 1: cannot be used \(it lacks 'prompt'; found question, a\)"):
        load(tmp_path, '{"question": "x", "a": 1}')


def test_what_is_no_text_is_json_in_a_judges_prompt_and_in_a_target(tmp_path: Path) -> None:
    rubric = {"right": True, "words": ["süß", None], "worth": 0.5, "none": None}
    assert filled_in("{right} {words} {worth}|{none}|{other}", rubric) == 'true ["süß", null] 0.5||{other}'
    answers = [["5", "five"], None, True]
    rows = [json.dumps({"prompt": f"{i}", "answer": answer}) for i, answer in enumerate(answers)]
    task = load(tmp_path, "\n".join([*rows, *lines(2)]))
    assert [prompt.target for prompt in task.prompts("train")] == ['["5", "five"]', "", "true"]


def test_nan_is_a_missing_value(tmp_path: Path) -> None:
    """As pandas writes it. A judge could not be sent it: it is no JSON."""
    (row,) = load(
        tmp_path, "\n".join(['{"prompt": "x", "a": NaN, "b": [-Infinity]}', *lines(2)])
    )._table.rows("train")
    assert row == {"prompt": "x", "a": None, "b": [float("-inf")]}


def test_a_judge_is_shown_no_null(tmp_path: Path) -> None:
    judge = {"url": "http://localhost:1/v1", "model": "judge", "prompt": "{prompt} {rubric} {completion}?"}
    rows = [json.dumps({"prompt": "x", "rubric": rubric}) for rubric in ("brief", "kind", None)]
    with pytest.raises(ConfigError, match=r"line 3: cannot be used \('rubric' is null, but the judge is to"):
        load(tmp_path, "\n".join(rows), reward={"judge": judge})


# --- Messages ---


def test_messages_are_rendered_by_the_chat_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("hermes")
    rows = [json.dumps({"prompt": MESSAGES}), *lines(3)]
    first, second = load(tmp_path, "\n".join(rows), tokenizer, options={"chat": True}).prompts("train")
    assert first.tokens.tolist() == tokenizer.encode_rendered(SHOWN).tolist()
    assert second.tokens.tolist() == tokenizer.encode_chat("0 + 2?").tolist()


def test_a_question_may_be_a_row_with_messages(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("hermes")
    task = load(tmp_path, "\n".join(lines(3)), tokenizer, options={"chat": True})
    asked = task.encode_question(json.dumps({"prompt": MESSAGES}))
    assert asked.tolist() == tokenizer.encode_rendered(SHOWN).tolist()
    for text in ('{"ask": "x"}', "[1]", "7"):  # no row of this data
        assert task.encode_question(text).tolist() == tokenizer.encode_chat(text).tolist()
    with pytest.raises(ConfigError, match="the question cannot be used as a row: 'prompt' is an empty list"):
        task.encode_question('{"prompt": []}')


def test_messages_that_the_template_leaves_out_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Qwen's does with the role developer: the run would go on without its instructions."""
    tokenizer = make_tokenizer("hermes")
    for role, told in (("system", 0), ("developer", 1)):
        messages = [{"role": role, "content": " Be brief.\n"}, {"role": "user", "content": "2 + 3?"}]
        tokenizer._tokenizer.chat_template = LEAVES_OUT
        load(tmp_path, "\n".join([json.dumps({"prompt": messages})] * 3), tokenizer, options={"chat": True})
        said = [message.partition(":")[0] for message in caplog.messages if "leaves out" in message]
        assert said == told * [
            f"the chat template leaves out 1 messages of {split} rows, such as ' Be brief.\\n' "
            "of the role 'developer'"
            for split in ("train", "validation", "test")
        ]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "usr", "content": "x"}], "message 1 of 'prompt' has the role 'usr', not one of system, "),
        ([{"from": "human", "value": "x"}], "message 1 of 'prompt' has the role None"),
        (["x"], "message 1 of 'prompt' has the role ''"),
        (
            [MESSAGES[0], {"role": "user", "content": None}],
            "message 2 of 'prompt' has no text as its content",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "message 1 of 'prompt' has no text"),
        (
            [*MESSAGES, {"role": "assistant", "content": "5"}],
            "the last message of 'prompt' has the role 'assistant'",
        ),
        ([], "'prompt' is an empty list"),
    ],
)
@pytest.mark.parametrize("name", ["jsonl", "environment"])
def test_messages_that_nobody_could_answer_are_refused(
    tmp_path: Path, name: str, messages: list[object], reason: str
) -> None:
    own = {"chat": True} if name == "jsonl" else {"environment": "rows_reward:Shop"}
    rows = [json.dumps({"prompt": one, "coins": 1}) for one in (MESSAGES, MESSAGES, MESSAGES, messages)]
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "\n".join(rows), make_tokenizer("hermes"), name=name, options=own)
    assert f"line 4: cannot be used ({reason}" in str(caught.value)


@pytest.mark.parametrize("tools", ["look", ["look"], {"name": "look"}])
def test_tools_that_are_no_schemas_are_refused(tmp_path: Path, tools: object) -> None:
    rows = [json.dumps({"prompt": "x", "coins": 1}), json.dumps({"prompt": "x", "coins": 1, "tools": tools})]
    own = {"environment": "rows_reward:Shop"}
    with pytest.raises(ConfigError, match=r"line 2: cannot be used \('tools' is not a list of schemas"):
        load(tmp_path, "\n".join(rows), make_tokenizer("hermes"), name="environment", options=own)


@pytest.mark.parametrize("chat", [False, True])
def test_messages_need_a_template_of_their_own_and_one_that_can_render(tmp_path: Path, chat: bool) -> None:
    row = "\n".join([json.dumps({"prompt": MESSAGES})] * 3)
    needs = "" if chat else " and task.options.chat=true"
    with pytest.raises(ConfigError, match=r"which needs 'task.options.template=.*" + needs + r"\)") as asked:
        load(tmp_path, row, make_tokenizer("hermes"), options={"chat": chat, "template": "{prompt}\n"})
    (setting,) = shlex.split(re.findall(r"needs ('.*?')", str(asked.value))[0])
    assert parse_config({"model": {"path": "m"}}, [setting]).task.options == {"template": "{prompt}"}
    with pytest.raises(ConfigError, match="the task jsonl needs a chat template, which the tokenizer"):
        load(tmp_path, row, options={"chat": True})


# --- Equal rows on both sides ---


def test_the_same_question_is_told_whatever_its_blanks_and_the_writing_of_its_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [("1 + 1", "2"), ("2 + 2", "4"), (" 1 +  1\n", "2"), ("2 + 2", "4.0"), ("2 + 3", "4")]
    rows = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in asked[2:]]
    (tmp_path / "test.jsonl").write_text("\n".join(rows))
    trained = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in asked[:2]]
    options = {"validation_prompts": 1}
    load(tmp_path, "\n".join([*trained, *lines(1)]), options=options, test_file=str(tmp_path / "test.jsonl"))
    assert [said[:37] for said in caplog.messages] == ["2 of 3 test rows are also trained on,"]


def test_held_out_rows_that_are_trained_on_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*lines(6), lines(1)[0].replace("}", ', "id": 7}'), lines(9)[8]]
    load(tmp_path, "\n".join(rows), options={"validation_prompts": 1})
    assert [said[:53] for said in caplog.messages] == [
        "1 of 1 test rows are also trained on, so their score "
    ]
    caplog.clear()
    load(tmp_path, "\n".join(lines(1) * 200), options={"validation_prompts": 64})
    assert [said.partition(" rows")[0] for said in caplog.messages] == [
        "64 of 64 validation",
        "64 of 64 test",
    ]


def test_environments_may_differ_where_prompts_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [json.dumps({"prompt": "Buy.", "coins": coins}) for coins in (1, 2, 3, 1)]
    load(
        tmp_path,
        "\n".join(rows),
        make_tokenizer("hermes"),
        name="environment",
        options={"environment": "rows_reward:Shop"},
    )
    assert [said.partition(" rows")[0] for said in caplog.messages] == ["1 of 1 validation"]
