"""Conversations that a program leads through OpenAI's own client: token by token, and whatever it does."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

import numpy as np
import psutil
import pytest
from conversing import REWRITING, Stage, make_tokenizer

from tba_hpc.config import ConfigError, TaskSection, load_config
from tba_hpc.core.types import Completion, Prompt, Request, Sampling, Split
from tba_hpc.environments.agent import COMMAND, Agent
from tba_hpc.environments.endpoint import LARGEST_BODY
from tba_hpc.environments.protocol import ChatRequest, RefusedError
from tba_hpc.run.listeners import owner
from tba_hpc.tasks import load_task
from tba_hpc.tasks.program import require_program

ROOT = Path(__file__).parents[1]
SMOLAGENTS = ROOT / ".cache/smolagents/bin/python"

needs_smolagents = pytest.mark.skipif(
    not SMOLAGENTS.is_file(),
    reason="no smolagents: python -m venv .cache/smolagents; "
    ".cache/smolagents/bin/pip install 'smolagents[openai]==1.26.0'",
)

WRITER = """
import json, sys
from openai import OpenAI

row = json.loads(sys.stdin.readline())
client = OpenAI()
messages = [{"role": "user", "content": row["prompt"]}]
letters = 0
for turn in range(row.get("turns", 2)):
    answer = client.chat.completions.create(model="policy", messages=messages, **row.get("with", {}))
    message = answer.choices[0].message
    letters += len(message.content or "")
    messages += [message.model_dump(), {"role": "user", "content": f"{letters} so far."}]
print("a word of its own")
print(letters)
"""
"""A program as a user would write it."""

RAW = """
import json, os, sys, time, urllib.request
row = json.loads(sys.stdin.readline())

def ask(*messages, key=os.environ["OPENAI_API_KEY"], path="chat/completions", **more):
    body = json.dumps({"messages": list(messages), **more}).encode()
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/{path}"
    with urllib.request.urlopen(urllib.request.Request(url, body, head)) as answer:
        return json.load(answer)

def say(*messages, **more):
    return ask(*messages, **more)["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}
"""
"""The beginning of such a program without OpenAI's library; it starts ten times as fast."""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stage]]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[Stage] = []

    def make(code: str, lines: list[str], *rows: dict[str, object], **options: object) -> Stage:
        (tmp_path / "my_agent.py").write_text(code)
        given = [{"prompt": "Go.", **row} for row in (*rows, *rows[:1], *rows[:1])]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, given)))
        reward, template = options.pop("reward", {}), cast(str | None, options.pop("template", None))
        section = TaskSection.model_validate(
            {
                "name": "agent",
                "train_file": str(tmp_path / "rows.jsonl"),
                "reward": reward,
                "options": {"command": ["python", "my_agent.py"], "validation_prompts": 1, **options},
            }
        )
        tokenizer = make_tokenizer("hermes", template)
        task = load_task(section, tokenizer)
        assert isinstance(task, Agent)
        made.append(Stage(task, tokenizer, lines))
        return made[-1]

    yield make
    for one in made:
        one.generator.close()
        assert gone(one)


def gone(stage: Stage) -> bool:
    """Whether no process of the stage's programs is left; one that was killed is there for a moment more."""
    deadline = time.monotonic() + 20
    while programs(stage) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not programs(stage)


