"""A server of few read-only resources to this machine, behind a token in their address."""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs

#: Names of this machine that a request may call; others come through DNS that an attacker controls.
_HOSTS = ("127.0.0.1", "localhost")
#: Requests that are answered at once; each has a thread.
_MOST = 16
#: Seconds that a client may take to send its request, and those until one that gives way is gone.
_PATIENCE, _GIVES_WAY = 5.0, 0.5
#: Seconds that the end waits for answers.
_LAST = 1.0
_HEADERS = {
    "Cache-Control": "private, no-cache",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
}


@attrs.frozen
class Resource:
    """What a path names.

    Attributes:
        content: its bytes.
        kind: the media type.
        etag: changes with the content; "" for what is never cached.
    """

    content: bytes
    kind: str
    etag: str = ""


#: (name below the token, query) -> the resource, None for nothing
Find = Callable[[str, dict[str, str]], Resource | None]


class LiveServer(ThreadingHTTPServer):
    """Listens on 127.0.0.1 and answers in daemon threads.

    A client has a bounded time for its request. Where too many are connected, the one that has been
    longest without sending its request gives way, so that slow ones cannot shut others out.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, port: int, token: str, find: Find) -> None:
        """Bind a port, 0 for any free one; OSError if it cannot be bound."""
        self.token, self.find = token, find
        self._free = threading.BoundedSemaphore(_MOST)
        self._unheard: dict[Any, float] = {}  # connection -> its deadline, the oldest first
        self._lock = threading.Lock()
        super().__init__((_HOSTS[0], port), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="live report", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests, free the port, and wait for the answers that are being sent."""
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()
        end = time.monotonic() + _LAST
        for _ in range(_MOST):
            self._free.acquire(timeout=max(end - time.monotonic(), 0.0))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; hang up where too many answers are being sent."""
        if not self._free.acquire(blocking=False):
            self._hang_up(most=1)
            if not self._free.acquire(timeout=_GIVES_WAY):
                self.shutdown_request(request)
                return
        with self._lock:
            self._unheard[request] = time.monotonic() + _PATIENCE
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.hear(request)
            self._free.release()

    def hear(self, request: Any) -> None:
        """Note that a client has sent its request: it no longer gives way."""
        with self._lock:
            self._unheard.pop(request, None)

    def service_actions(self) -> None:
        """Hang up on clients whose time has passed; runs between two requests, and every 0.1 s."""
        self._hang_up(before=time.monotonic())

    def _hang_up(self, most: int = _MOST, before: float = math.inf) -> None:
        """End the reading of the oldest connections without a request."""
        with self._lock:
            for request, deadline in [*self._unheard.items()][:most]:
                if deadline < before:
                    del self._unheard[request]
                    with contextlib.suppress(OSError):  # the client was faster
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up; the terminal belongs to the run."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one request: the host is checked first, then the method, the token and the name."""

    server: LiveServer
    timeout = _PATIENCE

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # the standard library looks up the method's function by its name
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        self.server.hear(self.connection)
        path, _, query = self.path.partition("?")
        token, slash, name = path.removeprefix("/").partition("/")
        if not self._is_for_this_host():
            self._refuse(HTTPStatus.FORBIDDEN, "host: must be localhost or 127.0.0.1")
        elif self.command not in ("GET", "HEAD"):
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "method: only GET and HEAD", Allow="GET, HEAD")
        elif not secrets.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "token: missing or wrong; open the address that `tunedgemm tune --live` printed")
        elif not slash:
            self._refuse(HTTPStatus.PERMANENT_REDIRECT, "", Location=f"/{token}/")
        elif (resource := self.server.find(name, dict(urllib.parse.parse_qsl(query)))) is None:
            self._refuse(HTTPStatus.NOT_FOUND, "nothing here")
        else:
            self._send(resource)

    def _is_for_this_host(self) -> bool:
        given = self.headers.get_all("Host") or []
        host, _, port = (given[0] if len(given) == 1 else "").partition(":")
        return host.lower() in _HOSTS and port in ("", str(self.server.server_port))

    def _send(self, resource: Resource) -> None:
        if resource.etag and resource.etag in (self.headers.get("If-None-Match") or ""):
            self._respond(HTTPStatus.NOT_MODIFIED, {"ETag": resource.etag})
            return
        etag = {"ETag": resource.etag} if resource.etag else {}
        self._respond(HTTPStatus.OK, {"Content-Type": resource.kind, **etag}, resource.content)

    def _refuse(self, status: HTTPStatus, text: str, **headers: str) -> None:
        self._respond(status, {"Content-Type": "text/plain; charset=utf-8", **headers}, f"{text}\n".encode())

    def _respond(self, status: HTTPStatus, headers: dict[str, str], content: bytes | None = None) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name, value)
        if content is not None:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if content is not None and self.command != "HEAD":
            self.wfile.write(content)

    def version_string(self) -> str:
        """Return the name of the server, without Python's version."""
        return "tunedgemm"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal belongs to the run, and addresses have the token."""
