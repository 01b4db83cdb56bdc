"""HTTP client for addresses that may contain secrets, such as the address of a chat's webhook."""

from __future__ import annotations

import functools
import logging
import ssl

import httpx

logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs whole addresses


def client() -> httpx.AsyncClient:
    """Return a client without timeouts, for callers that set their own deadline.

    It trusts the system's certificates, and follows no redirects. A proxy that environment variables name is
    used only for https, because it could read plain http.
    """
    direct = {"http://": httpx.AsyncHTTPTransport()}
    return httpx.AsyncClient(verify=_system(), mounts=direct, timeout=None)


@functools.cache
def _system() -> ssl.SSLContext:
    return ssl.create_default_context()
