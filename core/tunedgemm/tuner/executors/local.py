"""Local executor: a worker process per device, and one compiler pool."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping

from tunedgemm.backends.loadable import in_threads
from tunedgemm.backends.registry import Registry
from tunedgemm.errors import UserError
from tunedgemm.ops.op import Op
from tunedgemm.text.number import whole_number
from tunedgemm.tuner.compilers import Compilers
from tunedgemm.tuner.device_tuner import DeviceTuner
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Bench, Options
from tunedgemm.tuner.worker import Inline, Worker
from tunedgemm.tuner.worker_client import DeviceLost

_log = logging.getLogger("tunedgemm")

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def devices(options: Options) -> list[int]:
    """Return the indices of the devices to tune on, -1 for the CPU, without creating contexts.

    Warns if fewer exist than ``--mp`` requests.

    Raises:
        UserError: a device does not exist.
    """
    import torch

    count = torch.cuda.device_count()
    requested = options.device.strip().lower()
    if requested == "cpu" or (not requested and not count):
        hidden = next((f"{name}={os.environ[name]!r}" for name in _VISIBLE if os.environ.get(name, "-1") not in ("", "-1")), "")
        if not requested and hidden:
            raise UserError(f"no GPU is visible with {hidden}; correct it, or pass --device cpu")
        indices = [-1]
    elif requested:
        indices = [_index(text, count) for text in requested.split(",")]
    else:
        indices = list(range(count))
    if options.mp > len(indices):
        present = "the CPU, which is one device" if indices == [-1] else f"{len(indices)} GPU" + ("s" if len(indices) > 1 else "")
        _log.warning("--mp %d: this machine has only %s; it is used", options.mp, present)
    return indices[: options.mp or None]


def _index(text: str, count: int) -> int:
    index = whole_number(text)
    if index is None or index >= count:
        remedy = f"this machine has GPUs 0 to {count - 1}; pass a comma list of their indices, or cpu"
        remedy = remedy if count else "this machine has no GPU; leave --device out, or pass cpu"
        raise UserError(f"--device {text.strip() or repr(text)}: {remedy}")
    return index


def device_tuner(op: Op, options: Options, index: int, ranks: Mapping[str, int], jobs: int, bench: Bench | None, node: str) -> DeviceTuner:
    """Make a device tuner with its own worker process and compiler pool.

    Args:
        op, options, ranks, bench: as in `device_tuners`.
        index: index of the device in this process, -1 for the CPU.
        jobs: number of compiler processes.
        node: name of this machine in places.
    """
    make_session = functools.partial(Session, op.name, index, options, bench=bench, node=node)
    return DeviceTuner(op, options, Worker(make_session), Compilers(jobs, options.timeout), ranks)


def _begin(tuner: DeviceTuner, index: int) -> str:
    """Start a device tuner; return why that failed, or ""."""
    try:
        tuner.begin()
    except DeviceLost as error:
        return f"{'the CPU' if index < 0 else f'GPU {index}'}: {error}"
    return ""


@contextlib.contextmanager
def device_tuners(
    op: Op, options: Options, ranks: Mapping[str, int], registry: Registry | None, bench: Bench | None
) -> Iterator[list[DeviceTuner]]:
    """Yield started device tuners, without devices that fail.

    Leaving the context stops the device tuners and compilers.

    Args:
        op: the op to tune.
        options: how to tune.
        ranks: maps a libtype to its rank for ties.
        registry: replaces the installed backends; everything then runs in this process, on one
            device.
        bench: source of times; importable in a child process unless *registry* is given.

    Raises:
        UserError: no such device exists, or none works.
    """
    indices = devices(options)
    if registry is not None:  # a process captures one graph at a time
        indices = indices[:1]
    compilers = Compilers(options.jobs, options.timeout, registry)
    tuners = []
    for index in indices:
        if registry is not None:
            make_session = functools.partial(Session, op.name, index, options, registry, bench)
        else:
            make_session = functools.partial(Session, op.name, index, options, bench=bench)
        worker = Inline(make_session) if registry is not None else Worker(make_session)
        tuners.append(DeviceTuner(op, options, worker, compilers, ranks))
    try:
        compilers.start(ranks)
        reasons = in_threads(lambda each: _begin(*each), list(zip(tuners, indices, strict=True)))
        working = [tuner for tuner, reason in zip(tuners, reasons, strict=True) if not reason]
        if not working:
            raise UserError(f"no device to tune on works: {'; '.join(reasons)}")
        for reason in filter(None, reasons):
            _log.warning("left out: %s", reason)
        yield working
    finally:
        for tuner in tuners:
            tuner.stop()
        compilers.stop()
