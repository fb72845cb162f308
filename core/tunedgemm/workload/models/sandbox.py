"""Sandbox: child processes that describe a model offline, with limited memory and time.

A server imports transformers once and forks a process per model. That process has rlimits on
address space, CPU time and file sizes. Code of a checkpoint is never run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

import attrs

from tunedgemm.errors import UserError
from tunedgemm.workload.models.confine import Limits, beyond, confine, lift_time_limit, too_deep

#: Idle timeout of the server, in seconds.
_IDLE = 30
#: Timeout of an answer in seconds; the limit on CPU time is shorter.
_PATIENCE = 900
#: Most bytes of an answer.
_LARGEST_ANSWER = 64 << 20
#: Prefixes of variables that point transformers to hubs, caches and code.
_VARIABLES = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "KERNELS_", "LOCAL_KERNELS", "USE_HUB_KERNELS", "TORCH_HOME")
#: Variables of the server: offline, without caches, without GPUs.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HOME": os.devnull,
    "TORCH_HOME": os.devnull,
    "USE_HUB_KERNELS": "NO",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
}
#: The server's program: its arguments are a descriptor and the paths of modules.
_SERVER = """import sys
sys.path[:] = sys.argv[2:]
from tunedgemm.workload.models import architecture, sandbox
sandbox.serve(int(sys.argv[1]), architecture.describe)
"""


def ask(question: dict[str, Any], limits: Limits) -> Any:
    """Run `architecture.describe` in the sandbox and return its result.

    Raises:
        UserError: the description fails or exceeds the limits, or the process cannot be started.
    """
    try:
        request = json.dumps([question, attrs.asdict(limits)]).encode()
    except RecursionError:
        raise UserError(too_deep(question["folder"])) from None
    answer = _server(os.getpid()).ask(request)
    if "ended" in answer:
        raise UserError(_ended(question["folder"], answer["ended"], limits.seconds))
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["described"]


def stop() -> None:
    """Stop this process's server, if any; the next question starts another."""
    _server(os.getpid()).stop()


@functools.cache
def _server(_pid: int) -> _Server:
    """Return the server of a process; a forked child starts another."""
    return _Server()


class _Server:
    """The parent's side: starts the server, restarts it after it has ended, and ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        atexit.register(self.stop)

    def ask(self, request: bytes) -> dict[str, Any]:
        with self._lock:
            try:
                is_fresh = self._connection is None
                answer = self._exchange(request)
                if answer is None and not is_fresh:  # an idle server has ended
                    self.stop()
                    answer = self._exchange(request)
            except OSError as error:
                self.stop()
                return {"error": f"shapes from models: {sys.executable or 'Python'} cannot build them: {error.strerror or error}"}
            except BaseException:
                self.stop()
                raise
            if answer is None:
                self.stop()
                return {"error": f"shapes from models: {sys.executable} cannot import transformers; import it to see the error"}
            return answer

    def _exchange(self, request: bytes) -> dict[str, Any] | None:
        """Send a request and return its answer; None from a server that has ended."""
        connection = self._connection or self._start()
        with contextlib.suppress(EOFError, ConnectionError):
            connection.send_bytes(request)
            if connection.poll(_PATIENCE):
                answer: dict[str, Any] = json.loads(connection.recv_bytes(_LARGEST_ANSWER))
                return answer
            self.stop()
            return {"error": f"shapes from models: no answer from transformers in {_PATIENCE} s"}
        return None

    def _start(self) -> Connection:
        self._connection, theirs = Pipe()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_VARIABLES)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _SERVER, str(theirs.fileno()), *filter(None, sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment | _OFFLINE,
                start_new_session=True,  # one signal ends the server and the process it has forked
            )
        return self._connection

    def stop(self) -> None:
        """End the server and what it runs; the next question starts another."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._connection = self._process = None


def serve(descriptor: int, describe: Callable[..., Any]) -> None:
    """Answer each question in a forked process, until the idle timeout."""
    connection = Connection(descriptor)
    sys.dont_write_bytecode = True
    tempfile.gettempdir()  # found by writing, which a forked process may not
    sys.modules["kernels"] = None  # type: ignore[assignment]  # its kernels are code of the hub
    import transformers.models.llama.modeling_llama  # noqa: F401  # with what every model imports, once for all

    while connection.poll(_IDLE):
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            _answer(connection, request, describe)
        _, status = os.waitpid(pid, 0)
        if status:
            connection.send_bytes(json.dumps({"ended": os.waitstatus_to_exitcode(status)}).encode())


def _answer(connection: Connection, request: bytes, describe: Callable[..., Any]) -> NoReturn:
    """Send the requested description or the error, and exit."""
    try:
        question, granted = json.loads(request)
        limits = Limits(**granted)
        try:
            confine(limits)
            answer = {"described": describe(**question)}
        except UserError as error:
            answer = {"error": str(error)}
        except RecursionError:
            answer = {"error": too_deep(question["folder"])}
        except MemoryError:
            answer = {"error": beyond(question["folder"], f"{limits.memory >> 20} MiB")}
        message = json.dumps(answer).encode()
        lift_time_limit()  # so that the message is sent whole
        connection.send_bytes(message)
        os._exit(0)
    finally:
        os._exit(1)


def _ended(folder: str, exit_code: int, seconds: int) -> str:
    """Return the message for a process that ended without an answer."""
    if exit_code == -signal.SIGXCPU:
        return beyond(folder, f"{seconds} s of processor time")
    return f"{folder}/config.json: the process that builds its model ended with {exit_code}; check the sizes in the file"
