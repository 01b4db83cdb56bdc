"""Environments of verifiers (github.com/PrimeIntellect-ai/verifiers), whose model is the searcher's policy.

    class Sums(Rollout):
        python = "/project/verifiers/bin/python"    # of a virtual environment with verifiers
        env = {"taskset": {"id": "gsm8k-v1"}, "agent": {"harness": {"id": "null"}}}

Rollouts run unchanged in a process of that Python (``verifiers_host.py``). When a rollout calls its model,
the searcher's policy samples the next turn of the conversation. ``python -m tba_hpc.environments.verifiers
module:Sums N`` prints the JSONL rows of the first N tasks, for task.train_file. Each row has the messages and
tools with which its rollout begins.
"""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from tba_hpc.config import ConfigError
from tba_hpc.core.own_code import find_function
from tba_hpc.core.ports import Message
from tba_hpc.environments.chat import Call, parse_calls

PROGRAM = Path(__file__).with_name("verifiers_host.py")

Line = dict[str, Any]


class Host:
    """Connection to the process of verifiers, which the constructor starts.

    The constructor waits until the process has listed tasks. It raises ConfigError if the process ends first.

    python, env: see ``Rollout``. count: number of tasks to list. tasks: data of each of these tasks.
    """

    def __init__(self, python: str, env: Mapping[str, Any], count: int = 0) -> None:
        words = [python, "-P", str(PROGRAM), json.dumps(env), str(count)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answers: dict[int, queue.SimpleQueue[Line]] = defaultdict(queue.SimpleQueue)
        self.ids = itertools.count(1)
        threading.Thread(target=self._listen, daemon=True, name="verifiers").start()
        self.tasks: list[Line] = self.ask(0)["tasks"]

    def send(self, id: int, **order: Any) -> None:
        """Send a rollout an order: a line for ``verifiers_host``. An empty order ends the rollout."""
        assert self._process.stdin
        with suppress(BrokenPipeError):  # whoever waits for an answer reports it
            self._process.stdin.write(f"{json.dumps({'id': id, **order})}\n".encode())
            self._process.stdin.flush()

    def ask(self, id: int, **order: Any) -> Line:
        """Send an order (see ``send``), and wait for the answer: the rollout's next request, or its result.

        Raises ConfigError if the process of verifiers ends.
        """
        self.send(id, **order)
        while self._process.poll() is None or not self._answers[id].empty():
            with suppress(queue.Empty):
                line = self._answers[id].get(timeout=1)
                if "ask" not in line:
                    del self._answers[id]
                return line
        raise ConfigError(
            f"the process of a verifiers environment ended with status {self._process.returncode}, after "
            "the output above: its Python needs 'pip install verifiers==0.4.0 uv' and the taskset's package"
        )

    def _listen(self) -> None:
        assert self._process.stdout
        for text in self._process.stdout:
            line = json.loads(text)
            self._answers[line["id"]].put(line)


class Rollout:
    """Environment whose ``reset`` begins a rollout, and whose ``step`` sends it the model's turns.

    python: path of a Python interpreter that has verifiers installed. env: verifiers' configuration of an
    environment.
    """

    python: ClassVar[str] = sys.executable
    env: ClassVar[Mapping[str, Any]] = {}
    _host: ClassVar[Host]

    @classmethod
    def prepare(cls) -> None:
        """Start the process of verifiers."""
        cls._host = Host(cls.python, cls.env)

    def reset(self, prompt: list[Message], task: Line, tools: Sequence[Line] = ()) -> None:
        """Begin the rollout of a row. Raises ValueError if its first request is not the one in the row.

        The arguments are the row's fields, as the function ``row`` made them. prompt, tools: messages and
        tools of the rollout's first request to its model. task: data of verifiers' task.
        """
        self._id = next(self._host.ids)
        self._known: list[Message] = []
        self._reward: float | None = None
        if self._ask(task=task) != prompt or self._tools != list(tools):
            raise ValueError("the rollout begins differently from its row: write the rows again")

    def step(self, messages: Sequence[Message]) -> tuple[list[Message], bool, float]:
        """Send the model's turn, the last of ``messages``, to the rollout, and wait for what follows.

        Returns the messages that follow, whether the rollout has ended, and 0, because ``get_reward`` returns
        the reward.
        """
        thought, _, said = str(messages[-1]["content"]).rpartition("</think>")
        calls = [call for call in parse_calls(said) if isinstance(call, Call)]
        wire = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
        following = self._ask(
            say={"content": said, "reasoning_content": thought.removeprefix("<think>") or None, "calls": wire}
        )
        return following[1:], self._reward is not None, 0.0

    def get_reward(self) -> float:
        """Return the rollout's reward.

        A rollout that has not ended is first told that its context is full.
        """
        if self._reward is None:
            self._ask(cut=True)
        assert self._reward is not None
        return self._reward

    def _ask(self, **order: Any) -> list[Message]:
        """Send an order; return the messages that the next request adds, or [] if the rollout has ended.

        Stores the reward of a rollout that has ended. Raises RuntimeError if the rollout fails, or ValueError
        if it rewrites the conversation.
        """
        line = self._host.ask(self._id, **order)
        if "error" in line:
            raise RuntimeError(line["error"])
        if "end" in line:
            self._reward = float(line["end"])
            return []
        known, self._known, self._tools = self._known, line["ask"]["messages"], line["ask"]["tools"]
        added = self._known[len(known) :]
        said = order["say"]["content"] if "say" in order else None
        if self._known[: len(known)] != known or said not in (None, added[0].get("content", said)):
            raise ValueError(
                "the rollout rewrites the conversation, but training needs one that only grows: use a "
                "harness that only appends messages"
            )
        return added

    def __del__(self) -> None:
        if getattr(self, "_reward", 0.0) is None:
            self._host.send(self._id)


def row(host: Host, task: Line) -> Line:
    """Return the row of a task, with the messages and tools with which its rollout begins."""
    line = host.ask(id := next(host.ids), task=task)
    host.send(id)
    if "ask" not in line:
        raise ConfigError(f"task {task['idx']} sends its model no request: {line.get('error', 'it ends')}")
    return {"prompt": line["ask"]["messages"], "tools": line["ask"]["tools"], "task": task}


if __name__ == "__main__":
    kind: Any = find_function("environment", sys.argv[1])
    host = Host(kind.python, kind.env, int(sys.argv[2]))
    with ThreadPoolExecutor(8) as pool:
        for one in pool.map(lambda task: row(host, task), host.tasks):
            print(json.dumps(one))
