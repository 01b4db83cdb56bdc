"""Runs an environment of verifiers in a separate Python, which need not have tba_hpc; see ``verifiers.py``.

    PYTHON -P verifiers_host.py CONFIG TASKS

It prints the first TASKS tasks, then runs the tasks that it receives. Each line is JSON with the id of a
rollout. Input lines contain ``task`` (begin), ``say`` (a turn of the model), ``cut`` (there are no more
turns), or nothing else (end the rollout). Output lines contain ``ask`` (a request), ``end`` (the reward) or
``error``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from verifiers.v1.clients import Client, ModelContext, TrainClientConfig
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.errors import ProviderError
from verifiers.v1.interception import server
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.trace import Trace
from verifiers.v1.types import AssistantMessage, Response, ToolCall
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

MODEL = "policy"
CONTEXT = ModelContext(model=MODEL, client=TrainClientConfig(base_url="none", api_key_var="NONE"))
"""Placeholder for the model; the Host answers its requests."""


class Host(Client):
    """Client that answers the model requests of all rollouts with turns from the searcher's rank."""

    def __init__(self, config: dict[str, Any], out: int) -> None:
        found = resolve_env_config(config)
        for role in agent_config_fields(found).values():
            if "runtime" not in role.model_fields_set:
                role.runtime = SubprocessConfig()
        self.env = load_environment(found)
        self._out = out
        self._rollouts: dict[int, asyncio.Task[None]] = {}
        self._traces: dict[str, tuple[int, Trace]] = {}
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    def send(self, **line: Any) -> None:
        """Write a line to the output."""
        os.write(self._out, f"{json.dumps(line)}\n".encode())

    async def serve(self) -> None:
        """Carry out each line of the input, until the input ends."""
        async with self.env.serving():
            while line := await asyncio.to_thread(sys.stdin.readline):
                self._execute(**json.loads(line))
            for rollout in self._rollouts.values():
                rollout.cancel()

    def _execute(self, id: int, **order: Any) -> None:
        if "task" in order:
            self._rollouts[id] = asyncio.create_task(self._play(id, order["task"]))
        elif order and id in self._answers:
            self._answers.pop(id).set_result(order)
        elif id in self._rollouts:
            self._rollouts[id].cancel()

    async def _play(self, id: int, data: dict[str, Any]) -> None:
        def minted(trace: Trace) -> None:
            self._traces[trace.id] = id, trace

        kind = type(self.env.taskset).task_type()
        try:
            task = kind(kind.data_type().model_validate(data), self.env.config.taskset.task)
            (slot,) = self.env.slots(task)
            episode = await self.env.run_slot(slot, CONTEXT, on_trace=minted)
            errors = [error.message for one in (episode, *episode.traces) for error in one.errors]
            if episode.ok and len(episode.traces) == 1:
                self.send(id=id, end=episode.traces[0].reward)
            else:
                self.send(id=id, error=[*errors, "it has several agents, but only one can be trained"][0])
        except Exception as error:
            self.send(id=id, error=repr(error))
        finally:
            self._rollouts.pop(id)
            self._answers.pop(id, None)
            self._traces = {name: one for name, one in self._traces.items() if one[0] != id}

    async def get_response(
        self, dialect: Any, body: dict[str, Any], sampling: Any, session_id: str = "", *_: Any, **__: Any
    ) -> Response:
        """Return the model's next turn in a rollout; verifiers calls this in place of a client of its own.

        session_id: id of the rollout's trace. body: the request, with ``messages`` and ``tools``. Other
        arguments are ignored.

        Raises ProviderError if there are no more turns.
        """
        id, trace = self._traces[session_id]
        asked = self._answers[id] = asyncio.get_running_loop().create_future()
        self.send(id=id, ask={"messages": body["messages"], "tools": body.get("tools") or []})
        answer = await asked
        if "cut" in answer:
            trace.stop("cut_off")  # lets verifiers score the rollout
            raise ProviderError("this is the maximum context length", status_code=400)
        said = answer["say"]
        calls = [ToolCall(id=f"{trace.num_turns}-{n}", **call) for n, call in enumerate(said.pop("calls"))]
        message = AssistantMessage(tool_calls=calls or None, **said)
        finish = "tool_calls" if calls else "stop"
        response = Response(id=trace.id, created=0, model=MODEL, message=message, finish_reason=finish)
        response.raw = serialize_completion(response, MODEL)
        return response


if __name__ == "__main__":
    own = os.dup(1)
    os.dup2(2, 1)  # an environment's prints must not be read as answers
    host = Host(json.loads(sys.argv[1]), own)
    server.resolve_client = lambda _: host
    first = host.env.taskset.take(int(sys.argv[2]))
    host.send(id=0, tasks=[task.data.model_dump(mode="json") for task in first])
    asyncio.run(host.serve())