def programs(stage: Stage) -> list[psutil.Process]:
    """Processes of the stage's programs that still run, with those that they started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("OPENAI_BASE_URL") == stage.task.endpoint.url:
                found.append(process)
    return found


# --- What is trained on is what was sampled ---


def test_a_program_leads_a_conversation_token_by_token(stage: Callable[..., Stage]) -> None:
    made = stage(WRITER, ["the end", "then"], {})
    group = made.play(n=2)
    assert made.tokenizer._tokenizer.decode(group.request.prompt.tokens.tolist()) == (
        "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"
    )
    for one in group.completions:
        assert made.pieces(one) == [
            (True, "the end<|im_end|>"),
            (False, "\n<|im_start|>user\n7 so far.<|im_end|>\n<|im_start|>assistant\n"),
            (True, "then<|im_end|>"),
        ]
        assert (one.finish_reason, one.reward, one.turns) == ("stop", 11.0, 2)
        t, h, both = (made.tokenizer.encode(text)[0] for text in ("t", "h", "th"))
        assert both not in one.tokens[one.action_T] and list(one.tokens[:2]) == [t, h]
    second = made.script.requests[-1].prompt.tokens
    whole = np.concatenate([group.request.prompt.tokens, group.completions[0].tokens])
    np.testing.assert_array_equal(second, whole[: len(second)])
    assert made.task.rewards(group.request.prompt, group.completions) == [11.0, 11.0]


@pytest.mark.parametrize("file", ["docs/environments.md", "docs/examples/agent/my_agent.py"])
def test_the_program_of_the_page_runs(stage: Callable[..., Stage], file: str) -> None:
    code = (ROOT / file).read_text().rpartition("# my_agent.py\n")[2].partition("```")[0]
    made = stage(code, ["4", "5"], {"prompt": "What is 2 + 3?", "answer": "5"})
    (one,) = made.play().completions
    assert one.reward == 1.0
    assert [piece for mine, piece in made.pieces(one) if mine] == ["4<|im_end|>", "5<|im_end|>"]
    assert "No. Try again." in made.pieces(one)[1][1]


@pytest.mark.parametrize(("row", "reward"), [({"answer": "5"}, 1.0), ({}, 0.0)])
def test_the_agent_of_the_lab_needs_no_answer_in_its_row(
    stage: Callable[..., Stage], row: dict[str, str], reward: float
) -> None:
    made = stage((ROOT / "tools/lab/calculator_agent.py").read_text(), ["5"], {"prompt": "2+3", **row})
    assert made.play().completions[0].reward == reward


def test_the_example_has_the_program_of_the_page_and_right_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its config makes a task that can start here."""
    page = (ROOT / "docs/environments.md").read_text()
    program = page.partition("# my_agent.py\n")[2].partition("```")[0].partition("\n\n")[2]
    example = ROOT / "docs/examples/agent"
    assert program and (example / "my_agent.py").read_text().endswith(f"\n\n{program}")
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(example)
    task = load_task(load_config(example / "agent.yaml").task, make_tokenizer("hermes"))
    assert isinstance(task, Agent)
    require_program(COMMAND, task.words)
    splits = [task.prompts(split) for split in get_args(Split)]
    assert sorted(map(len, splits)) == [8, 8, 48]
    for row in (task.row(prompt) for prompts in splits for prompt in prompts):
        terms = map(int, re.findall(r"\d+", str(row["prompt"])))
        assert sum(terms) == int(str(row["answer"]))


def test_a_program_calls_tools(stage: Callable[..., Stage]) -> None:
    code = """
import json, sys
from openai import OpenAI
client, row = OpenAI(), json.loads(sys.stdin.readline())
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
question = [{"type": "text", "text": "1+2"}]
messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": question}]
answer = client.chat.completions.create(model="policy", messages=messages, tools=[tool])
message = answer.choices[0].message
(call,) = message.tool_calls
assert answer.choices[0].finish_reason == "tool_calls" and message.content == "I add.", answer
assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": [1, 2]})
messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
answer = client.chat.completions.create(model="policy", messages=messages, tools=[tool])
assert client.models.list().data[0].id == "policy"
assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 100
print(1.5 * (answer.choices[0].message.content == "3"))
"""
    said = 'I add.<tool_call>{"name": "add", "arguments": {"a": [1, 2]}}</tool_call>'
    made = stage(code, [f"{said}<tool_call>{{</tool_call>", "3"], {})
    group = made.play()
    (one,) = group.completions
    assert (one.reward, one.calls, one.failed_calls) == (1.5, 2, 1)
    begin = made.tokenizer._tokenizer.decode(group.request.prompt.tokens.tolist())
    assert begin.startswith("<|im_start|>system\nTools:") and '"name": "add"' in begin and "1+2" in begin
    (_, between) = made.pieces(one)[1]
    assert between == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_call_that_json_cannot_write_is_malformed(stage: Callable[..., Stage]) -> None:
    code = f"""{RAW}
tool = {{"type": "function", "function": {{"name": "f", "parameters": {{"type": "object"}}}}}}
said = [user("Go.")]
for turn in range(4):
    said += [say(*said, tools=[tool]), user("?")]
print(sum("tool_calls" in message for message in said))
"""
    call = '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>'
    lines = [call % "NaN", call % "-1e999", "[f(a={1})]", call % "1e9"]
    (one,) = stage(code, lines, {}).play().completions
    assert (one.reward, one.calls, one.failed_calls, one.turns) == (1.0, 4, 3, 4)


