"""Bits of rows on standard operands: equal operands everywhere, and what the hashes find."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import attrs
import pytest
import torch
from tunedgemm.backends.backend import with_plain_weights
from tunedgemm.backends.launcher import Launcher
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.formats.tensor_bytes import raw
from tunedgemm.ops.scale_order import BLOCK
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.testing.fakes import exact
from tunedgemm.testing.shapes import shapes_of
from tunedgemm.tuner.bits import Bits, StandardOperands, measure, row_hashes
from tunedgemm.tuner.trial import CONTENTS

CPU, OP, SHAPE = torch.device("cpu"), op_named("a16w16"), Shape("a16w16", 0, 32, 256)
SIZES = (1, 2, 16, 17, 33)

#: Multiplies x by a transposed weight.
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def bits_of(call: Callable[..., torch.Tensor], shape: Shape = SHAPE, sizes: tuple[int, ...] = SIZES) -> Bits:
    operands = StandardOperands(op_named(shape.op), shape, CPU)
    return measure(operands, lambda at: with_plain_weights(Launcher(functools.partial(call, at)), at), sizes)


def product(at: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.double() @ weight.double().t()).to(x.dtype)


def split(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    half = x.shape[1] // 2
    return ((x[:, :half].float() @ weight[:, :half].float().t()) + (x[:, half:].float() @ weight[:, half:].float().t())).to(x.dtype)


def distinct_shapes(name: str) -> list[Shape]:
    """Small examples of an op, one for each format, whose rows share no scale computed from all of them."""
    examples = sorted(shapes_of(name), key=lambda shape: (op_named(name).flops(shape), str(shape)))
    own = [shape for shape in examples if shape.m and "per_Tensor" not in dict(shape.extra).values()]
    formats = {(shape.dtype, shape.scale, shape.layout, shape.bias, dict(shape.extra).get("w_format")): shape for shape in reversed(own)}
    return list(formats.values())


@pytest.mark.parametrize("name", sorted(ops()))
def test_rows_of_every_op_have_bits_of_their_own(name: str) -> None:
    """Alone, among others and in each batch; a kernel that depends on M is found."""
    for shape in distinct_shapes(name):

        def call(at: Shape, *operands: torch.Tensor, wrong: bool = False) -> torch.Tensor:
            out = exact(Solution("fake", "k"), at, *operands)
            return out * 1.03125 if wrong and at.m == 17 else out

        found = bits_of(call, shape)
        assert (found.fault, found.served, len(found.rows)) == ("", SIZES, CONTENTS), shape
        assert len(set(found.rows)) > 1, shape
        assert "M = 17" in bits_of(functools.partial(call, wrong=True), shape).fault, shape


def test_operands_depend_on_no_generator() -> None:
    """Whatever the op draws, on any device and in any version of torch, all values are overwritten."""
    scaled_groups = ("a8w8_blockscale", "a8w8_blockscale_bpreshuffle", "a4w4_blockscale", "a8w8_mxfp8", "a4w4_nvfp4")
    for name in ("a16w16", "a8w8", *scaled_groups, "batched_bf16", "fmoe", "a16wn"):
        op = op_named(name)
        other = attrs.evolve(op, make_inputs=lambda shape, device, seed, op=op: op.make_inputs(shape, device, seed + 1))
        for shape in distinct_shapes(name):
            one, two = (StandardOperands(each, shape, CPU).at(33) for each in (op, other))
            assert all(torch.equal(raw(first), raw(second)) for first, second in zip(one, two, strict=True) if first is not None), shape


def test_an_op_may_declare_no_factors() -> None:
    """The first two operands are then taken for x and the weight."""
    one, two = (StandardOperands(op, SHAPE, CPU).at(CONTENTS) for op in (OP, attrs.evolve(OP, factors=lambda _: ())))
    assert all(map(torch.equal, one, two))


def test_operands_stay_the_same_between_versions() -> None:
    """Labels of tables would change with them."""
    operands = StandardOperands(OP, SHAPE, CPU).at(CONTENTS)
    digests = [hashlib.sha256(raw(operand).numpy().tobytes()).hexdigest()[:16] for operand in operands]

    assert digests == ["2288adad072e8fb2", "fb8f53b23700ca94"]


def test_sums_show_how_they_were_rounded() -> None:
    """Another order of fp32 sums, or partial sums in bf16, has another label."""
    orders = (
        lambda at, x, weight: (x.float() @ weight.float().t()).to(x.dtype),
        lambda at, x, weight: split(x, weight),
        lambda at, x, weight: (x[:, :128] @ weight[:, :128].t()) + (x[:, 128:] @ weight[:, 128:].t()),
    )
    shape = attrs.evolve(SHAPE, n=256, k=1024)

    assert len({bits_of(order, shape, (CONTENTS,)).label for order in orders}) == 3


def exactly(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply a block in float32."""
    return x.float() @ weight.float().t()


