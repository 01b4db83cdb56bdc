"""A searcher's HTTP server, through which programs call its policy like OpenAI's API.

It listens only on the loopback interface. Connections from other users of the machine are closed unread, so
that they take no file descriptors. A request without the key of an open episode gets status 401.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from tba_hpc.environments.protocol import MODEL, Body
from tba_hpc.run.listeners import owner

if TYPE_CHECKING:
    from tba_hpc.environments.agent import ProgramSession

T = TypeVar("T")

LARGEST_BODY = 16 << 20
"""Largest size of a request, bytes."""

OPEN_FILES = 1 << 16
"""Limit on file descriptors that a searcher sets, if its own is lower and may be raised."""

CALL_SECONDS = 60.0
"""Longest wait for a call in the server's thread, s."""


class Endpoint:
    """HTTP server in a separate thread.

    url: its address, for OPENAI_BASE_URL. sessions: sessions of the open episodes, by API key.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, ProgramSession] = {}
        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = max(now, min(most, OPEN_FILES))  # a running program takes three
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, daemon=True, name="endpoint")
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the server's thread, which lives as long as the server; return its result.

        Raises TimeoutError or RuntimeError if the server is being closed.
        """

        async def called() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(CALL_SECONDS)

    def close(self) -> None:
        """End all sessions and the server."""
        for session in list(self.sessions.values()):
            session.end()
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(5)

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._serving)
        finally:
            self._loop.close()  # so that ``call`` fails instead of waiting forever

    async def _serve(self) -> None:
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        assert runner.server
        try:
            while True:
                await self._accept(runner.server)
        finally:
            self._listener.close()
            await runner.cleanup()

    async def _accept(self, server: web.Server) -> None:
        """Accept the next connection, and close it unless it is from this user."""
        connection = None
        try:
            connection, _ = await self._loop.sock_accept(self._listener)
            if owner(connection) in (None, os.getuid()):
                await self._loop.connect_accepted_socket(server, connection)
                return
        except OSError:
            await asyncio.sleep(0.1)  # perhaps no descriptor is free
        if connection:
            connection.close()

    def _session(self, request: web.Request) -> ProgramSession:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self.sessions:
            raise web.HTTPUnauthorized(text="no open episode has this key")
        return self.sessions[key]

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "tba-hpc"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError("the body is not a JSON object")
            answer = await asyncio.wrap_future(session.ask(body))
        except (ValueError, LookupError, RecursionError) as error:  # the last: charset unknown, JSON too deep
            fault = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
            return web.json_response({"error": fault}, status=400)
        return await _stream(request, body, answer) if body.get("stream") else web.json_response(answer)


async def _stream(request: web.Request, body: Body, answer: Body) -> web.StreamResponse:
    """Send an answer as a stream: the whole message in one chunk, then the usage if requested."""
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])]
    delta = {**message, "tool_calls": calls} if calls else message
    chunk = {**answer, "object": "chat.completion.chunk", "usage": None}
    chunks = [{**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]}]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**chunk, "choices": [], "usage": answer["usage"]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for line in (*map(json.dumps, chunks), "[DONE]"):
        await response.write(f"data: {line}\n\n".encode())
    return response