def test_the_last_request_sent_again_gets_the_same_answer(stage: Callable[..., Stage]) -> None:
    """Clients send it again if the connection is lost, before the answer or after it."""
    code = f"""{RAW}
import socket
def lose(*messages):
    body = json.dumps({{"messages": messages}}).encode()
    port = int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as lost:
        lost.sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\n")
        lost.sendall(b"Content-Type: application/json\\r\\n")
        lost.sendall(b"Authorization: Bearer %b\\r\\n" % os.environ["OPENAI_API_KEY"].encode())
        lost.sendall(b"Content-Length: %d\\r\\n\\r\\n%b" % (len(body), body))

lose(user("Go."))
first = [ask(user("Go.")) for _ in range(3)]
said = [user("Go."), first[0]["choices"][0]["message"], user("?")]
second = [ask(*said) for _ in range(2)]
print(len({{json.dumps(answer) for answer in first}}), len({{answer["id"] for answer in second}}))
print(float(first[1:] == first[:-1] and second[0] == second[1] != first[0]))
"""
    made = stage(code, ["a", "b"], {})
    (one,) = made.play().completions
    assert (one.reward, one.turns, len(made.script.requests)) == (1.0, 2, 2)


def test_a_turn_comes_as_one_chunk_and_ends_where_the_program_wants(stage: Callable[..., Stage]) -> None:
    code = """
from openai import OpenAI
client, messages = OpenAI(), [{"role": "user", "content": "Go."}]
chunks = list(client.chat.completions.create(
    model="policy", messages=messages, max_tokens=3, stop=["x", "y"],
    stream=True, stream_options={"include_usage": True},
))
assert [chunk.choices[0].finish_reason for chunk in chunks[:1]] == ["length"] and len(chunks) == 2
assert chunks[1].usage.completion_tokens == 3
messages += [{"role": "assistant", "content": chunks[0].choices[0].delta.content}, messages[0]]
last = client.chat.completions.create(model="policy", messages=messages, temperature=1, n=1).choices[0]
print(len(chunks[0].choices[0].delta.content) + len(last.message.content))
"""
    made = stage(code, ["a bcd", "ef"], {})
    (one,) = made.play().completions
    assert (one.reward, one.finish_reason) == (5.0, "stop")
    assert [piece for mine, piece in made.pieces(one) if mine] == ["a b", "ef<|im_end|>"]
    assert [(r.sampling.max_tokens, r.sampling.stop) for r in made.script.requests] == [
        (3, ("x", "y")),
        (400 - len(one.tokens) + 3, ()),
    ]


def sequences(made: Stage, one: Completion) -> list[list[tuple[bool, str]]]:
    """Parts of each further sequence as ``Stage.pieces`` returns them, after those of the first."""
    ends = [*np.flatnonzero(one.begin_T).tolist(), len(one.tokens)]
    spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return [made.pieces(replace(one, tokens=one.tokens[s], logprobs=one.logprobs[s])) for s in spans]


