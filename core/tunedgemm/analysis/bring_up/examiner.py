"""Examiner: the child process of the kit, replaced after a hang or a crash."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any

from tunedgemm.errors import UserError
from tunedgemm.process.children import import_variables, signal_name

#: The command of a child.
COMMAND = (sys.executable, "-m", "tunedgemm.testing.bring_up")
#: Seconds in which a child starts, imports torch and opens the device; and in which it ends, or an
#: old one answers with its first line.
_START_S, _END_S = 180.0, 20.0
#: Bytes of a read, and characters of a reason.
_READ, _REASON = 1 << 16, 500
#: Step of a check in which kernels run; others are compilers, which may be slow.
_LAUNCH = "launch"
#: Step before a child's first line, and what to do if it does not come.
_START, _REMEDY = "start", "reset the device, and run the same command again"


class Examiner:
    """Starts children, asks one question at a time, and names what hangs or crashes.

    Args:
        command: starts a child.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._pending = b""

    def ask(self, request: dict[str, Any], until: float) -> dict[str, Any] | None:
        """Return the child's answer, or a verdict over its end; None if *until* comes first.

        Args:
            request: a question of `tunedgemm.testing.bring_up`.
            until: a time of `time.monotonic`.

        Raises:
            UserError: a new child does not start, or does not open the device.
        """
        old = self._process
        process = self._started()
        step, kernel, limit = _START, "", time.monotonic() + (_END_S if process is old else _START_S)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading tells how it ended
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        while (line := self._line(min(limit, until))) is not None:
            if not line:
                break
            message = json.loads(line)
            if "answer" in message:
                answer: dict[str, Any] = message["answer"]
                return answer
            step, kernel, seconds = message["at"]
            limit = time.monotonic() + seconds
        is_late = time.monotonic() >= limit
        if step == _START and process is old and (line is not None or is_late):  # it was ending after its last answer
            self.stop()
            return self.ask(request, until)
        if line is not None:
            return self._death(step, kernel)
        self.stop()
        if not is_late:
            return None
        if step == _START:
            raise UserError(f"a new process: does not open the device in {_START_S:g} s; {_REMEDY}")
        status, what = ("hung", "did not end") if step == _LAUNCH else ("late", f"step {step} did not end")
        return {"status": status, "detail": f"{what} in time; its process was killed", "kernel": kernel, "measures": {}}

    def stop(self) -> None:
        """Kill the child and the processes that it started."""
        process, self._process, self._pending = self._process, None, b""
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may not let go of a hung kernel
                process.wait(_END_S)
            for stream in (process.stdin, process.stdout, self._errors):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._process is None:
            environment = {**os.environ, **import_variables()}
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the child
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True, env=environment
            )
        return self._process

    def _line(self, until: float) -> bytes | None:
        """Return the next line; b"" after the child's end, None at *until*."""
        assert self._process is not None
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            if not select.select([output], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            read = os.read(output, _READ)
            if not read:
                return b""
            self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _death(self, step: str, kernel: str) -> dict[str, Any]:
        assert self._process is not None
        assert self._errors is not None
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        how = signal_name(code) or f"exit code {code}"
        self.stop()
        if step == _START:
            raise UserError(f"a new process: does not open the device (got {how}{f': {lines[-1][:_REASON]}' if lines else ''}); {_REMEDY}")
        detail = f"{how} in step {step}" + (f": {lines[-1][:_REASON]}" if lines else "")
        return {"status": "crashed", "detail": detail, "kernel": kernel, "measures": {}}
