"""Load compiled programs on a device, and call Triton's C function of launches directly.

Triton's launcher packs the arguments of each call in Python, then calls that function. Its
arguments differ between versions, so `load` asks a copy of the launcher once what it would pass.
Where the answer is not understood, calls go through the launcher itself.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from tunedgemm.plugin import OutOfResources
from tunedgemm.tools.launching import ARCHITECTURES, warn_once

from tunedgemm_triton import installed
from tunedgemm_triton.build import Program, triton_cache


@attrs.frozen(eq=False)
class Described:
    """A parameter that is a tensor descriptor.

    Attributes:
        box: elements that one load takes, by axis.
        expand: Triton's descriptor -> its launch arguments.
    """

    box: tuple[int, ...]
    expand: Callable[[Any], tuple[Any, ...]]


@attrs.frozen(eq=False)
class KernelFunction:
    """A program loaded on one device.

    Attributes:
        launch: takes the grid, the stream, *head* and the kernel's parameters.
        head: constant arguments.
        rest: placeholders of the constexpr parameters.
        described: tensor descriptors among the parameters, by name.
        scratch: bytes of scratch memory that each program of the grid takes.
    """

    launch: Callable[..., None]
    head: tuple[Any, ...]
    rest: tuple[None, ...]
    described: Mapping[str, Described] = {}
    scratch: int = 0


class _Mark(int):
    """A zero that is found by identity among arguments; a grid of zeros launches nothing."""


@functools.lru_cache(maxsize=4096)
def load(program: Program, gfx: str, index: int) -> KernelFunction:
    """Load a program on the device with this index; compile it where `prepare` has not.

    It stays loaded for the life of the process, since a captured graph has only its handle.

    Raises:
        OutOfResources: the kernel needs more shared memory or threads than the device has.
        LaunchError: the kernel does not compile.
    """
    import torch
    from triton.runtime.errors import OutOfResources as Exceeded

    if notice := installed.notice():
        warn_once(notice)
    kernel, name, limit = program.compile(gfx), program.name, ARCHITECTURES[gfx].shared_bytes
    if kernel.metadata.shared > limit:
        raise OutOfResources(f"triton {name}: {kernel.metadata.shared} bytes of shared memory needed ({gfx} has {limit})")
    try:
        with torch.cuda.device(index), triton_cache():
            run = kernel.run
    except Exceeded as error:
        raise OutOfResources(f"triton {name} on {gfx}: {error}") from error
    function = function_of(kernel, run, index)
    kernel.module = None  # from 3.8 on Triton unloads it with the object
    return function


def function_of(kernel: Any, run: Any, index: int) -> KernelFunction:
    """Return how calls launch a loaded kernel: directly, or by Triton's launcher *run*."""
    rest = (None,) * sum(kind == "constexpr" for kind in kernel.src.signature.values())
    memory = _memory(kernel, index)
    try:
        launch, head = _direct(kernel, run, memory)
        described = _described(kernel, run)
    except Exception:  # the private parts of a later Triton may differ in any way
        warn_once(
            f"triton {installed.version()}: its C launcher is not known, so each call takes some microseconds more "
            f"in its Python launcher; those of {installed.KNOWN} are known"
        )
        launch, head = _by_triton(kernel, run, memory)
        described = _described(kernel, None)
    return KernelFunction(launch, head, rest, described, _scratch_of(kernel))


def _direct(kernel: Any, run: Any, memory: Callable[[int], Any] | None) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the function to launch with and its constant arguments, as in `KernelFunction`.

    Raises:
        Exception: Triton's launcher does not pass on what it gets in a way that is understood.
    """
    if getattr(run, "profile_scratch_size", 0):
        raise ValueError("memory of a profiler")
    launch = run.launch
    if any(_descriptors(kernel)):  # a function that expands descriptors and then calls the C function
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    marks, parameters = [_Mark() for _ in range(4)], [_Mark() for _ in kernel.src.signature]
    before, after = _split(_observed(kernel, run, marks, parameters), marks)
    is_packed = _are(after[-1], parameters)
    head = after[:-1] if is_packed else after[: len(after) - len(parameters)]
    if not (is_packed or _are(after[len(head) :], parameters)) or any(isinstance(value, _Mark) for value in before):
        raise ValueError("other parameters")
    return _joined(launch, before, head, memory, is_packed)


def _observed(kernel: Any, run: Any, marks: list[_Mark], parameters: list[_Mark]) -> tuple[Any, ...]:
    """Return the arguments that Triton's launcher passes on for these of a call."""
    import triton

    seen: list[tuple[Any, ...]] = []
    spied = copy.copy(run)
    spied.launch = lambda *given: seen.append(given)

    def ask() -> None:
        triton.set_allocator(lambda *_: _Mark())
        spied(*marks, kernel.function, kernel.packed_metadata, None, None, None, *parameters)

    contextvars.copy_context().run(ask)
    [given] = seen
    return given