def test_a_sub_agent_is_a_sequence_of_its_own_and_its_caller_goes_on(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    """Named rewards get the turn that was sampled last, which is not at the completion's end."""
    code = f"""{RAW}
main = [user("Go.")]
main.append(say(*main))
sub = [{{"role": "system", "content": "Help."}}, user("Part.")]
sub += [say(*sub), user("More.")]
sub.append(say(*sub))
main.append(user(sub[-1]["content"]))
answer = ask(*main)
print(answer["usage"]["prompt_tokens"])
"""
    (tmp_path / "my_text.py").write_text("def text(completion, prompt): return len(completion)")
    made = stage(code, ["ab", "cdefg", "xyz"], {}, reward="my_text:text")
    group = made.play()
    (one,) = group.completions
    head, end = "<|im_start|>assistant\n", "<|im_end|>"
    assert sequences(made, one) == [
        [
            (True, f"ab{end}"),
            (False, f"\n<|im_start|>user\ncdefg{end}\n{head}"),
            (True, f"cdefg{end}"),
        ],
        [
            (False, f"<|im_start|>system\nHelp.{end}\n<|im_start|>user\nPart.{end}\n{head}"),
            (True, f"ab{end}"),
            (False, f"\n<|im_start|>user\nMore.{end}\n{head}"),
            (True, f"cdefg{end}"),
        ],
    ]
    assert (one.turns, one.finish_reason) == (4, "stop")
    assert made.task.rewards(group.request.prompt, [one]) == [len("cdefg")]
    asked = [request.prompt.tokens.tolist() for request in made.script.requests]
    (begin,) = np.flatnonzero(one.begin_T).tolist()
    main, sub = [*group.request.prompt.tokens, *one.tokens[:begin]], one.tokens[begin:].tolist()
    assert [main[: len(asked[0])], main[: len(asked[3])]] == [asked[0], asked[3]]
    assert [sub[: len(asked[1])], sub[: len(asked[2])]] == asked[1:3]
    assert made.script.requests[3].sampling.max_tokens == 400 - len(one.tokens) + len(one.last_turn)


def test_a_request_goes_on_where_it_repeats_most(stage: Callable[..., Stage]) -> None:
    """Of three sequences that begin alike; one with other tools, or an edited answer, begins anew."""
    code = f"""{RAW}
first = [user("Go."), say(user("Go."))]
again = say(user("Go."), max_tokens=9)
longer = [*first, user("?")]
longer.append(say(*longer))
longest = [*longer, user("!")]
say(*longest)
say(*longest, tools=[{{}}])
edited = [user("Go."), {{"role": "assistant", "content": "No."}}, user("?")]
edited.append(say(*edited))
say(*edited, user("Well?"))
print(1)
"""
    made = stage(code, ["a", "b", "c"], {})
    (one,) = made.play(max_tokens=2000).completions
    found = sequences(made, one)
    said = [[text.removesuffix("<|im_end|>") for mine, text in parts if mine] for parts in found]
    assert said == [["a"], ["a", "b", "c"], ["c"], ["b", "c"]]
    assert "Tools:" in found[2][0][1] and "No.<|im_end|>" in found[3][0][1]
    assert one.turns == 7 and one.reward == 1.0


def test_requests_at_the_same_time_are_answered_one_after_the_other(stage: Callable[..., Stage]) -> None:
    code = f"""{RAW}
from concurrent.futures import ThreadPoolExecutor
say(user("Go."))
with ThreadPoolExecutor(3) as pool:
    said = list(pool.map(lambda letter: say(user(letter))["content"], "xyz"))
print(float(said == ["So."] * 3))
"""
    (one,) = stage(code, ["So."], {}).play().completions
    assert (one.reward, one.turns, np.count_nonzero(one.begin_T)) == (1.0, 4, 3)


def test_limits_hold_for_all_sequences_together(stage: Callable[..., Stage]) -> None:
    """Every sequence after the first counts with its prompt, so that none is longer than the limit."""
    minds = f"{RAW}\nfor word in 'abcdef': say(user(word))"
    (one,) = stage(minds, ["So."], {}, max_turns=3).play().completions
    assert (one.finish_reason, one.turns, one.reward) == ("turns", 3, 0.0)
    made = stage(minds, ["So."], {})
    (whole,) = made.play().completions
    length = int(np.flatnonzero(whole.begin_T)[2])  # of the first three
    (one,) = made.play(max_tokens=length + 1).completions
    assert (one.finish_reason, one.turns, len(one.tokens), one.reward) == ("length", 3, length, 0.0)


def test_a_program_may_want_no_tool_called(stage: Callable[..., Stage]) -> None:
    """The tools stay in the prompt, so that the conversation goes on; a call is then a text."""
    code = f"""{RAW}
tool = {{"type": "function", "function": {{"name": "f", "parameters": {{"type": "object"}}}}}}
first = say(user("Go."), tools=[tool], tool_choice="none")
second = say(user("Go."), first, user("?"), tools=[tool])
print(float("tool_calls" not in first and "f" in first["content"] and "tool_calls" in second))
"""
    (one,) = stage(code, ['<tool_call>{"name": "f"}</tool_call>'], {}).play().completions
    assert (one.reward, one.calls, one.turns, one.begin_T.any()) == (1.0, 1, 2, False)


def test_thoughts_are_apart_and_text_after_a_stop_is_left_out(stage: Callable[..., Stage]) -> None:
    code = f"""{RAW}
message = say(user("Go."), stop="STOP")
print(float(message == {{"role": "assistant", "content": "So. ", "reasoning_content": "Hm."}}))
"""
    (one,) = stage(code, ["<think>Hm.</think>So. STOPPED"], {}).play().completions
    assert one.reward == 1.0


def test_limits_of_the_run_end_a_conversation(stage: Callable[..., Stage]) -> None:
    """A program that handles the refusal gives its own reward; one that gives none gets 0."""
    minds = f"{RAW}\nsaid = [user('Go.')]\nwhile True:\n    said += [say(*said), said[0]]"
    lines = ["abc"]
    (one,) = stage(minds, lines, {}, max_turns=3).play().completions
    assert (one.finish_reason, one.turns, one.reward) == ("turns", 3, 0.0)
    (one,) = stage(minds, lines, {}).play(max_tokens=2).completions
    assert (one.finish_reason, one.turns, one.reward) == ("length", 1, 0.0)
    silent = minds.replace("while True:\n", "while True:\n  try:\n") + "\n  except OSError: break"
    (one,) = stage(silent, lines, {}).play(max_tokens=50).completions
    assert (one.finish_reason, one.turns, one.reward) == ("length", 2, 0.0)
    copes = f"import atexit; atexit.register(print, 2.5, flush=True)\n{silent}"
    (one,) = stage(copes, lines, {}).play(max_tokens=50).completions
    assert (one.finish_reason, one.turns, one.reward) == ("length", 2, 2.5)


def test_versions_are_of_the_first_and_the_last_turn(stage: Callable[..., Stage]) -> None:
    made = stage(f"{RAW}\nsay(user('Go.'), say(user('Go.')), user('?'))\nprint(1)", ["a"], {})
    made.renew_weights_each_turn()
    assert made.play().versions.tolist() == [[1, 2]]


# --- What costs an episode ---

BAD = {
    "asks for nothing": ("print(1)", "my_agent.py ended with status 0 before its first valid request$"),
    "is killed": ("ask(user('Go.')); os.kill(os.getpid(), 9)", "SIGKILL and no reward: its last line was ''"),
    "dies": ("ask(user('Go.')); raise SystemExit('I give up')", "status 1 and no reward: I give up"),
    "cannot start": ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
    "hangs": ("ask(user('Go.')); time.sleep(60)", "took more than step_seconds"),
    "hangs at once": ("time.sleep(60)", "took more than step_seconds"),
    "floods": (
        "ask(user('Go.'))\nwhile True: print('x' * 1000)",
        "SIGXFSZ and no reward: it wrote more than 16 MiB of output$",
    ),
    "eats memory": ("ask(user('Go.')); b'x' * (1 << 40)", "MemoryError"),
    "says no number": ("ask(user('Go.')); print('well')", "status 0 and no reward: its last line was 'well'"),
    "takes another way": ("ask(user('Go.'), temperature=0.5)", "status 1"),
    "has another beginning": (
        "ask(user(f'Go. {os.getpid()}')); print(1)",
        "differs from that of earlier episodes .* send it alone",
    ),
    "has a wrong key": ("ask(user('Go.'), key='x')", "401"),
    "uses OpenAI's other API": (
        "import openai; openai.OpenAI().responses.create(model='policy', input='Go.')",
        "404 - there are only chat/completions and models",
    ),
}


@pytest.mark.parametrize("how", BAD)
def test_a_program_that_fails_costs_its_episode(
    stage: Callable[..., Stage], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    code, reason = BAD[how]
    good = "if row.get('good'): ask(user('Go.')); print(1); sys.exit()"
    made = stage(
        f"{RAW}\n{good}\n{code}", ["So."], {}, {"good": 1}, step_seconds=1.5 if "hangs" in how else 30
    )
    group = made.play(n=2)
    rewards = made.task.rewards(group.request.prompt, group.completions)
    assert np.isnan(rewards).sum() == (1 if how == "has another beginning" else 2)  # the second to begin
    errors = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert any(re.search(reason, error) for error in errors), errors
    assert "the program of train prompt 0 failed in turn" in caplog.text
    assert re.search(reason, group.completions[-1].fault) or how == "has another beginning"
    assert made.play(prompt=1).completions[0].reward == 1.0


def test_what_a_program_leaves_running_ends_with_it(stage: Callable[..., Stage]) -> None:
    code = (
        "import subprocess\nfor _ in range(5): subprocess.Popen(['sleep', '100'])\nask(user('Go.')); print(1)"
    )
    made = stage(f"{RAW}\n{code}", ["So."], {})
    assert made.play().completions[0].reward == 1.0
    assert gone(made)


def test_training_programs_end_with_the_last_weights(stage: Callable[..., Stage]) -> None:
    made = stage(f"{RAW}\nfor n in range(10_000): ask(user(f'More: {{n}}'))", ["Yes."], {}, max_turns=10_000)
    made.submit(n=2)
    while not made.script.requests:
        made.generator.step()
    made.load(version=1, final=True)
    assert made.drain() == []
    assert gone(made)


def test_a_program_that_still_runs_ends_with_the_engine(stage: Callable[..., Stage]) -> None:
    """``stage`` closes the engine, and waits until no process of the program is left."""
    made = stage(f"{RAW}\nask(user('Go.')); time.sleep(100)", ["So."], {})
    made.submit()
    deadline = time.monotonic() + 60
    while not programs(made):
        assert time.monotonic() < deadline, "no program starts"
        made.generator.step()


def test_a_reward_of_ones_own_takes_the_place_of_the_output(
    stage: Callable[..., Stage], tmp_path: Path
) -> None:
    (tmp_path / "my_size.py").write_text("def size(completion, prompt): return len(completion) + len(prompt)")
    made = stage(WRITER, ["the end", "then"], {}, reward="my_size:size")
    group = made.play()
    assert made.task.rewards(group.request.prompt, group.completions) == [7.0]
    assert group.completions[0].reward is None


def test_in_evaluations_a_program_may_state_how_training_samples(stage: Callable[..., Stage]) -> None:
    made = stage(f"{RAW}\nask(user('Go.'), temperature=0.5); print(1)", ["So."], {})
    made.generator.submit(Request(made.task.prompts("test")[0], 0, 1, Sampling(0.0, 1.0, 100), "test"))
    assert made.finish(1)[0].completions[0].reward == 1.0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"seed": 1}, "seed is not supported: leave it out"),
        ({"response_format": {"type": "text"}}, "response_format is not supported: leave it out"),
        ({"logprobs": True}, "logprobs must be False: change it, or leave it out"),
        ({"n": 2}, "n must be 1: change it, or leave it out"),
        ({"tool_choice": "required"}, "tool_choice must be 'auto' or 'none': change it, or leave it out"),
        ({"frequency_penalty": 0.5}, "frequency_penalty must be 0: change it, or leave it out"),
        ({"temperature": 0.5}, "temperature=0.5, but the run samples with 1: leave it out"),
    ],
)
def test_a_refusal_names_the_parameter_and_the_remedy(more: dict[str, object], sentence: str) -> None:
    request = Request(Prompt(0, np.ones(1, np.int32), ""), 0, 1, Sampling(1.0, 1.0, 100))
    body = {"messages": [{"role": "user", "content": "Go."}], **more}
    with pytest.raises(RefusedError, match=f"^{re.escape(sentence)}$"):
        ChatRequest.of(json.dumps(body).encode(), request)


