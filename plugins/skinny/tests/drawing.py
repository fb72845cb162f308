"""Random products for the property tests: shapes, solutions and operands, drawn by hypothesis."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import tunedgemm
from hypothesis import strategies as st
from tunedgemm.plugin import Backend, Device, Launcher, Shape, Solution
from tunedgemm.testing.conformance import Poisoned
from tunedgemm.testing.launching import output_fault
from tunedgemm.tools.launching import ARCHITECTURES, FORMATS
from tunedgemm.tools.tables import ops
from tunedgemm_skinny.limits import FORMATTED, MAX_ROWS, OPS, ORDERS, OUTPUTS, PACKED_K, PACKED_N, PACKED_ROWS, shuffled_rows, width_of

#: Classes of sizes: small N and K; odd ones; large N; large K.
KINDS = ("small", "odd", "wide", "deep")
#: Ranges of M, by the families and their instructions.
ROWS = ((1, 8), (1, 1), (9, 16), (17, 32), (33, MAX_ROWS))
#: NaNs before and after each operand; a multiple that keeps the address aligned.
MARGIN = 64
#: Byte of a NaN where it is not 0xFF. int8 has no NaN, so it takes its least number.
NANS = {torch.int8: 0x80, torch.float8_e4m3fnuz: 0x80}
#: Numbers of products of a batch.
BATCHES = st.sampled_from((1, 2, 3, 5, 17))
#: Weight orders by op; other ops have plain weights.
_SHUFFLED = ("aiter16x16", "aiter32x16")
LAYOUTS = {
    "a16w16": ("row", *_SHUFFLED), "a8w8_bpreshuffle": _SHUFFLED, "a8w8_blockscale_bpreshuffle": _SHUFFLED[:1],
    "a4w4_blockscale": ("row", _SHUFFLED[0]), "a16w4_blockscale": ("row", _SHUFFLED[0]),
}  # fmt: skip
#: Multiple of K of a shuffled weight, for every dtype; mxfp4 values that share a scale.
WHOLE, GROUP = 64, 32
#: Columns below which all rows are judged as one: a single number may be small by cancellation.
FEW = 8


@attrs.frozen
class Room:
    """Limits of a drawn product.

    Attributes:
        n, k: most weight rows, and most elements of each.
        elements: most elements of the weight.
        m: most rows of x.
    """

    n: int
    k: int
    elements: int
    m: int = MAX_ROWS


def aligned(width: int) -> st.SearchStrategy[int]:
    """Draw an operand's offset from an aligned address, in elements, that a launcher accepts."""
    return st.sampled_from((0, 16 // width, 48 // width))


def dtypes_of(op: str, gfx: str, *, floating: bool = False) -> tuple[str, ...]:
    """Return the dtypes of an op that an architecture multiplies; with *floating* no integers."""
    whole = () if floating else ("int8", "fp4x2")
    if op == FORMATTED and gfx.startswith("gfx"):
        return ()
    return tuple(dtype for dtype in OPS[op][0] if dtype in ("bf16", "fp16", ARCHITECTURES[gfx].fp8, *whole))


@st.composite
def _sizes(draw: st.DrawFn, kind: str, room: Room) -> tuple[int, int]:
    """Draw N and K of a class of sizes, with K for loads of every width."""
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
    """Draw a shape of a class of sizes, with any dtypes, scales and bias of the op."""
    layouts = LAYOUTS.get(op, ("row",))
    fewest, most = draw(st.sampled_from([(least, most) for least, most in ROWS if most <= room.m]))
    m, dtype, scale = draw(st.integers(fewest, most)), draw(st.sampled_from(dtypes)), draw(st.sampled_from(OPS[op][1]))
    bias = draw(st.sampled_from(("", *OUTPUTS))) if scale != "block" or "w4" in op or op == FORMATTED else ""
    fields: dict[str, Any] = {"epilogue": "bias", "bias_dtype": bias} if bias else {}
    fields["layout"] = draw(st.sampled_from(layouts))
    if op.startswith("batched_"):
        batches = draw(BATCHES)
        fields["extra"] = {"B": batches}
        room = attrs.evolve(room, n=max(room.n // batches, 8), k=max(room.k // batches, 8), elements=max(room.elements // batches, 64))
    n, k = draw(_sizes(kind, room))
    if op == FORMATTED:
        form = FORMATS[draw(st.sampled_from(list(ORDERS) if dtype == "bf16" else [name for name in ORDERS if "int" in name]))]
        fields["extra"] = {"w_format": form.name, "w_group": draw(st.sampled_from(form.groups))}
        m, n, k = min(m, PACKED_ROWS), -(-n // PACKED_N) * PACKED_N, -(-k // PACKED_K[-1]) * PACKED_K[-1]
    if rows := shuffled_rows(fields["layout"]):
        n, k = -(-n // rows) * rows, -(-k // WHOLE) * WHOLE
    elif "w4" in op:
        k = -(-k // GROUP) * GROUP
    return Shape(op, m, n, k, dtype=dtype, outdtype=draw(st.sampled_from(OUTPUTS)), scale=scale, **fields)


@st.composite
def solutions(draw: st.DrawFn, skinny: Backend, shape: Shape, device: Device, split: bool | None = None) -> Solution | None:
    """Draw a listed solution or a neighbour at most three steps away.

    None if none has the wanted *split*.
    """

    def fitting(listed: Any) -> list[Solution]:
        return [solution for solution in listed if split in (None, solution.split_k > 0)]

    listed = list(skinny.solutions(shape, device))
    assert listed, f"{shape}: no solution is listed"
    candidates = fitting(listed) or fitting(near for solution in listed for near in skinny.refine(solution, shape, device))
    chosen = draw(st.sampled_from(candidates)) if candidates else None
    for _ in range(draw(st.integers(0, 3)) if chosen else 0):
        near = fitting(skinny.refine(chosen, shape, device))
        chosen = draw(st.sampled_from(near)) if near else chosen
    return chosen


def bound(skinny: Backend, solution: Solution, shape: Shape, device: Device) -> Launcher:
    """Bind a listed solution; it must bind."""
    answer = skinny.bind(solution, shape, device)
    assert isinstance(answer, Launcher), f"{shape}: {solution}: {answer}"
    return answer


def among_nans(operand: torch.Tensor, begin: int = 0) -> torch.Tensor:
    """Copy an operand into a storage of NaNs, *begin* elements after an aligned address."""
    plain = getattr(operand, "plain", operand)  # bytes of a shuffled weight, or of shuffled scales, in storage order
    values, before = plain.contiguous().view(-1).view(torch.uint8), operand.element_size() * (MARGIN + begin)
    storage = torch.full((2 * before + len(values),), NANS.get(operand.dtype, 0xFF), dtype=torch.uint8, device=operand.device)
    copy = storage[before:][: len(values)].copy_(values).view(operand.dtype).view(operand.shape)
    if isinstance(operand, tunedgemm.ShuffledScale):
        return tunedgemm.as_shuffled_scale(copy)
    return copy if plain is operand else tunedgemm.as_shuffled(copy, operand.layout_name)


@attrs.frozen(eq=False)
class Case:
    """Operands of one shape with their exact result."""

    shape: Shape
    operands: tuple[torch.Tensor, ...]
    reference: torch.Tensor


def _case(shape: Shape, operands: tuple[torch.Tensor, ...]) -> Case:
    return Case(shape, operands, ops()[shape.op].reference(shape, operands))


def _inputs(draw: st.DrawFn, shape: Shape, device: Device) -> tuple[torch.Tensor, ...]:
    return tuple(ops()[shape.op].make_inputs(shape, device.torch_device, draw(st.integers(0, 99))))


@st.composite
def normal(draw: st.DrawFn, shape: Shape, device: Device) -> Case:
    """Draw normal operands, each within NaNs."""
    inputs = _inputs(draw, shape, device)
    placed = (None if operand is None else among_nans(operand, draw(aligned(operand.element_size()))) for operand in inputs)
    return _case(shape, tuple(placed))


@st.composite
def sprinkled(draw: st.DrawFn, shape: Shape, device: Device) -> Case:
    """Draw normal operands with a few NaNs, subnormals and infinities in x and the weight."""
    inputs = _inputs(draw, shape, device)
    info = torch.finfo(inputs[0].dtype)
    values = [torch.nan, info.smallest_normal * info.eps, -info.smallest_normal / 2]
    values += [torch.inf, -torch.inf] if width_of(shape.dtype) > 1 else []
    for operand in inputs[:2]:
        indices = st.tuples(*(st.integers(0, size - 1) for size in operand.shape))
        for index, value in draw(st.lists(st.tuples(indices, st.sampled_from(values)), max_size=4)):
            getattr(operand, "plain", operand)[index] = value
    return _case(shape, tuple(map(among_nans, inputs)))


@st.composite
def subnormal(draw: st.DrawFn, shape: Shape, device: Device) -> Case:
    """Draw a float32 product without bias whose x is all subnormal.

    Flushed to zero, its output would be zero.
    """
    plain = attrs.evolve(shape, outdtype="fp32", epilogue="none", bias_dtype="")
    x, *others = _inputs(draw, plain, device)
    least = torch.finfo(x.dtype).smallest_normal
    tiny = (x.double().clamp(-7, 7) * least / 8).to(x.dtype)
    assert (tiny.double().abs() < least).all()
    return _case(plain, (among_nans(tiny), *map(among_nans, others)))


def launched(launcher: Launcher, case: Case) -> torch.Tensor:
    """Launch into NaNs; raise AssertionError for a write outside output and workspace."""
    with Poisoned() as poisoned:
        out: torch.Tensor = launcher.call(*case.operands)
    assert not poisoned.overwritten(), f"{case.shape}: it writes outside its output"
    return out


def fault(case: Case, out: torch.Tensor, wanted: torch.Tensor | None = None) -> str:
    """Return the fault of an output by the op's tolerance; "" for a right one."""
    reference = case.reference if wanted is None else wanted
    width = out.numel() if case.shape.n < FEW else case.shape.n
    return output_fault(case.shape, out.reshape(-1, width), reference.reshape(-1, width))


def misplaced(case: Case, out: torch.Tensor) -> str:
    """Return the fault of an output whose infinities and NaNs must match torch's."""
    wanted = case.reference.to(out.dtype)
    for name, where in (("NaNs", torch.isnan), ("infinities", torch.isposinf), ("negative infinities", torch.isneginf)):
        if not torch.equal(where(out), where(wanted)):
            return f"{int(where(out).sum())} {name}, not {int(where(wanted).sum())}"
    finite = wanted.isfinite()
    return fault(case, out.where(finite, 0), case.reference.where(finite, 0))


def bits(out: torch.Tensor) -> torch.Tensor:
    """View an output as integers, for comparisons of bits."""
    return out.view(torch.int32 if out.element_size() == 4 else torch.int16)
