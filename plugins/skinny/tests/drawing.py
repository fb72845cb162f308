"""Random products for the property tests: shapes, solutions and operands, drawn by hypothesis, and what is wrong with their outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import tunedgemm
from hypothesis import strategies as st
from tunedgemm.plugin import Device, Launcher, Shape, Solution
from tunedgemm.testing.conformance import Poisoned
from tunedgemm.testing.launching import Case
from tunedgemm.tools import ops
from tunedgemm_skinny import Skinny
from tunedgemm_skinny.limits import ARCHITECTURES, MAX_ROWS, OPS, OUTPUTS, shuffled_rows, width_of

#: Classes of sizes: few of both; odd ones in between; many rows of the weight; long ones.
KINDS = ("small", "odd", "wide", "deep")
#: Rows of x, about as the families and their instructions have them.
ROWS = ((1, 8), (1, 1), (9, 16), (17, 32), (33, MAX_ROWS))
#: NaNs before and after each operand: as many as keep the address aligned.
MARGIN = 64
#: Of a byte: NaNs of every type but these two are of ones alone. int8 has none, so it is the number that is farthest from zero.
NANS = {torch.int8: 0x80, torch.float8_e4m3fnuz: 0x80}
#: Products of a batch.
BATCHES = st.sampled_from((1, 2, 3, 5, 17))
#: Orders of the weight that may be drawn; of the others plain ones.
_SHUFFLED = ("aiter16x16", "aiter32x16")
LAYOUTS = {
    "a16w16": ("row", *_SHUFFLED), "a8w8_bpreshuffle": _SHUFFLED, "a8w8_blockscale_bpreshuffle": _SHUFFLED[:1],
    "a4w4_blockscale": ("row", _SHUFFLED[0]), "a16w4_blockscale": ("row", _SHUFFLED[0]),
}  # fmt: skip
#: K of a shuffled weight in wholes, whatever its dtype; values of mxfp4 that share a scale.
WHOLE, GROUP = 64, 32
#: Columns below which all rows count as one: a lone number may be small by cancellation, and its error is not.
FEW = 8


@attrs.frozen
class Room:
    """The largest product that may be drawn.

    Attributes:
        n, k: rows of the weight, and elements of each, at most.
        elements: of the weight at most.
        m: rows of x at most.
    """

    n: int
    k: int
    elements: int
    m: int = MAX_ROWS


def aligned(width: int) -> st.SearchStrategy[int]:
    """Elements of so many bytes after an aligned address at which an operand of a launcher may begin."""
    return st.sampled_from((0, 16 // width, 48 // width))


def anywhere(width: int) -> st.SearchStrategy[int]:
    """The same for an operand of a call."""
    del width
    return st.integers(1, 15)


def dtypes_of(op: str, gfx: str, *, floating: bool = False) -> tuple[str, ...]:
    """What an architecture multiplies of an op: of *floating* numbers those alone."""
    whole = () if floating else ("int8", "fp4x2")
    return tuple(dtype for dtype in OPS[op][0] if dtype in ("bf16", "fp16", ARCHITECTURES[gfx].fp8, *whole))


@st.composite
def _sizes(draw: st.DrawFn, kind: str, room: Room) -> tuple[int, int]:
    """N and K of a class of sizes; loads of every width divide K."""
    step = draw(st.sampled_from((2, 1) if kind == "odd" else (8, 4, 2, 1)))
    if kind == "deep":
        k = step * draw(st.integers(room.k // 3 // step, room.k // step))
        return draw(st.integers(1, min(room.elements // k, room.n))), k
    least, most = {"small": (1, 64), "odd": (1, 3000), "wide": (room.n // 3, room.n)}[kind]
    n = draw(st.integers(least, min(most, room.n)))
    n += kind == "odd" and n % 2 == 0
    deepest = max(min(room.k, room.elements // n, 256 if kind == "small" else 9000), 8)
    return n, step * draw(st.integers(8 // step, deepest // step))


@st.composite
def shapes(draw: st.DrawFn, kind: str, room: Room, op: str = "a16w16", dtypes: tuple[str, ...] = OPS["a16w16"][0]) -> Shape:
    """A shape of a class of sizes, in any of the operands' dtypes, with any scales of the op, with or without a bias."""
    layouts = LAYOUTS.get(op, ("row",))
    fewest, most = draw(st.sampled_from([(least, most) for least, most in ROWS if most <= room.m]))
    m, dtype, scale = draw(st.integers(fewest, most)), draw(st.sampled_from(dtypes)), draw(st.sampled_from(OPS[op][1]))
    bias = draw(st.sampled_from(("", *OUTPUTS))) if scale != "block" or "w4" in op else ""
    fields: dict[str, Any] = {"epilogue": "bias", "bias_dtype": bias} if bias else {}
    fields["layout"] = draw(st.sampled_from(layouts))
    if op.startswith("batched_"):
        batches = draw(BATCHES)
        fields["extra"] = {"B": batches}
        room = attrs.evolve(room, n=max(room.n // batches, 8), k=max(room.k // batches, 8), elements=max(room.elements // batches, 64))
    n, k = draw(_sizes(kind, room))
    if rows := shuffled_rows(fields["layout"]):
        n, k = -(-n // rows) * rows, -(-k // WHOLE) * WHOLE
    elif "w4" in op:
        k = -(-k // GROUP) * GROUP
    return Shape(op, m, n, k, dtype=dtype, outdtype=draw(st.sampled_from(OUTPUTS)), scale=scale, **fields)


@st.composite
def solutions(draw: st.DrawFn, skinny: Skinny, shape: Shape, device: Device, split: bool | None = None) -> Solution | None:
    """One of the shape's list or at most three steps of `refine` from there; None where all have a split, or none, unlike asked."""

    def fitting(listed: Any) -> list[Solution]:
        return [solution for solution in listed if split in (None, solution.split_k > 0)]

    listed = list(skinny.enumerate_solutions(shape, device))
    assert listed, f"{shape}: nothing is listed"
    found = fitting(listed) or fitting(near for each in listed for near in skinny.refine(each, shape, device))
    chosen = draw(st.sampled_from(found)) if found else None
    for _ in range(draw(st.integers(0, 3)) if chosen else 0):
        near = fitting(skinny.refine(chosen, shape, device))
        chosen = draw(st.sampled_from(near)) if near else chosen
    return chosen


def bound(skinny: Skinny, solution: Solution, shape: Shape, device: Device) -> Launcher:
    """A solution that is listed, bound; it has to be."""
    answer = skinny.bind(solution, shape, device)
    assert isinstance(answer, Launcher), f"{shape}: {solution}: {answer}"
    return answer


def among_nans(operand: torch.Tensor, begin: int = 0) -> torch.Tensor:
    """The same values, contiguous in a storage whose other elements are NaNs, *begin* elements after an aligned address."""
    plain = getattr(operand, "plain", operand)  # of a shuffled weight its bytes as they lie
    values, before = plain.contiguous().view(torch.uint8).flatten(), operand.element_size() * (MARGIN + begin)
    storage = torch.full((2 * before + len(values),), NANS.get(operand.dtype, 0xFF), dtype=torch.uint8, device=operand.device)
    made = storage[before:][: len(values)].copy_(values).view(operand.dtype).view(operand.shape)
    return made if plain is operand else tunedgemm.as_shuffled(made, operand.layout_name)


def _case(shape: Shape, device: Device, operands: tuple[torch.Tensor, ...]) -> Case:
    op = ops()[shape.op]
    return Case(shape, device, op, operands, op.reference(shape, operands), (), ())


def _made(draw: st.DrawFn, shape: Shape, device: Device) -> tuple[torch.Tensor, ...]:
    return tuple(ops()[shape.op].make_inputs(shape, device.torch_device, draw(st.integers(0, 99))))


@st.composite
def normal(draw: st.DrawFn, shape: Shape, device: Device, begin: Callable[[int], st.SearchStrategy[int]] = aligned) -> Case:
    """Normal operands, each with NaNs around."""
    made = _made(draw, shape, device)
    return _case(shape, device, tuple(among_nans(operand, draw(begin(operand.element_size()))) for operand in made))


@st.composite
def sprinkled(draw: st.DrawFn, shape: Shape, device: Device) -> Case:
    """Normal operands with a few NaNs, subnormal numbers and infinities, where there are any, at random places of x and of the weight."""
    made = _made(draw, shape, device)
    info = torch.finfo(made[0].dtype)
    values = [torch.nan, info.smallest_normal * info.eps, -info.smallest_normal / 2]
    values += [torch.inf, -torch.inf] if width_of(shape.dtype) > 1 else []
    for operand in made[:2]:
        places = st.tuples(*(st.integers(0, size - 1) for size in operand.shape))
        for place, value in draw(st.lists(st.tuples(places, st.sampled_from(values)), max_size=4)):
            getattr(operand, "plain", operand)[place] = value
    return _case(shape, device, tuple(map(among_nans, made)))


@st.composite
def subnormal(draw: st.DrawFn, shape: Shape, device: Device) -> Case:
    """A product without a bias in float32, whose x is subnormal throughout: were that taken for zero, so would be all that comes out."""
    plain = attrs.evolve(shape, outdtype="fp32", epilogue="none", bias_dtype="")
    x, *others = _made(draw, plain, device)
    least = torch.finfo(x.dtype).smallest_normal
    tiny = (x.double().clamp(-7, 7) * least / 8).to(x.dtype)
    assert (tiny.double().abs() < least).all()
    return _case(plain, device, (among_nans(tiny), *map(among_nans, others)))


def launched(launcher: Launcher, case: Case) -> torch.Tensor:
    """The output of a launch into NaNs; an AssertionError where it writes beside its output or its workspace."""
    with Poisoned() as poisoned:
        out: torch.Tensor = launcher.call(*case.operands)
    assert not poisoned.overwritten(), f"{case.shape}: it writes beside its output"
    return out


def fault(case: Case, out: torch.Tensor, wanted: torch.Tensor | None = None) -> str:
    """What is wrong with the numbers of an output by the op's tolerance; "" for a right one."""
    reference = case.reference if wanted is None else wanted
    width = out.numel() if case.shape.n < FEW else case.shape.n
    return case.fault(out.reshape(-1, width), reference.reshape(-1, width))


def misplaced(case: Case, out: torch.Tensor) -> str:
    """What is wrong where operands are not finite: infinities and NaNs are where torch has them, the rest is as it should be."""
    wanted = case.reference.to(out.dtype)
    for name, where in (("NaNs", torch.isnan), ("infinities", torch.isposinf), ("negative infinities", torch.isneginf)):
        if not torch.equal(where(out), where(wanted)):
            return f"{int(where(out).sum())} {name}, not the {int(where(wanted).sum())} that there are"
    finite = wanted.isfinite()
    return fault(case, out.where(finite, 0), case.reference.where(finite, 0))


def bits(out: torch.Tensor) -> torch.Tensor:
    """An output as whole numbers, equal where its bits are."""
    return out.view(torch.int32 if out.element_size() == 4 else torch.int16)