def test_what_cannot_be_an_agent_is_refused(stage: Callable[..., Stage]) -> None:
    with pytest.raises(ConfigError, match=r"task\.options\.command: there is no file other\.py"):
        stage("", [], {}, command=["python", "other.py"])
    with pytest.raises(ConfigError, match=r"task\.options\.command has the value \[\], but "):
        stage("", [], {}, command=[])
    with pytest.raises(ConfigError, match="rewrites or drops earlier text"):
        stage("", [], {}, template=REWRITING["drops answers"])


# --- Strangers ---


def test_a_stranger_gets_nothing_and_costs_nothing(stage: Callable[..., Stage]) -> None:
    made = stage(f"{RAW}\nask(user('Go.')); print(1)", ["So."], {})
    port = int(made.task.endpoint.url.split(":")[2].split("/")[0])
    for head in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x" * 100}):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
            caller = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            caller.request(method, path, b"{" * 10_000 if method == "POST" else None, head)
            response = caller.getresponse()
            assert response.status == 401 and b"no open episode has this key" in response.read()
            caller.close()
    assert made.play().completions[0].reward == 1.0


def test_a_request_is_bounded_and_must_be_one(stage: Callable[..., Stage]) -> None:
    code = f"""{RAW}
import urllib.error
part = {{"role": "user", "content": [{{"type": "image_url"}}]}}
for more in ({{"messages": []}}, {{"messages": [1]}}, {{"messages": [user(3)]}}, {{"messages": [part]}},
             {{"n": 2}}, {{"max_tokens": -1}}, {{"stop": [""]}}, {{"tools": 3}}, {{"logprobs": True}},
             {{"x": "y" * {LARGEST_BODY}}}):
    try:
        ask(user("Go."), **more)
    except urllib.error.HTTPError as error:
        assert error.code == (413 if "x" in more else 400), (more, error.code, error.read())
        continue
    raise SystemExit(str(more))
ask(user("Go."))
print(1)
"""
    (one,) = stage(code, ["So."], {}).play().completions
    assert one.reward == 1.0


