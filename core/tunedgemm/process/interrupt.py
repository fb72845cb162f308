"""Distinguish exceptions of signals from those of plugins."""

from __future__ import annotations

import dis
import signal
import threading
from typing import Any

_RAISE = dis.opmap["RAISE_VARARGS"]


def is_interrupt(error: BaseException) -> bool:
    """Check whether a caught exception was raised by a signal handler.

    A handler's frame is in its traceback: servers end by a SystemExit from there. Python's handler
    of SIGINT has no frame, so a KeyboardInterrupt counts unless a `raise` statement made it.
    """
    if threading.get_ident() != threading.main_thread().ident:  # signals arrive in the main thread alone
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    traceback, interrupted = error.__traceback__, None
    raised_at = -1
    while traceback is not None:
        frame = traceback.tb_frame
        code, values = frame.f_code, frame.f_locals
        # A handler gets the interrupted frame, even if it has been replaced since.
        if code in handlers or any(values.get(name) is interrupted is not None for name in code.co_varnames[: code.co_argcount]):
            return True
        interrupted, raised_at = frame, code.co_code[traceback.tb_lasti]
        traceback = traceback.tb_next
    return isinstance(error, KeyboardInterrupt) and raised_at != _RAISE


def _code_of(handler: Any) -> Any:
    """Return the code of a signal's handler; None of a default one."""
    function = getattr(handler, "func", handler)  # of a partial
    function = getattr(function, "__func__", function)  # of a method
    return getattr(function, "__code__", None)