def _split(given: tuple[Any, ...], marks: list[_Mark]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the arguments before the grid, and those after the stream that follows it."""
    first = next(index for index, value in enumerate(given) if value is marks[0])
    if not _are(given[first : first + len(marks)], marks):
        raise ValueError("other grid")
    return given[:first], given[first + len(marks) :]


def _are(values: Any, marks: Sequence[_Mark]) -> bool:
    """Return whether values are a sequence of exactly these marks."""
    return isinstance(values, tuple | list) and len(values) == len(marks) and all(map(lambda one, other: one is other, values, marks))


def _joined(
    launch: Callable[..., None], before: tuple[Any, ...], head: tuple[Any, ...], memory: Callable[[int], Any] | None, is_packed: bool
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return a function that takes a call's arguments in the order of `KernelFunction`, and the
    constant ones that it still needs.
    """
    places = [index for index, value in enumerate(head) if isinstance(value, _Mark)]
    start = functools.partial(launch, *before) if before else launch
    if memory is not None:
        [at] = places
        first, last = head[:at], head[at + 1 :]

        def with_memory(x: int, y: int, z: int, stream: int, *given: Any) -> None:
            scratch = memory(x * y * z)
            start(x, y, z, stream, *first, scratch.data_ptr(), *last, *((given,) if is_packed else given))

        return with_memory, ()
    if places:
        raise ValueError("memory that the metadata do not name")
    return (lambda x, y, z, stream, *given: start(x, y, z, stream, *head, given), ()) if is_packed else (start, head)


def _by_triton(kernel: Any, run: Any, memory: Callable[[int], Any] | None) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the same as `_direct`, but to launch by Triton's launcher."""
    import triton

    tail = (kernel.function, kernel.packed_metadata, None, None, None)
    if memory is None:
        return run, tail

    def with_memory(x: int, y: int, z: int, stream: int, *given: Any) -> None:
        scratch = memory(x * y * z)

        def start() -> None:
            triton.set_allocator(lambda *_: scratch)
            run(x, y, z, stream, *tail, *given)

        contextvars.copy_context().run(start)  # the allocator of the user stays

    return with_memory, ()


def _memory(kernel: Any, index: int) -> Callable[[int], Any] | None:
    """Return a function that allocates scratch memory for a number of programs; None if the kernel
    takes none.
    """
    import torch

    size, empty, byte, where = _scratch_of(kernel), torch.empty, torch.uint8, torch.device("cuda", index)
    return (lambda programs: empty(programs * size, dtype=byte, device=where)) if size else None


def _scratch_of(kernel: Any) -> int:
    """Return the bytes of scratch memory that each program of the grid takes."""
    return getattr(kernel.metadata, "global_scratch_size", 0)


def _descriptors(kernel: Any) -> dict[str, str]:
    """Return the parameters that are tensor descriptors, and their types."""
    return {name: kind for name, kind in kernel.src.signature.items() if kind.startswith("tensordesc")}


def _described(kernel: Any, run: Any) -> dict[str, Described]:
    """Return the tensor descriptors among the parameters; their arguments are expanded as the
    module of Triton's launcher does, or with None left to the launcher.
    """
    kinds = _descriptors(kernel)
    boxes = [tuple(map(int, re.findall(r"\d+", kind.partition("[")[2]))) for kind in kinds.values()]
    if run is None or not kinds:
        return {name: Described(box, lambda descriptor: (descriptor,)) for name, box in zip(kinds, boxes, strict=True)}
    make = sys.modules[type(run).__module__].make_tensordesc_arg
    more = (None,) * (len(inspect.signature(make).parameters) - 2)
    metas = kernel.metadata.tensordesc_meta
    return {
        name: Described(box, lambda descriptor, meta=meta: tuple(make(descriptor, meta, *more)))
        for name, box, meta in zip(kinds, boxes, metas, strict=True)
    }