@pytest.mark.root("another user's connection")
def test_another_users_connection_is_closed_unread(stage: Callable[..., Stage]) -> None:
    made = stage(f"{RAW}\nask(user('Go.')); print(1)", ["So."], {})
    port = int(made.task.endpoint.url.split(":")[2].split("/")[0])
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        taken = 0
        for _ in range(1000):
            with suppress(OSError):
                caller = socket.socket()
                caller.settimeout(10)
                caller.connect(("127.0.0.1", port))
                caller.send(b"GET / HTTP/1.1\r\n\r\n")
                taken += len(caller.recv(100)) > 0
        os._exit(min(taken, 100))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert made.play().completions[0].reward == 1.0


def test_the_owner_of_a_connection_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        connection, _ = server.accept()
        assert owner(connection) == os.getuid()
        connection.close()


# --- An agent framework ---


@needs_smolagents
def test_an_agent_of_smolagents_is_trained_on_what_was_sampled_for_it(stage: Callable[..., Stage]) -> None:
    """It rewrites its history, so its second request begins a second sequence, with the tool's result."""
    code = """
import json, os, sys
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

@tool
def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: One of them.
        b: The other.
    '''
    return a + b

row = json.loads(sys.stdin.readline())
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
model = OpenAIModel("policy", api_base=url, api_key=key, tool_choice="auto")
agent = ToolCallingAgent([add], model, max_steps=3, verbosity_level=LogLevel.OFF)
print(float(agent.run(row["prompt"]) == row["answer"]))
"""
    calls = [
        '<tool_call>{"name": "add", "arguments": {"a": 23, "b": 19}}</tool_call>',
        '<tool_call>{"name": "final_answer", "arguments": {"answer": "42"}}</tool_call>',
    ]
    row = {"prompt": "What is 23 + 19?", "answer": "42"}
    made = stage(code, calls, row, command=[str(SMOLAGENTS), "my_agent.py"], step_seconds=200.0)
    made.submit(n=2, max_tokens=20_000)
    (group,) = made.finish(1, 400)
    begin = made.tokenizer._tokenizer.decode(group.request.prompt.tokens.tolist())
    assert '"name": "add"' in begin and '"name": "final_answer"' in begin and row["prompt"] in begin
    asked = [request.prompt.tokens.tolist() for request in made.script.requests]
    for one in group.completions:
        assert (one.reward, one.finish_reason, one.turns) == (1.0, "stop", 2)
        assert (one.calls, one.failed_calls) == (2, 0)
        first, (opening, second) = sequences(made, one)
        assert [*first, second] == [(True, f"{call}<|im_end|>") for call in calls]
        assert "Observation:\n42<|im_end|>" in opening[1] and not opening[0]
        (start,) = np.flatnonzero(one.begin_T).tolist()
        assert one.last_turn is not None and one.tokens[start : -len(one.last_turn)].tolist() in asked
    assert asked.count(group.request.prompt.tokens.tolist()) == 2 and len(asked) == 4


