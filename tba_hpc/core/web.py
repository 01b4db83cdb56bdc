"""Requests over HTTP, by httpx, to addresses that may hold secrets."""

from __future__ import annotations

import functools
import logging
import ssl

import httpx

logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs addresses


def client() -> httpx.AsyncClient:
    """Return a client without timeouts, for callers with a deadline of their own.

    It trusts the system's certificates, and follows no redirections. A proxy that the environment names is
    used for https alone, because it could read plain http.
    """
    direct = {"http://": httpx.AsyncHTTPTransport()}
    return httpx.AsyncClient(verify=_system(), mounts=direct, timeout=None)


@functools.cache
def _system() -> ssl.SSLContext:
    return ssl.create_default_context()
