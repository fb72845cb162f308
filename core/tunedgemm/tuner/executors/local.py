"""Lanes over the devices of this machine: a worker process each, one pool of compilers for all."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from tunedgemm.backends.registry import Registry
from tunedgemm.errors import UserError
from tunedgemm.ops.op import Op
from tunedgemm.tuner.compilers import Compilers
from tunedgemm.tuner.lane import Lane
from tunedgemm.tuner.remote import LaneLost
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Bench, Options
from tunedgemm.tuner.worker import Inline, Worker

_log = logging.getLogger("tunedgemm")

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def devices(options: Options) -> list[int]:
    """Indices of the devices to tune on; -1 is the CPU. Creates no context on any of them.

    Raises:
        UserError: more are asked for than there are, or one that is not there.
    """
    import torch

    count = torch.cuda.device_count()
    asked = options.device.strip().lower()
    if asked == "cpu" or (not asked and not count):
        hidden = next((f"{name}={os.environ[name]!r}" for name in _VISIBLE if os.environ.get(name, "-1") not in ("", "-1")), "")
        if not asked and hidden:
            raise UserError(f"no GPU is visible with {hidden}; correct it, or say --device cpu")
        found = [-1]
    elif asked:
        found = [_index(text, count) for text in asked.split(",")]
    else:
        found = list(range(count))
    if options.mp > len(found):
        what = "the CPU, which is one device" if found == [-1] else f"{len(found)} GPU" + ("s" if len(found) > 1 else "")
        raise UserError(f"--mp {options.mp}: there is only {what} to tune on")
    return found[: options.mp or None]


def _index(text: str, count: int) -> int:
    if not text.strip().isdigit() or int(text) >= count:
        there = f"this machine shows GPUs 0 to {count - 1}; give a comma list of their indices, or cpu"
        there = there if count else "this machine shows no GPU; leave --device out, or give cpu"
        raise UserError(f"--device {text.strip() or repr(text)}: {there}")
    return int(text)


def _lost(lane: Lane, index: int) -> str:
    """Begin a lane; why it cannot: the others do its work then."""
    try:
        lane.begin()
    except LaneLost as error:
        reason = f"{'the CPU' if index < 0 else f'GPU {index}'}: {error}"
        _log.warning("left out: %s", reason)
        return reason
    return ""


@contextlib.contextmanager
def lanes(op: Op, options: Options, places: Mapping[str, int], registry: Registry | None, bench: Bench | None) -> Iterator[list[Lane]]:
    """Lanes that have begun; they and the compilers end with the context. A device that does not work is left out.

    Args:
        registry: where given, everything runs in this process, on one device.
        bench: where times come from; it must be importable in a child where *registry* is not
            given.

    Raises:
        UserError: there is no such device, or none works.
    """
    indices = devices(options)
    if registry is not None:  # a process captures one graph at a time
        indices = indices[:1]
    compilers = Compilers(options.jobs, options.timeout, registry)
    found = []
    for index in indices:
        if registry is not None:
            make = functools.partial(Session, op.name, index, options, registry, bench)
        else:
            make = functools.partial(Session, op.name, index, options, bench=bench)
        found.append(Lane(op, options, Inline(make) if registry is not None else Worker(make), compilers, places))
    try:
        compilers.start(places)
        with ThreadPoolExecutor(len(found)) as starting:
            lost = list(starting.map(_lost, found, indices))
        working = [lane for lane, reason in zip(found, lost, strict=True) if not reason]
        if not working:
            raise UserError(f"no device to tune on works: {'; '.join(lost)}")
        yield working
    finally:
        for lane in found:
            lane.stop()
        compilers.stop()
