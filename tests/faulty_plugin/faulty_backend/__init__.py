"""A backend whose solutions are named after their faults; only `good` is correct and fast.

To install it, put the folder above this package on the path, and into PYTHONPATH for child
processes. FAULTY_KINDS, a comma list, selects solutions; FAULTY_MARK is a file that `hangs` creates
before it hangs.
"""

import ctypes
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tunedgemm.plugin import Backend, Launcher, OutOfResources, Shape, Solution, Unsupported, hookimpl

LIBTYPE = "faulty"

#: Calls after which the late faults occur: more than a check takes, fewer than a timing.
LATE = 25

#: solution -> its correct status words
EXPECTED: dict[str, tuple[str, ...]] = {
    "hangs": ("hung",),
    "segfaults": ("crashed",),
    "aborts": ("crashed",),
    "exits": ("failed",),
    "raises": ("failed",),
    "raises_oddly": ("failed",),
    "not_a_number": ("wrong",),
    "one_wrong_row": ("wrong",),
    "last_tile_wrong": ("wrong",),
    "baked_weight": ("wrong",),
    "right_once": ("wrong",),
    "memoised": ("wrong",),
    "out_of_bounds": ("wrong",),
    "writes_operand": ("wrong",),
    "leaks": ("leaks",),
    "compiles_slowly": ("compile_timeout",),
    "aborts_compiler": ("compile_failed",),
    "hangs_in_bind": ("compile_timeout",),
    "refuses": ("unsupported",),
    "out_of_resources": ("out_of_resources",),
    "out_of_resources_late": ("out_of_resources",),
    "out_of_memory": ("out_of_memory",),
    "sleeps_at_random": ("ok", "screened"),
    "good": ("ok",),
    "hangs_later": ("hung",),
    "segfaults_later": ("crashed",),
    "wrong_later": ("wrong",),
    "raises_later": ("failed",),
}
#: Correct solutions that fail only with --deterministic or --batch-invariant.
PARTICULAR = {"nondeterministic": "nondeterministic", "batch_variant": "batch_variant"}

#: Leaked tensors.
_kept: list[Any] = []


def _kinds(known: tuple[str, ...]) -> list[str]:
    """Return the names in FAULTY_KINDS in the order of *known*; all of them without it."""
    wanted = os.environ.get("FAULTY_KINDS", "").split(",")
    return [name for name in known if name in wanted or wanted == [""]]


@hookimpl
def supports(shape: Shape) -> Unsupported | None:
    """Accept plain operands of one dtype without bias."""
    if shape.layout != "row" or shape.scale != "none" or shape.bias or shape.outdtype != shape.dtype:
        return Unsupported("takes plain operands of one dtype without bias")
    return None


@hookimpl
def enumerate_solutions() -> Iterator[Solution]:
    """Yield one of each kind, most of the bad ones before the good one."""
    narrowed = bool(os.environ.get("FAULTY_KINDS"))
    for name in _kinds((*EXPECTED, *PARTICULAR) if narrowed else tuple(EXPECTED)):
        yield Solution(LIBTYPE, name)


@hookimpl
def prepare(solution: Solution) -> None:
    """Compile; two kinds fail in the compiler."""
    if solution.kernel_name == "compiles_slowly":
        time.sleep(3600)
    if solution.kernel_name == "aborts_compiler":
        os.abort()


@hookimpl
def bind(solution: Solution, shape: Shape) -> Launcher | Unsupported:
    """Return a launcher with separate state.

    It is not graph-safe: a graph would record one call of those that differ.
    """
    name = solution.kernel_name
    if name not in _CALLS:
        return Unsupported(f"no kernel {name!r}")
    if name == "refuses":
        return Unsupported("refuses every shape")
    if name == "out_of_resources":
        raise OutOfResources("needs 300000 bytes of shared memory")
    if name == "hangs_in_bind":
        time.sleep(3600)
    if name in ("compiles_slowly", "aborts_compiler"):  # not prepared: compile now
        prepare(solution)
    call, state = _CALLS[name], {"calls": 0}

    def launch(x: Any, weight: Any) -> Any:
        state["calls"] += 1
        return call(x, weight, state)

    return Launcher(launch, graph_safe=False)


def _product(x: Any, weight: Any) -> Any:
    """Multiply in float64.

    Neither the order of summation nor M then shows in the bits of a narrower dtype.
    """
    return (x.double() @ weight.double().t()).to(x.dtype)


def _good(x: Any, weight: Any, state: dict) -> Any:
    return _product(x, weight)


