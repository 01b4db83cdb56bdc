"""A taskset of verifiers: its rollouts in a Python of its own, their turns by a policy that plays a script.

They run in a harness of their own, since verifiers' programs are built by uv from packages of the network.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conversing import Script, make_tokenizer

from tba_hpc.config import ConfigError, TaskSection
from tba_hpc.core.ports import Generator
from tba_hpc.core.types import Completion, Request, Sampling
from tba_hpc.environments.task import Environment
from tba_hpc.environments.verifiers import Host
from tba_hpc.tasks import load_task

PYTHON = Path(__file__).parents[1] / ".cache/verifiers/bin/python"

needs_verifiers = pytest.mark.skipif(
    not PYTHON.is_file(),
    reason="no verifiers: python -m venv .cache/verifiers; .cache/verifiers/bin/pip install verifiers==0.4.0",
)

TASKSET = """
import json
import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["SumsTaskset", "Loop"]

ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        print("noise")
        return float(trace.last_reply == self.data.answer)

class SumsTaskset(vf.Taskset[Sum, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for n in range(1, 100):
            prompt = {1: "rewrites", 2: "raises"}.get(n, f"{n}+{n}")
            yield Sum(Data(prompt=prompt, system_prompt="Add.", answer=str(2 * n)), self.config.task)

class Loop(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        tools = [{"type": "function", "function": ADD}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while True:
                done = await client.chat.completions.create(model=ctx.model, messages=messages, tools=tools)
                said = done.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                for call in said.tool_calls or []:
                    total = 2 * json.loads(call.function.arguments)["a"]
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"sum: {total}"})
                if prompt == "rewrites":
                    messages[0]["content"] = "Subtract."
                elif prompt == "raises":
                    raise OSError("no more")
                elif not said.tool_calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
"""
OWN = f"""
from tba_hpc.environments.verifiers import Rollout

class Sums(Rollout):
    python = {str(PYTHON)!r}
    env = {{"taskset": {{"id": "sums-v1"}}}}
"""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the taskset, a class for it, and rows of its first tasks."""
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "sums_v1.py").write_text(TASKSET)
    (folder / "own_sums.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.syspath_prepend(folder)
        words = [sys.executable, "-m", "tba_hpc.environments.verifiers", "own_sums:Sums", "6"]
        (folder / "rows.jsonl").write_bytes(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
        yield folder


@pytest.fixture(scope="module")
def task(own: Path) -> Environment:
    section = TaskSection.model_validate(
        {
            "name": "environment",
            "train_file": str(own / "rows.jsonl"),
            "options": {"environment": "own_sums:Sums", "validation_prompts": 1, "max_turns": 3},
        }
    )
    made = load_task(section, make_tokenizer("hermes"), lambda *_: None, room=4000)
    assert isinstance(made, Environment)
    return made


@pytest.fixture(scope="module")
def play(task: Environment) -> Callable[..., Completion]:
    """A conversation of a task in which the policy says these lines, the last one for ever."""
    tokenizer, left = make_tokenizer("hermes"), list[str]()

    def say(_: np.ndarray) -> np.ndarray:
        line = left.pop(0) if len(left) > 1 else left[0]
        return np.append(tokenizer.encode(line), tokenizer.eos_token_id)

    generator: Generator = task.converse(Script(say), tokenizer)

    def played(number: int, *lines: str, max_tokens: int = 400) -> Completion:
        left[:] = lines
        prompt = next(one for one in task.prompts("train") if task.row(one)["task"]["idx"] == number)
        generator.submit(Request(prompt, 0, 1, Sampling(1.0, 1.0, max_tokens)))
        deadline = time.monotonic() + 60
        while not (groups := generator.step()):
            assert time.monotonic() < deadline, "the conversation does not end"
        return groups[0].completions[0]

    return played


@needs_verifiers
def test_rows_hold_what_a_rollout_begins_with(own: Path, task: Environment) -> None:
    first = json.loads((own / "rows.jsonl").read_text().splitlines()[2])
    assert first["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+3"}]
    text = make_tokenizer("hermes").decode(task.prompts("train")[2].tokens)
    assert '"name": "add"' in text and text.endswith("user\n3+3\nassistant\n")


@needs_verifiers
def test_a_rollout_goes_through_the_searchers_turns_token_by_token(
    task: Environment, play: Callable[..., Completion]
) -> None:
    tokenizer, lines = make_tokenizer("hermes"), (f"th{CALL}", "<think>6?</think>6")
    one = play(2, *lines)
    assert (one.reward, one.finish_reason, one.turns) == (1.0, "stop", 2)
    breaks = np.flatnonzero(np.diff(one.action_T)) + 1
    first, between, last = np.split(one.tokens, breaks)
    for line, said in zip(lines, (first, last), strict=True):
        np.testing.assert_array_equal(said, [*tokenizer.encode(line), tokenizer.eos_token_id])
    assert "<tool_response>\nsum: 6\n</tool_response>" in tokenizer.decode(between)
    assert play(2, "7").reward == 0.0


@needs_verifiers
@pytest.mark.parametrize(
    ("line", "max_tokens", "finish"),
    [(CALL, 400, "turns"), (CALL, 20, "length"), (f"{CALL} 6", 400, "turns")],
)
def test_a_rollout_that_is_cut_off_is_scored_as_it_is(
    play: Callable[..., Completion], line: str, max_tokens: int, finish: str
) -> None:
    one = play(2, line, max_tokens=max_tokens)
    assert (one.reward, one.finish_reason) == (0.0, finish)


@needs_verifiers
@pytest.mark.parametrize(
    ("number", "sentence"), [(0, "the rollout rewrites the conversation"), (1, "OSError: no more")]
)
def test_a_rollout_that_cannot_be_trained_on_is_set_aside(
    play: Callable[..., Completion], caplog: pytest.LogCaptureFixture, number: int, sentence: str
) -> None:
    assert np.isnan(play(number, CALL).reward)
    assert sentence in caplog.text


@needs_verifiers
def test_a_row_whose_task_is_none_is_told_so(play: Callable[..., Completion]) -> None:
    import own_sums

    host = own_sums.Sums._host
    assert "Field required" in host.ask(next(host.ids), task={})["error"]


def test_a_python_without_verifiers_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"ended with status 1, .* 'pip install verifiers"):
        Host(sys.executable, {"taskset": {"id": "sums-v1"}})
    assert "No module named 'verifiers'" in capfd.readouterr().err