# --- A storm ---


def test_a_storm_of_faults_loses_and_doubles_no_episode(stage: Callable[..., Stage]) -> None:
    """Every episode comes back once, set aside or with the reward of what was sampled for it."""
    code = f"""{RAW}
import random, subprocess
faults = ["none", "none", "hang", "fork", "flood", "die", "stranger"]
fault = random.Random(os.environ["OPENAI_API_KEY"]).choice(faults)
answer = say(user("Go."))
if fault == "hang": time.sleep(100)
if fault == "fork": [subprocess.Popen(["sleep", "100"]) for _ in range(10)]
if fault == "flood": [print("x" * 1000) for _ in range(100_000)]
if fault == "die": os.kill(os.getpid(), 9)
if fault == "stranger": ask(user("Go."), key="x" * 43)
ask(user("Go."), answer, user("?"))
print(len(answer["content"]))
"""
    groups, n = int(os.environ.get("TBA_STORM_GROUPS", 12)), 4
    made = stage(code, ["abc", "d"], {}, step_seconds=3.0, concurrency=8)
    prompt = made.task.prompts("train")[0]
    for id in range(groups):
        made.generator.submit(Request(prompt, id, n, Sampling(1.0, 1.0, 400)))
    found = made.finish(groups, 60 + 2 * groups)
    assert sorted(group.request.id for group in found) == list(range(groups))
    rewards = Counter(str(one.reward) for group in found for one in group.completions)
    assert rewards.keys() == {"3.0", "nan"} and rewards.total() == groups * n
    assert made.generator.in_flight == 0 and not made.task.endpoint.sessions


"""Nothing else is in flight, and no key is accepted any more."""