def _hangs(x: Any, weight: Any, state: dict) -> Any:
    if mark := os.environ.get("FAULTY_MARK"):
        Path(mark).touch()
    while True:  # with the interpreter's lock held, as in a library: no other thread of the process runs
        ctypes.PyDLL(None).sleep(3600)


def _segfaults(x: Any, weight: Any, state: dict) -> Any:
    return ctypes.string_at(0)


def _aborts(x: Any, weight: Any, state: dict) -> Any:
    os.abort()


def _exits(x: Any, weight: Any, state: dict) -> Any:
    sys.exit(0)


def _raises(x: Any, weight: Any, state: dict) -> Any:
    raise RuntimeError("no such kernel image")


class OddError(Exception):
    """Error that cannot be pickled: it takes two arguments and passes on one."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.lock = code, lambda: None


def _raises_oddly(x: Any, weight: Any, state: dict) -> Any:
    raise OddError(7, "an odd reason")


def _not_a_number(x: Any, weight: Any, state: dict) -> Any:
    return _product(x, weight) * float("nan")


def _one_wrong_row(x: Any, weight: Any, state: dict) -> Any:
    out = _product(x, weight)
    out[-2] *= 1.05
    return out


def _last_tile_wrong(x: Any, weight: Any, state: dict) -> Any:
    out = _product(x, weight)
    out[-1:, -16:] = 0
    return out


def _baked_weight(x: Any, weight: Any, state: dict) -> Any:
    return _product(x, state.setdefault("weight", weight))


def _right_once(x: Any, weight: Any, state: dict) -> Any:
    return _product(x, weight) if state["calls"] == 1 else _product(x, weight) + 1  # as with a semaphore left dirty


def _memoised(x: Any, weight: Any, state: dict) -> Any:
    addresses = x.data_ptr(), weight.data_ptr()
    if addresses not in state:
        state[addresses] = _product(x, weight)
    return state[addresses].clone()


def _out_of_bounds(x: Any, weight: Any, state: dict) -> Any:
    import torch

    out = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)
    out.copy_(_product(x, weight))
    if x.is_cuda:
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1)
    else:
        ctypes.memset(out.data_ptr() + out.nbytes, 1, out.element_size())
    return out


def _writes_operand(x: Any, weight: Any, state: dict) -> Any:
    out = _product(x, weight)
    weight[0, 0] += 1
    return out


def _leaks(x: Any, weight: Any, state: dict) -> Any:
    _kept.append(x.new_empty(1 << 18))
    return _product(x, weight)


def _out_of_resources_late(x: Any, weight: Any, state: dict) -> Any:
    raise OutOfResources("needs 512 registers a thread")


def _out_of_memory(x: Any, weight: Any, state: dict) -> Any:
    return x.new_empty(1 << 50) if x.is_cuda else bytearray(1 << 60)


def _sleeps_at_random(x: Any, weight: Any, state: dict) -> Any:
    time.sleep(random.random() * 4e-3)
    return _product(x, weight)


def _hangs_later(x: Any, weight: Any, state: dict) -> Any:
    while state["calls"] > LATE:
        time.sleep(60)
    return _product(x, weight)


def _segfaults_later(x: Any, weight: Any, state: dict) -> Any:
    return _product(x, weight) if state["calls"] <= LATE else ctypes.string_at(0)


def _wrong_later(x: Any, weight: Any, state: dict) -> Any:
    """Return correct results as fast as others; later wrong ones, without computing."""
    if state["calls"] > LATE:
        return state["last"] + 1
    out = _product(x, weight)
    if "last" not in state:
        state["last"] = out.clone()
    return out


def _raises_later(x: Any, weight: Any, state: dict) -> Any:
    return _product(x, weight) if state["calls"] <= LATE else _raises(x, weight, state)


def _nondeterministic(x: Any, weight: Any, state: dict) -> Any:
    import torch

    out = _product(x, weight)
    return out * (1 + state["calls"] % 5 * torch.finfo(x.dtype).eps)


def _batch_variant(x: Any, weight: Any, state: dict) -> Any:
    import torch

    out = _product(x, weight)
    return out * (1 + (x.shape[0] % 2) * torch.finfo(x.dtype).eps)


_CALLS: dict[str, Callable[[Any, Any, dict], Any]] = {name: globals().get(f"_{name}", _good) for name in (*EXPECTED, *PARTICULAR)}


backend = Backend(LIBTYPE, sys.modules[__name__], ops=("a16w16",))