def in_parts(at: Shape, *operands: torch.Tensor, parts: int, step: int = BLOCK, multiply: Multiply = exactly) -> torch.Tensor:
    """Add *parts* of K after each other, each in steps of K; by block, sums of a step have their scales."""
    x, weight, *scales = operands
    out, first, by_block = torch.zeros(len(x), len(weight)), 0, at.scale == "block"
    for part in torch.arange(x.shape[1] // step).tensor_split(parts):
        sums = torch.zeros_like(out)
        for number in part.tolist():
            place = slice(number * step, (number + 1) * step)
            product = multiply(x[:, place], weight[:, place])
            if by_block:
                product = product * (scales[0][:, number : number + 1] * scales[1][:, number].repeat_interleave(BLOCK)[: len(weight)])
            sums += product
        out, first = (out + sums if first else sums), 1
    return (out if by_block or not scales else out * scales[0].reshape(-1, 1) * scales[1].reshape(1, -1)).to(torch.bfloat16)


BY_ROW = Shape("a8w8", 0, 64, 4096, "fp8_e4m3fn", "bf16", scale="row")


@pytest.mark.parametrize(
    "shape", [BY_ROW, Shape("a8w8_blockscale", 0, 128, 4096, "fp8_e4m3fn", "bf16", scale="block"), Shape("a16w16", 0, 64, 4096)], ids=str
)
def test_each_number_of_parts_has_a_label(shape: Shape) -> None:
    """Split-K of 1 to 6 parts gives six classes, by block, too."""
    assert len({bits_of(functools.partial(in_parts, parts=parts), shape, (CONTENTS,)).label for parts in range(1, 7)}) == 6


def hopper(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply a block as wgmma does fp8: 32 products at a time, cut to 13 bits below the largest."""
    out = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for first, second in zip(x.double().split(32, 1), weight.double().split(32, 1), strict=True):
        terms = torch.cat([first.unsqueeze(1) * second, out.unsqueeze(2)], 2)
        unit = terms.abs().amax(2, keepdim=True).clamp_min(2.0**-60).log2().floor().sub(13).exp2()
        out = (terms / unit).trunc().mul(unit).sum(2)
    return out.float()


@pytest.mark.parametrize("k", [2048, 4096])
def test_parts_of_promoted_fp8_have_labels(k: int) -> None:
    """Sums of blocks that the tensor core has cut, added in float32, in 1 to 6 parts."""
    shape = attrs.evolve(BY_ROW, n=8, k=k)
    assert len({bits_of(functools.partial(in_parts, parts=parts, multiply=hopper), shape, (CONTENTS,)).label for parts in range(1, 7)}) == 6


EXPERTS = attrs.evolve(next(shape for shape in op_named("fmoe").examples if shape.m == 1), k=64)
EXPERTS = attrs.evolve(EXPERTS, extra={**dict(EXPERTS.extra), "expert": 16, "topk": 5})


def by_experts(at: Shape, hidden: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, how: str):
    """Multiply token by token, and add the results of experts in some order."""
    out = []
    for token, (x, factors, experts) in enumerate(zip(hidden.float(), weights, ids.long().tolist(), strict=True)):
        half = x.shape[0] // 2
        cut = how == "split" or (how == "neighbours" and token and experts[0] in ids[token - 1].tolist())
        parts = [x[:half], x[half:]] if cut else [x]
        first = [w1[expert].float() for expert in experts]
        sums = [sum(w[:, at : at + len(part)] @ part for at, part in zip((0, half), parts, strict=False)) for w in first]
        middle = [torch.nn.functional.silu(gate) * up for gate, up in (each.chunk(2) for each in sums)]
        each = [w2[expert].float() @ row * factor for expert, row, factor in zip(experts, middle, factors, strict=True)]
        order = sorted(range(len(each)), key=lambda slot: experts[slot]) if how == "by expert" else range(len(each))
        out.append(sum(each[slot] for slot in order))
    return torch.stack(out).to(torch.bfloat16)


def test_sums_of_experts_show_their_order() -> None:
    """Along K of the first product, and over the experts of a token."""
    labels = [bits_of(functools.partial(by_experts, how=how), EXPERTS, (1, 17)).label for how in ("slots", "by expert", "split")]

    assert "" not in labels and len(set(labels)) == 3


def test_a_token_whose_bits_depend_on_the_experts_of_others_is_found() -> None:
    """A kernel that splits K where the token before has the same expert."""
    assert "has other bits" in bits_of(functools.partial(by_experts, how="neighbours"), EXPERTS, (1, 17)).fault


def test_the_order_of_scales_has_a_label() -> None:
    """Two roundings of scales differ in few outputs."""

    def scaled(at: Shape, x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, *, first: bool) -> torch.Tensor:
        sums, xs, ws = x.float() @ weight.float().t(), xs.reshape(-1, 1), ws.reshape(1, -1)
        return (sums * xs * ws if first else sums * ws * xs).to(torch.bfloat16)

    shape = Shape("a8w8", 0, 512, 256, "fp8_e4m3fn", "bf16", scale="row")
    assert len({bits_of(functools.partial(scaled, first=first), shape, (CONTENTS,)).label for first in (False, True)}) == 2


def by_size(at: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return split(x, weight) if at.m >= 16 else product(at, x, weight)


def by_place(at: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = product(at, x, weight)
    out[15::16] = split(x, weight)[15::16]
    return out


def one_bit(at: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = product(at, x, weight)
    out.view(torch.int16)[32:, -1] ^= 1
    return out


@pytest.mark.parametrize("planted", [by_size, by_place, one_bit])
def test_a_row_that_depends_on_m_or_its_place_is_found(planted: Callable[..., torch.Tensor]) -> None:
    """A split by M, a tile whose last row is added otherwise, and a single bit of a single element."""
    found = bits_of(planted)

    assert "has other bits than at another M or place" in found.fault
    assert (found.label, found.raised) == ("", False)


def test_equal_kernels_have_one_label_as_far_as_they_serve() -> None:
    """A refused M is named; a kernel that serves no M has no label."""

    def refusing(most: int) -> Bits:
        def bind(at: Shape) -> Launcher | Unsupported:
            return Launcher(functools.partial(product, at)) if at.m <= most else Unsupported("few rows only")

        return measure(StandardOperands(OP, SHAPE, CPU), bind, SIZES)

    whole, some, none = refusing(33), refusing(2), refusing(0)

    assert some.label == whole.label != ""
    assert (some.served, some.refused[0]) == ((1, 2), (16, "few rows only"))
    assert (none.label, none.served) == ("", ())


def test_a_kernel_for_some_m_stops_where_no_kernel_for_every_m_has_its_bits() -> None:
    """One with their bits keeps their label, and one for every M has a label whatever its bits are."""
    operands, any_m, calls = StandardOperands(OP, SHAPE, CPU), set[tuple[int, ...]](), list[int]()

    def found(kernel: Callable[..., torch.Tensor], most: int = 10**6) -> Bits:
        def counted(at: Shape, *given: torch.Tensor) -> torch.Tensor:
            calls.append(at.m)
            return kernel(at, *given)

        def bind(at: Shape) -> Launcher | Unsupported:
            return Launcher(functools.partial(counted, at)) if at.m <= most else Unsupported("few rows only")

        calls.clear()
        return measure(operands, bind, SIZES, any_m)

    def unlike(at: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = product(at, x, weight)
        out.view(torch.int16)[:, -1] ^= 1
        return out

    early, whole = found(unlike, 8), found(product)
    alike, other = found(product, 8), found(unlike, 8)
    assert (early.others, len(early.label), any_m) == (False, 16, {whole.rows})
    assert alike.label == whole.label
    assert (other.others, other.label, other.served, calls) == (True, "", (), [2])
    assert other.detail.startswith("no kernel that serves every M has its bits; it refuses M = 16: few rows only")
    assert found(unlike).label == early.label == found(unlike, 8).label


@pytest.mark.parametrize(("name", "shows"), [("a8w8", True), ("a8w8_blockscale", True), ("a4w4_blockscale", False), ("a16wn", False)])
def test_a_declared_order_counts_where_operands_do_not_show_it(name: str, shows: bool) -> None:
    """Values in small groups do not cancel, so equal bits of two orders of sums say nothing."""
    shape = attrs.evolve(op_named(name).examples[0], n=256, k=512)
    operands = StandardOperands(op_named(name), shape, CPU)

    def label(order: str) -> str:
        return measure(operands, lambda at: Launcher(lambda *_: torch.zeros(at.m, 8)), (1,), order=order).label

    assert operands.shows_orders is shows
    assert (label("wgmma-k16") == label("wgmma-k16-s2048")) is shows
    assert label("") == label("")


def test_errors_of_calls_are_faults() -> None:
    """The error's text is the reason, and the kernel may be right at other M."""

    def failing(at: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("an illegal address")

    found = bits_of(failing)

    assert (found.label, found.raised) == ("", True)
    assert "an illegal address" in found.fault


def test_changed_operands_are_seen() -> None:
    """Later kernels would be measured on other values."""
    operands = StandardOperands(OP, SHAPE, CPU)
    operands.at(2), operands.at(3)
    before = operands.changed()
    operands.at(3)[0][1, 1] += 1

    assert (before, operands.changed()) == (False, True)


def test_each_element_counts_in_its_row_alone() -> None:
    """Also in outputs of batches, whose rows are joined."""
    out = torch.zeros(2, 3, 5)
    changed = out.clone()
    changed[1, 2, 4] = 1.0

    assert [one != other for one, other in zip(row_hashes(out, 3), row_hashes(changed, 3), strict=True)] == [False, False, True]


def test_kernels_that_agree_on_the_standard_operands_alone_have_one_label() -> None:
    """The limit of what equal hashes prove: the second is another kernel for any other operands."""

    def planted(at: Shape, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        standard = StandardOperands(OP, SHAPE, CPU).at(CONTENTS)[1]
        return product(at, x, weight) if torch.equal(weight, standard) else split(x, weight)

    assert bits_of(planted).label == bits_of(product).label
