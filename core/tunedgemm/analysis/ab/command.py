"""One run of a command that prints a number."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

import attrs

from tunedgemm.errors import TunedGemmError
from tunedgemm.process.children import signal_name

#: Last lines of a failed command's output in its error.
_LINES = 8
#: A number that stands alone between spaces.
_NUMBER = re.compile(r"(?<!\S)([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)(?!\S)")


class Failure(TunedGemmError):
    """A run gave no number.

    Attributes:
        lines: the last lines of its output.
    """

    lines: tuple[str, ...] = ()


@attrs.frozen
class Arm:
    """A command's environment.

    Attributes:
        name: ``a`` or ``b``.
        variables: variables in addition to the present ones.
    """

    name: str
    variables: Mapping[str, str]


def run_command(words: Sequence[str], arm: Arm, pattern: str = "", timeout: float = math.inf) -> float:
    """Run a command in a new session, and return its number; end its process group.

    Args:
        words: the command, without a shell.
        arm: its environment.
        pattern: regular expression whose group is the number; "" if stdout has one number alone.
        timeout: seconds after which it counts as hung.

    Raises:
        Failure: it failed, hung, or did not print one number above 0.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        try:
            process = subprocess.Popen(
                words, env={**os.environ, **arm.variables}, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            raise Failure(f"{words[0]}: cannot be run: {error.strerror or error}; name a program after --") from error
        try:
            code: int | None = process.wait(timeout if timeout < math.inf else None)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # children may be left, whoever ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    if code:
        raise _failure(arm, f"failed (got {signal_name(code) or f'exit code {code}'})", texts)
    if code is None:
        raise _failure(arm, f"hung (got no end within {timeout:g} s); --timeout allows more", texts)
    try:
        return number_of(texts[0], pattern)
    except Failure as error:
        raise _failure(arm, str(error), texts) from None


def number_of(text: str, pattern: str = "") -> float:
    """Return the only number of an output, above 0; see `run_command`.

    Raises:
        Failure: there is none, or more than one.
    """
    found = [match[1] for match in (re.compile(pattern) if pattern else _NUMBER).finditer(text) if match[1]]
    if len(found) != 1:
        got = f"{len(found)}: {', '.join(found[:4])}" if found else "none"
        raise Failure(f"printed no single number (got {got}); --number selects it by a regular expression with one group")
    try:
        number = float(found[0].replace(",", ""))
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise Failure(f"printed no number above 0 (got {found[0]})")
    return number


def _failure(arm: Arm, what: str, texts: Sequence[str]) -> Failure:
    failure = Failure(f"arm {arm.name} {what}")
    failure.lines = tuple(line for text in texts for line in text.splitlines() if line.strip())[-_LINES:]
    return failure
