"""Map each op to the functions of its kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
from tunedgemm.plugin import Device, Platform, PluginError, Shape, Solution
from tunedgemm.tools.launching import ARCHITECTURES

from tunedgemm_triton import installed, limits, names, plan, resources, space, sums
from tunedgemm_triton.moe import names as moe_names
from tunedgemm_triton.moe import plan as moe_plan
from tunedgemm_triton.moe import resources as moe_resources
from tunedgemm_triton.moe import space as moe_space
from tunedgemm_triton.packed import names as packed_names
from tunedgemm_triton.packed import plan as packed_plan
from tunedgemm_triton.packed import resources as packed_resources
from tunedgemm_triton.packed import space as packed_space
from tunedgemm_triton.plan import LaunchPlan


@attrs.frozen
class OpFamily:
    """The kernels of some ops.

    A kernel is its parameters (`names.KernelConfig`), *split_k* parts of K, 1 for none.

    Attributes:
        unsupported_operands: (shape, device) -> why no kernel takes the operands, or None.
        parse_name: kernel name -> kernel, or PluginError.
        unfit: (kernel, split_k, shape, device) -> why it cannot serve, or None.
        fits: the same -> whether it also fits the estimates of memory and registers.
        candidates: (shape, device) -> (kernel, split_k) worth timing, best guesses first.
        neighbours: (kernel, split_k, shape) -> those one step away.
        most: most solutions of one shape.
        plan_of: (kernel, split_k, shape, device) -> the launches of one call.
        order_of: the same -> the name of the order of sums, or "".
    """

    unsupported_operands: Callable[[Shape, Device], str | None]
    parse_name: Callable[[str], Any]
    unfit: Callable[[Any, int, Shape, Device], str | None]
    fits: Callable[[Any, int, Shape, Device], bool]
    candidates: Callable[[Shape, Device], Iterable[tuple[Any, int]]]
    neighbours: Callable[[Any, int, Shape], Iterable[tuple[Any, int]]]
    most: int
    plan_of: Callable[[Any, int, Shape, Device], LaunchPlan]
    order_of: Callable[[Any, int, Shape, Device], str] = lambda *_: ""

    def unsupported(self, shape: Shape, device: Device) -> str | None:
        """Return why none of its kernels takes the shape, or None."""
        return limits.unsupported(self.unsupported_operands, shape, device) or installed.fault() or None

    def enumerate_solutions(self, shape: Shape, device: Device) -> Iterator[Solution]:
        """Yield the solutions of a shape that fit, each once, at most `most`, best guesses first."""
        if not self.unsupported(shape, device):
            fitting = (each for each in dict.fromkeys(self.candidates(shape, device)) if self.fits(*each, shape, device))
            yield from (self.solution_of(*each, shape, device) for each in itertools.islice(fitting, self.most))

    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
        """Yield the neighbours of a solution that fit: one parameter, or splitK, moved one step."""
        try:
            kernel = self.parse_name(solution.kernel_name)
        except PluginError:
            return
        for near in self.neighbours(kernel, max(solution.split_k, 1), shape):
            if self.fits(*near, shape, device):
                yield self.solution_of(*near, shape, device)

    def solution_of(self, kernel: Any, split_k: int, shape: Shape, device: Device) -> Solution:
        """Return the solution of a kernel, with the name of its order of sums."""
        return names.solution_of(kernel, split_k, self.order_of(kernel, split_k, shape, device))


def _family(limits_: Any, names_: Any, resources_: Any, space_: Any, plan_: Any) -> OpFamily:
    """Return the family of five modules of the same skeleton."""
    return OpFamily(
        limits_.unsupported_operands,
        names_.parse_name,
        resources_.unfit,
        resources_.fits,
        space_.candidates,
        space_.neighbours,
        space_.MOST,
        plan_.plan_of,
    )


DENSE = attrs.evolve(_family(limits, names, resources, space, plan), order_of=sums.order_of)
MOE = _family(moe_resources, moe_names, moe_resources, moe_space, moe_plan)
WN = _family(packed_resources, packed_names, packed_resources, packed_space, packed_plan)
MX = attrs.evolve(WN, parse_name=packed_names.parse_mx)

#: Op -> its family.
FAMILIES = {**dict.fromkeys(limits.OPS, DENSE), moe_names.OP: MOE, **dict.fromkeys(packed_names.OPS, MX), packed_names.OP: WN}
_WITHOUT_FP8 = tuple(op for op in FAMILIES if not op.startswith("a8w8_blockscale"))
_NEEDS = "Triton 3.6 or newer, which torch 2.10 and newer have"
#: Ops of 16-bit activations and a decoded weight, and the matrix instructions whose kernels decode
#: it, apart from Hopper's.
_DECODED = ("a16w4_blockscale", packed_names.OP)
_WIDE = ("mma", "tcgen05", "mfma")


def _platforms(ops: Iterable[str] = (), ran: tuple[str, ...] = (), ranked: tuple[str, ...] = (), **facts: Any) -> Iterator[Platform]:
    """Yield the platforms of the architectures with some facts, by the Triton that each needs."""
    needed: dict[str, list[str]] = {}
    for gfx in ARCHITECTURES.having(**facts):
        since = installed.SINCE.get(gfx)
        needed.setdefault("Triton {}.{} or newer".format(*since) if since else _NEEDS, []).append(gfx)
    for needs, devices in needed.items():
        yield Platform(tuple(devices), needs=(needs,), ran=ran, ops=tuple(ops), ranked=ranked)


PLATFORMS = (
    *_platforms(matrix="wgmma", ran=("H200",), ranked=("a16w16", "a8w8", "a8w8_blockscale")),
    *_platforms(matrix=_WIDE, fp8=limits.FP8),
    *_platforms(_WITHOUT_FP8, matrix=_WIDE, fp8=""),
    *_platforms([op for op in FAMILIES if op not in _DECODED], matrix="wmma", fp8=limits.FP8),
    *_platforms([op for op in _WITHOUT_FP8 if op not in _DECODED], matrix="wmma", fp8=""),
)


def family_of(op: str) -> OpFamily:
    """Return the family of an op."""
    return FAMILIES[op]


def unsupported(shape: Shape, device: Device) -> str | None:
    """Return why no kernel takes the shape on the architecture with the installed Triton, or None."""
    return family_of(shape.op).unsupported(shape, device)
