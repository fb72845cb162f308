"""Answers the conformance suite's questions in another process: ``python -m tunedgemm.testing.child``.

The process reads one JSON object from standard input: ``libtype``, ``shapes``, ``devices``, and
``prepare``, the number of solutions to prepare for each. Its last line is the answer, one JSON
object.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import attrs

from tunedgemm.device import Device
from tunedgemm.shape import Shape

#: Environment variables that hide all devices.
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}


def ask_child(libtype: str, shapes: Sequence[Shape], devices: Sequence[Device], *, hidden: bool, prepare: int = 0) -> dict[str, Any]:
    """Load a backend in a fresh process and enumerate there, with devices hidden or visible.

    Returns:
        ``solutions`` (texts, a list for each shape and device in turn; None where unsupported),
        ``modules`` loaded by the import, ``cuda`` (whether a device was touched) and ``seconds``
        that the import took.

    Raises:
        RuntimeError: the process failed; the message holds its output.
    """
    question = {
        "libtype": libtype,
        "shapes": [shape.to_dict() for shape in shapes],
        "devices": [attrs.asdict(device) for device in devices],
        "prepare": prepare,
    }
    environment = {**os.environ, **(HIDDEN if hidden else {}), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "3"}
    command = [sys.executable, "-m", "tunedgemm.testing.child"]
    done = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True, env=environment, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"libtype {libtype!r} in a child process: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    from tunedgemm.backends.registry import Registry

    registry = Registry()
    before = set(sys.modules)
    (backend,) = registry.select(question["libtype"])
    modules = sorted(set(sys.modules) - before)
    solutions: list[list[str] | None] = []
    devices = [Device(**{**fields, "versions": tuple(map(tuple, fields["versions"]))}) for fields in question["devices"]]
    for shape, device in itertools.product(map(Shape.from_dict, question["shapes"]), devices):
        if backend.refusal(shape, device):
            solutions.append(None)
            continue
        listed = backend.solutions(shape, device)
        solutions.append([str(solution) for solution in listed])
        for solution in listed[: question["prepare"]]:
            backend.prepare(solution, shape, device)
    torch = sys.modules.get("torch")
    return {"solutions": solutions, "modules": modules, "cuda": torch is not None and torch.cuda.is_initialized()}


if __name__ == "__main__":
    print(json.dumps(_answer(json.load(sys.stdin))))  # noqa: T201  the answer to the parent
