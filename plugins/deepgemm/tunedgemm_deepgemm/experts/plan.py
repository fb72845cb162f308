"""Plan the small kernels around two products of experts, as data: programs, grids and sizes.

A plan does not depend on the values of operands, so a captured call serves any routing. The
launcher and the tests in Triton's interpreter run the same plans.
"""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Shape

from tunedgemm_deepgemm.limits import BLOCK
from tunedgemm_deepgemm.names import LIBRARY_ROWS, Kernel, expert_rows
from tunedgemm_deepgemm.product import Product, products_of

#: Triton's names of dtypes.
_TYPES = {"bf16": "bf16", "fp16": "fp16"}
_FP8, _LARGEST = "fp8e4nv", 448.0
#: Sizes of a segment of pairs, and how many segments' counts are read at a time.
_CHUNKS, _STEP = (256, 1024, 4096), 16
#: Most programs along N of a block that is spilled: unused ones end at once, but cost their start.
_TILES = 8
#: Elements of a program that quantises or sums.
_ELEMENTS = 1024


@attrs.frozen(cache_hash=True)
class Program:
    """All that a compiled function depends on, except the architecture.

    Attributes:
        function: its name in `kernels.experts`.
        types: Triton type of each parameter that is not constant.
        constants: value of each constexpr parameter, in order.
        multiples: largest power of two up to 16 that divides each integer that is not constant.
        warps: warps of a program.
        stages: loads of a loop in flight.
    """

    function: str
    types: tuple[str, ...]
    constants: tuple[int | float | bool, ...]
    multiples: tuple[int, ...]
    warps: int = 4
    stages: int = 1


@attrs.frozen
class Step:
    """One launch.

    Attributes:
        program: what is launched.
        grid: its programs along three axes.
        integers: the arguments after the addresses.
    """

    program: Program
    grid: tuple[int, int, int]
    integers: tuple[int, ...]


@attrs.frozen
class Plan:
    """Everything of a call but addresses.

    Attributes:
        products: the two products.
        pairs, topk, experts: pairs of token and expert, pairs of a token, and experts.
        counts: elements of the counts by segment; 0 where one segment counts for itself.
        count, place, quantise, activate, combine: the launches; *count* only with counts.
        weighted_first: whether the routing weight is applied to the first product.
        rows: rows of all experts, or of one in the masked layout; beyond the products' rows if
            those of a usual routing are theirs alone.
        spills: the products of the rows beyond, one for each product; none without such rows.
    """

    products: tuple[Product, ...]
    pairs: int
    topk: int
    experts: int
    counts: int
    count: Step
    place: Step
    quantise: Step
    activate: Step
    combine: Step
    weighted_first: bool
    rows: int
    spills: tuple[Step, ...] = ()

    @property
    def groups(self) -> int:
        """Return the elements that tell a product whose its rows are."""
        first = self.products[0]
        return self.experts if first.expected_m else self.rows

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the launches that the plan has."""
        return (*[self.count] * bool(self.counts), self.place, self.quantise, self.activate, self.combine, *self.spills)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers, though the first ones are free before the last is taken."""
        return 4 * (self.pairs + self.groups + self.counts) + sum(_bytes_of(product, self.rows) for product in self.products)


def plan_of(shape: Shape, kernel: Kernel) -> Plan:
    """Return the plan of a kernel for exactly this shape, which has tokens; needs no device."""
    topk, experts, weighted_first = int(shape["topk"]), int(shape["expert"]), bool(shape["doweight_stage1"])
    pairs, products = shape.m * topk, products_of(shape, kernel)
    (first, second), rows = products, expert_rows(shape, kernel)
    chunk = next((size for size in _CHUNKS if size >= pairs), _CHUNKS[-1])
    segments, padded = -(-pairs // chunk), max(_power(experts), 32)
    wide, narrow = (min(_power(-(-size // BLOCK)), _ELEMENTS // BLOCK) for size in (shape.n, shape.k))
    together, tile = _ELEMENTS // BLOCK // narrow, min(_power(shape.n), _ELEMENTS)
    dtypes, warps = [f"*{_TYPES[name]}" for name in (shape.dtype, shape.outdtype)], 8 if chunk == _CHUNKS[-1] else 4
    return Plan(
        products,
        pairs,
        topk,
        experts,
        segments * padded if segments > 1 else 0,
        _step("count_pairs", ("*i32", "*i32"), (segments, 1), (pairs, experts), (chunk, padded), warps),
        _step(
            "place_pairs",
            ("*i32",) * 4,
            (experts, segments),
            (pairs, experts, rows, segments),
            (chunk, padded, kernel.expert_rows, bool(first.expected_m), _STEP if segments > 1 else 0),
            warps,
        ),
        _step(
            "quantise_tokens",
            (dtypes[0], "*i32", f"*{_FP8}", "*fp32"),
            (shape.m, -(-shape.n // (wide * BLOCK))),
            (shape.n, first.m),
            (topk, wide, _LARGEST),
        ),
        _step(
            "activate_pairs",
            ("*bf16", "*i32", "*fp32", f"*{_FP8}", "*fp32"),
            (-(-pairs // together), -(-shape.k // (narrow * BLOCK))),
            (pairs, shape.k, second.m),
            (together, narrow, _LARGEST, weighted_first),
        ),
        _step(
            "combine_pairs",
            ("*bf16", "*i32", "*fp32", dtypes[1]),
            (shape.m, -(-shape.n // tile)),
            (shape.n,),
            (topk, tile, not weighted_first),
        ),
        weighted_first,
        rows,
        tuple(_spill(product, rows, kernel.expert_rows) for product in products) if rows > first.m else (),
    )


def _spill(product: Product, rows: int, size: int) -> Step:
    """Return the launch for the rows beyond a product's."""
    tiles = -(-product.n // BLOCK)
    grid = (rows - product.m) // size, min(tiles, _TILES)
    pointers = (f"*{_FP8}", "*fp32", f"*{_FP8}", "*fp32", "*i32", "*bf16")
    step = _step("multiply_spilled", pointers, grid, (product.m, product.n, product.k), (size, BLOCK), 8 if size == LIBRARY_ROWS else 4)
    return attrs.evolve(step, program=attrs.evolve(step.program, stages=3))


def _step(
    function: str,
    pointers: tuple[str, ...],
    grid: tuple[int, int],
    integers: tuple[int, ...],
    constants: tuple[int | float | bool, ...],
    warps: int = 4,
) -> Step:
    multiples = tuple(next(power for power in (16, 8, 4, 2, 1) if number % power == 0) for number in integers)
    return Step(Program(function, (*pointers, *["i32"] * len(integers)), constants, multiples, warps), (*grid, 1), integers)


def _power(number: int) -> int:
    """Return the next power of two."""
    return 1 << (number - 1).bit_length()


def _bytes_of(product: Product, rows: int) -> int:
    """Return the bytes of a product's output, x and scales, of *rows* rows, or of so many of each expert."""
    return rows * (product.experts if product.expected_m else 1) * (2 * product.n + product.k + 4 * product.blocks[1])
