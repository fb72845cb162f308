"""Compile kernels in processes while an engine builds its model and loads weights.

A process gets its tasks on standard input, fills the artifact cache, and ends. It imports neither
torch nor the engine, so it starts in a fraction of a second. A kernel that is missing afterwards
compiles in the first call.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable

import attrs
from tunedgemm.integrations import Registry
from tunedgemm.plugin import Backend, Device, Shape, Solution

#: One compilation.
Task = tuple[Device, Shape, Solution]
#: Most processes of one weight, and the share of the cores that they may take.
_PROCESSES, _SHARE = 6, 2
#: Longest wait for all processes, in seconds.
_SECONDS = 60.0
#: The program of a process; the current folder could hold other modules of these names.
_PROGRAM = "import sys; sys.path[:] = {path!r}; from tunedgemm_engines.ahead import main; main()"

_begun: set[Task] = set()
_processes: list[subprocess.Popen[bytes]] = []


def begin(tasks: Iterable[Task], ranks: int = 1) -> None:
    """Compile in the background what no earlier call began; do nothing without a free core.

    Args:
        tasks: the compilations.
        ranks: processes of the engine, which share the cores.
    """
    new = [task for task in tasks if task not in _begun]
    _begun.update(new)
    shares: dict[int, list[Task]] = {}
    count = min(_PROCESSES, len(os.sched_getaffinity(0)) // (_SHARE * ranks))
    for task in new if count else ():  # one kernel of several M stays in one process
        shares.setdefault(zlib.crc32(str(task[2]).encode()) % count, []).append(task)
    for share in shares.values():
        with contextlib.suppress(OSError):  # no memory or processes: the first calls compile
            _start(share)


def _start(tasks: list[Task]) -> None:
    """Start one process; raise OSError if that fails."""
    program = _PROGRAM.format(path=[str(folder) for folder in sys.path if folder])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile() as file:  # a pipe would make the engine wait for a process that does not read
        file.write(pickle.dumps(tasks))
        file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
    _processes.append(process)


def finish() -> None:
    """Wait for the processes; end those that take too long."""
    until = time.monotonic() + _SECONDS
    while _processes:
        process = _processes.pop()
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Compile the tasks of standard input; the first call reports what does not compile."""
    tasks: list[Task] = pickle.load(sys.stdin.buffer)
    registry = Registry()
    for device, shape, solution in tasks:
        backend = registry.get(solution.libtype)
        if isinstance(backend, Backend):
            with contextlib.suppress(Exception):
                backend.prepare(solution, shape, attrs.evolve(device, index=-1))
