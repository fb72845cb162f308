"""The server of `tune --live`: only this machine, only with the token, only to read."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tunedgemm_report.liveserver import LiveServer, Resource

TOKEN = "a-token_of-24-bytes"
PAGE = Resource(b"<p>page</p>", "text/html; charset=utf-8", '"1"')


@pytest.fixture
def server() -> Iterator[LiveServer]:
    """Return a server that knows one page, and echoes a query."""
    serving = LiveServer(0, TOKEN, lambda name, query: {"": PAGE, "echo": Resource(repr(query).encode(), "text/plain")}.get(name))
    serving.start()
    yield serving
    serving.stop()


def answer(server: LiveServer, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    """Send one request, and return its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    return connection.getresponse()


def raw(server: LiveServer, text: bytes) -> bytes:
    """Send bytes, and return the first line of the answer."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall(text)
        return connection.makefile("rb").readline()


def test_the_page_needs_the_token(server):
    """Answer 200 with the token, and 403 without it, with a part of it or with more."""
    good = answer(server, f"/{TOKEN}/")
    assert (good.status, good.read(), good.headers["Content-Type"]) == (200, PAGE.content, PAGE.kind)

    for path in ("/", "//", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/", "/state.json", "/%61-token_of-24-bytes/", f"http://127.0.0.1/{TOKEN}/"):
        refused = answer(server, path)
        assert (refused.status, PAGE.content in refused.read()) == (403, False), path
    assert b" 403 " in raw(server, b"GET /\xff\xfe/ HTTP/1.0\r\nHost: localhost\r\n\r\n")


def test_other_hosts_are_refused(server):
    """Answer 403 to a Host that is not this machine, as after DNS rebinding, even with the token."""
    port = server.server_port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "0.0.0.0", "localhost:1", ""):
        assert answer(server, f"/{TOKEN}/", Host=host).status == 403, host
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "LOCALHOST"):
        assert answer(server, f"/{TOKEN}/", Host=host).status == 200, host
    assert b" 403 " in raw(server, f"GET /{TOKEN}/ HTTP/1.0\r\n\r\n".encode())
    assert b" 403 " in raw(server, f"GET /{TOKEN}/ HTTP/1.0\r\nHost: localhost\r\nHost: evil.example\r\n\r\n".encode())


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_other_methods_are_refused(server, method):
    """Answer 405 to each method but GET and HEAD, which it names."""
    refused = answer(server, f"/{TOKEN}/", method)

    assert (refused.status, refused.headers["Allow"]) == (405, "GET, HEAD")


def test_no_path_leaves_the_resources(server):
    """Answer 404 to each path that no resource has, whatever file it would be."""
    for name in ("../", "../../etc/passwd", "..%2f..%2fetc/passwd", "live.py", str(Path(__file__)), "echo/"):
        assert answer(server, f"/{TOKEN}/{name}").status == 404, name
    assert answer(server, f"/{TOKEN}/echo?a=1&b=%3Cb%3E").read() == b"{'a': '1', 'b': '<b>'}"
    moved = answer(server, f"/{TOKEN}")
    assert (moved.status, moved.headers["Location"]) == (308, f"/{TOKEN}/")


def test_unchanged_content_is_not_sent_again(server):
    """Answer 304 without content to the present ETag, and HEAD without content."""
    unchanged = answer(server, f"/{TOKEN}/", **{"If-None-Match": '"1"'})
    assert (unchanged.status, unchanged.read()) == (304, b"")
    assert answer(server, f"/{TOKEN}/", **{"If-None-Match": '"0"'}).status == 200
    head = answer(server, f"/{TOKEN}/", "HEAD")
    assert (head.status, head.headers["Content-Length"], head.read()) == (200, str(len(PAGE.content)), b"")


def test_answers_give_nothing_away(server):
    """Send no version of Python, no referrer with the token, and no frame to other sites."""
    headers = answer(server, f"/{TOKEN}/").headers

    assert headers["Server"] == "tunedgemm"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers


def test_it_listens_on_this_machine_alone(server):
    """Bind 127.0.0.1, not the other addresses of the machine."""
    assert server.server_address[0] == "127.0.0.1"
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"]
    assert [address.split(":")[0] for address in listening if int(address.split(":")[1], 16) == server.server_port] == ["0100007F"]


def test_silent_clients_block_no_others(server, capfd):
    """Answer while other clients send nothing or hang up, and print nothing about them."""
    silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(10)]
    hung_up = socket.create_connection(("127.0.0.1", server.server_port))
    hung_up.sendall(f"GET /{TOKEN}/ HTTP/1.0\r\nHost: localhost\r\n".encode())
    hung_up.close()

    assert answer(server, f"/{TOKEN}/").status == 200
    for connection in silent:
        connection.close()
    assert capfd.readouterr() == ("", "")


def _drip(connections: list[socket.socket], stop: threading.Event) -> None:
    """Send a byte of a request on each connection, again and again."""
    while not stop.wait(0.2):
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(b"X")


@pytest.mark.parametrize("dripping", [False, True])
def test_slow_clients_do_not_shut_others_out(server, dripping):
    """Serve others within a second, with a bounded number of threads, however many clients are slow."""
    before = threading.active_count()
    slow = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(60)]
    stop = threading.Event()
    drip = threading.Thread(target=_drip, args=(slow if dripping else [], stop))
    drip.start()
    try:
        time.sleep(0.5)
        assert threading.active_count() - before <= 17
        for _ in range(20):
            began = time.monotonic()
            assert answer(server, f"/{TOKEN}/").status == 200
            assert time.monotonic() - began < 1.0
    finally:
        stop.set()
        drip.join()
        for connection in slow:
            connection.close()


def test_a_client_has_a_bounded_time_for_its_request(server, monkeypatch):
    """Hang up on a client that sends a byte now and then, though each comes in time."""
    monkeypatch.setattr("tunedgemm_report.liveserver._PATIENCE", 0.5)
    stop = threading.Event()
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as slow:
        drip = threading.Thread(target=_drip, args=([slow], stop))
        drip.start()
        try:
            assert b"HTTP" not in slow.recv(100)
        except ConnectionResetError:
            pass
        finally:
            stop.set()
            drip.join()


def test_stopping_frees_the_port():
    """Refuse connections after the stop, and let another server have the port at once."""
    first = LiveServer(0, TOKEN, lambda *_: PAGE)
    first.start()
    assert answer(first, f"/{TOKEN}/").status == 200
    first.stop()

    with pytest.raises(ConnectionRefusedError):
        answer(first, f"/{TOKEN}/")
    second = LiveServer(first.server_port, TOKEN, lambda *_: PAGE)
    second.start()
    assert answer(second, f"/{TOKEN}/").status == 200
    second.stop()


def test_a_stop_waits_for_the_last_answer():
    """Send the whole of an answer that was being made when the server stopped."""
    asked = threading.Event()

    def slow(*_: object) -> Resource:
        asked.set()
        time.sleep(0.4)
        return PAGE

    server = LiveServer(0, TOKEN, slow)
    server.start()
    answers: list[int] = []
    client = threading.Thread(target=lambda: answers.append(answer(server, f"/{TOKEN}/").status))
    client.start()
    assert asked.wait(10)
    server.stop()
    client.join(10)

    assert answers == [200]
