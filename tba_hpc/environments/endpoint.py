"""A searcher's HTTP server, through which programs call its policy like OpenAI's API.

It listens only on the loopback interface. Connections from other users of the machine are closed unread, so
that they take no file descriptors. A request without the key of an open episode gets status 401.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tba_hpc.environments.protocol import MODEL, ChatRequest, RefusedError, streamed
from tba_hpc.run.listeners import owner

if TYPE_CHECKING:
    from tba_hpc.environments.agent import ProgramSession

LARGEST_BODY = 16 << 20
"""Largest size of a request, in bytes."""

OPEN_FILES = 1 << 16
"""Number of files that a searcher may have open; each running program takes three of them."""

CLOSE_SECONDS = 5.0
"""Longest wait for the server to end, in seconds."""


class OwnListener(socket.socket):
    """Listening socket that closes connections of other users unread."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection of this user.

        Raises ConnectionAbortedError, which asyncio ignores, for a connection of another user.
        """
        connection, address = super().accept()
        with suppress(OSError):  # perhaps no descriptor is free
            if owner(connection) in (None, os.getuid()):
                return connection, address
        connection.close()
        raise ConnectionAbortedError


class Endpoint:
    """HTTP server in a separate thread.

    url: its address, for OPENAI_BASE_URL. sessions: sessions of the open episodes, by API key.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, ProgramSession] = {}
        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(most, OPEN_FILES)), most))
        listener = OwnListener()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._loop = asyncio.new_event_loop()
        options = {"sock": listener, "loop": self._loop, "handle_signals": False, "shutdown_timeout": 1.0}
        options |= {"access_log": None, "print": None}
        self._thread = threading.Thread(
            target=web.run_app, args=(app,), kwargs=options, daemon=True, name="endpoint"
        )
        self._thread.start()

    def close(self) -> None:
        """End all sessions and the server."""
        for session in list(self.sessions.values()):
            session.end()
        self._loop.call_soon_threadsafe(_leave)
        self._thread.join(CLOSE_SECONDS)

    async def _answer(self, request: web.Request) -> web.Response:
        """Answer any request. A request that is refused gets an error in OpenAI's format."""
        try:
            return await self._accepted(request)
        except RefusedError as error:
            status, why = 400, str(error)
        except web.HTTPException as error:
            status, why = error.status, str(error.text)
        fault = {"message": why, "type": "invalid_request_error", "param": None, "code": None}
        return web.json_response({"error": fault}, status=status)

    async def _accepted(self, request: web.Request) -> web.Response:
        session = self.sessions.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if session is None:
            raise web.HTTPUnauthorized(text="no open episode has this key")
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [MODEL]})
        if request.path != "/v1/chat/completions":
            raise web.HTTPNotFound(text="there are only chat/completions and models")
        async with session.one_at_a_time:
            asked = ChatRequest.of(await request.read(), session.request)
            answer = await session.ask(asked)
        if asked.stream:
            text = streamed(answer, usage=asked.stream_options.get("include_usage", False))
            return web.Response(text=text, content_type="text/event-stream")
        return web.json_response(answer)


def _leave() -> None:
    raise web.GracefulExit
