"""A hub of models and data sets on this machine, for the libraries that speak to Hugging Face's.

As much of its HTTP interface as they need to list a repository and to load its files, over plain HTTP.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34

Repository = Mapping[str, bytes]
"""Contents by path."""


@contextmanager
def hub(repositories: Mapping[str, Repository]) -> Iterator[tuple[str, list[str]]]:
    """Serve repositories, by ``models/org/name`` or ``datasets/org/name``.

    Its address, and the paths that were loaded since.
    """
    loaded: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(body=True, asked=asked)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, body: bool, asked: bytes = b"") -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            api, parts = parts[0] == "api", parts[parts[0] == "api" :]
            kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
            name, rest = "/".join(parts[:2]), parts[2:]
            files = repositories.get(f"{kind}/{name}")
            if files is None:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if not api:
                return self._file(files, "/".join(rest[2:]), body)
            if rest[:1] == ["tree"]:
                below = "/".join(rest[2:])
                listed = [_entry(path, data) for path, data in files.items() if path.startswith(below)]
                return self._json(listed)
            if rest[:1] == ["paths-info"]:
                wanted = [path for path in files if path in unquote(asked.decode())]
                return self._json([_entry(path, files[path]) for path in wanted])
            siblings = [{"rfilename": path} for path in files]
            return self._json({"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})

        def _file(self, files: Repository, path: str, body: bool) -> None:
            if path not in files:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            if body:
                loaded.append(path)
            headers = {"ETag": f'"{_oid(files[path])}"', "X-Repo-Commit": COMMIT}
            return self._send(200, files[path], headers, body=body)

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, code: int, data: bytes, headers: Mapping[str, str], *, body: bool = True) -> None:
            self.send_response(code)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body and self.command != "HEAD":
                self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", loaded
        finally:
            server.shutdown()


def _entry(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": _oid(data)}


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
