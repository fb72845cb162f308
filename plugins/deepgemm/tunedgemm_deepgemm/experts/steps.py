"""Compile the kernels of a plan with Triton, without a device, and load them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import Device, LaunchError
from tunedgemm.tools.files import artifact, private_folder
from tunedgemm.tools.launching import ForkSafeLock

from tunedgemm_deepgemm.experts.plan import Plan, Program, Step

_SOURCE = Path(__file__).parents[1] / "kernels" / "experts.py"
#: Folder of Triton's cache in ours.
_FOLDER = "deepgemm-triton"
_lock = ForkSafeLock()


@attrs.frozen(eq=False)
class Steps:
    """The launches of a plan, as functions of tensors on the current stream.

    Attributes:
        place: of (topk_ids, places, groups).
        quantise: of (x, places, quantised x, its scales).
        activate: of (product, places, routing weights, quantised result, its scales).
        combine: of (product, places, routing weights, output).
        spills: for each product, of (x, its scales, weight, its scales, groups, output); none
            where no row is beyond the products'.
    """

    place: Callable[..., None]
    quantise: Callable[..., None]
    activate: Callable[..., None]
    combine: Callable[..., None]
    spills: tuple[Callable[..., None], ...] = ()


def steps_of(plan: Plan, launch: Callable[[Step], Callable[..., None]]) -> Steps:
    """Return the functions of a plan.

    Args:
        plan: the launches.
        launch: returns a function of the addresses and integers of a step.
    """
    import torch

    count, place, counts = launch(plan.count) if plan.counts else None, launch(plan.place), plan.counts
    numbers, placing = plan.count.integers, plan.place.integers

    def placed(ids: Any, places: Any, groups: Any) -> None:
        counted = places
        if count is not None:
            counted = torch.empty(counts, dtype=torch.int32, device=ids.device)
            count(ids, counted, *numbers)
        place(ids, counted, places, groups, *placing)

    def bound(step: Step) -> Callable[..., None]:
        function, integers = launch(step), step.integers
        return lambda *tensors: function(*tensors, *integers)

    spills = tuple(bound(step) for step in plan.spills)
    return Steps(placed, bound(plan.quantise), bound(plan.activate), bound(plan.combine), spills)


@attrs.frozen
class TritonSteps:
    """Ways to the steps, which tests replace."""

    def fault(self) -> str:
        """Return why there are no steps, or an empty text."""
        return "" if importlib.util.find_spec("triton") else "fmoe needs Triton, which torch for CUDA installs; pip install triton"

    def prepare(self, plan: Plan, device: Device) -> None:
        """Compile what the cache lacks.

        Raises:
            LaunchError: a program does not compile.
        """
        for step in plan.steps:
            if not self._is_compiled(step.program, device):
                compile_program(step.program, device)
                artifact(_key(step.program, device), lambda: b"compiled", fresh=True, on_disk=True)

    def are_compiled(self, plan: Plan, device: Device) -> bool:
        """Tell whether the cache has all programs."""
        return all(self._is_compiled(step.program, device) for step in plan.steps)

    def load(self, plan: Plan, device: Device) -> Steps:
        """Load the programs on the device.

        Raises:
            LaunchError: a program does not compile or load.
        """
        return steps_of(plan, lambda step: _loaded(step, device))

    @staticmethod
    def _is_compiled(program: Program, device: Device) -> bool:
        def missing() -> bytes:
            raise FileNotFoundError

        try:
            artifact(_key(program, device), missing)
        except FileNotFoundError:
            return False
        return True


def function_of(program: Program) -> Any:
    """Return the Triton function of a program."""
    from tunedgemm_deepgemm.kernels import experts

    return getattr(experts, program.function)


def compile_program(program: Program, device: Device) -> Any:
    """Return Triton's CompiledKernel, from the cache where present; needs no device.

    Raises:
        LaunchError: the program does not compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = function_of(program)
    names, count = function.arg_names, len(program.types)
    signature = dict(zip(names, (*program.types, *["constexpr"] * len(program.constants)), strict=True))
    # Torch aligns allocations to more than 16 bytes, and the op its operands.
    divisors = [16] * (count - len(program.multiples)) + list(program.multiples)
    attributes = {(index,): [["tt.divisibility", divisor]] for index, divisor in enumerate(divisors) if divisor > 1}
    source = ASTSource(function, signature, dict(zip(names[count:], program.constants, strict=True)), attributes)
    target = GPUTarget("cuda", int(device.gfx.removeprefix("sm_")), 32)
    # Triton 3.10 fuses no multiply and add unless asked, and 3.9 warns of it.
    options = {"num_warps": program.warps, "num_stages": program.stages, "enable_fp_fusion": True}
    try:
        with _cache():
            return triton.compile(source, target=target, options=options)
    except Exception as error:  # the compiler's passes raise plain RuntimeErrors in addition to its types
        raise LaunchError(f"deepgemm {program.function} for {device.gfx}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _cache() -> Iterator[None]:
    """Set Triton's cache to our folder for compiles in here only; one thread at a time."""
    from triton import knobs

    with _lock, knobs.cache.scope():
        knobs.cache.dir = str(private_folder(_FOLDER))
        yield


def _loaded(step: Step, device: Device) -> Callable[..., None]:
    """Return the launch of a step on a present device."""
    launch, constants = _kernel(step.program, device.gfx, device.index)[step.grid], (None,) * len(step.program.constants)

    def run(*arguments: Any) -> None:
        launch(*arguments, *constants)

    return run


@functools.cache
def _kernel(program: Program, gfx: str, index: int) -> Any:
    """Return a compiled kernel that is loaded on the device with this index.

    It is kept for the life of the process: Triton 3.8 unloads the code with it, and a captured
    graph has only its handle. Triton compiles its launcher in C for each list of types, and keeps
    it in the same folder.
    """
    import torch

    kernel = compile_program(program, Device(gfx, 0))
    try:
        with torch.cuda.device(index), _cache():
            _ = kernel.run
    except RuntimeError as error:
        raise LaunchError(f"deepgemm {program.function} on {gfx}: does not load: {error}") from error
    return kernel


def _key(program: Program, device: Device) -> str:
    """Return the cache key of the note that a program is compiled."""
    return f"deepgemm step {program}, {device.gfx}, {_identity()}, {private_folder(_FOLDER)}"


@functools.cache
def _identity() -> str:
    """Return a text that changes with the sources of the kernels and with the compiler."""
    return f"triton {importlib.metadata.version('triton')} {hashlib.sha256(_SOURCE.read_bytes()).hexdigest()}"
