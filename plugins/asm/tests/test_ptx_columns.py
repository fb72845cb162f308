"""Test weights in columns of 128 bytes on the emulator, and their lists and refusals."""

from __future__ import annotations

import contextlib
import itertools
import re
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Launcher, Shape, Solution, Unsupported
from tunedgemm.testing.launching import without_extension
from tunedgemm.tools.launching import MapDescription
from tunedgemm.tools.tables import op_named, ops
from tunedgemm_asm import Asm, asm
from tunedgemm_asm.ptx import build
from tunedgemm_asm.ptx.kernel import text_of
from tunedgemm_asm.ptx.launch import arguments_of
from tunedgemm_asm.ptx.limits import unfit
from tunedgemm_asm.ptx.names import COLUMNS, KernelConfig, parse_name
from tunedgemm_asm.ptx.space import enumerate_candidates, refine
from tunedgemm_asm.ptx.tensormap import Operand

pytestmark = pytest.mark.nightly

H200 = Device("sm_90", 132, "nvidia-h200")
CPU = Device("cpu-avx2", 2, "cpu")


def of(op: str, sizes: tuple[int, int, int], dtype: str = "bf16", **fields: Any) -> Shape:
    """Return a shape of an op with such a weight."""
    scale = {"a8w8_bpreshuffle": "row", "a8w8_blockscale_bpreshuffle": "block"}.get(op, "none")
    return Shape(op, *sizes, dtype, **{"outdtype": "bf16", "scale": scale, "layout": COLUMNS} | fields)


BIASED: dict[str, Any] = {"epilogue": "bias", "bias_dtype": "bf16"}
BY_ROW, BY_BLOCK, FP8 = "a8w8_bpreshuffle", "a8w8_blockscale_bpreshuffle", "fp8_e4m3fn"
#: Configuration, shape, splits, multiprocessors: tails in M and N, blocks with several tiles.
CASES = [
    (KernelConfig(128, 160, 3), of("a16w16", (150, 200, 192)), 1, 2),
    (KernelConfig(64, 40, 3, 1), of("a16w16", (70, 74, 128), **BIASED), 1, 2),
    (KernelConfig(64, 32, 3, 1, group=2), of("a16w16", (150, 73, 448), "fp16", outdtype="fp32"), 4, 2),
    (KernelConfig(16, 128, 4, swapped=True), of("a16w16", (13, 300, 320), **BIASED), 1, 2),
    (KernelConfig(8, 128, 4, swapped=True), of("a16w16", (5, 301, 512)), 3, 2),
    (KernelConfig(64, 32, 3, 1, 2, 2), of("a16w16", (150, 73, 320), outdtype="fp32"), 1, 4),
    (KernelConfig(16, 128, 3, 2, 2, 2, swapped=True), of("a16w16", (20, 400, 320)), 3, 5),
    (KernelConfig(64, 16, 3, turns=True), of("a16w16", (200, 40, 192)), 2, 2),
    (KernelConfig(128, 32, 3, panels=1), of("a16w16", (150, 72, 192)), 1, 2),
    (KernelConfig(128, 128, 3, promoted=True), of(BY_ROW, (150, 200, 256), FP8, **BIASED), 1, 2),
    (KernelConfig(24, 64, 4, 1, swapped=True), of(BY_ROW, (47, 101, 256), FP8, scale="tensor"), 1, 2),
    (KernelConfig(64, 48, 3, 1, 2), of(BY_ROW, (150, 73, 640), "int8", outdtype="fp32"), 3, 4),
    (KernelConfig(64, 192, 3, 1, promoted=True, staged=True), of(BY_BLOCK, (70, 400, 384), FP8), 2, 3),
    (KernelConfig(64, 176, 3, 1, promoted=True, staged=True), of(BY_BLOCK, (70, 1300, 128), FP8), 1, 2),
    (KernelConfig(128, 1 << 5, 3, 2, 2, 2, promoted=True, staged=True), of(BY_BLOCK, (300, 165, 640), FP8), 3, 5),
    (KernelConfig(8, 64, 4, 1, swapped=True, promoted=True, staged=True), of(BY_BLOCK, (1, 201, 640), FP8), 3, 2),
    (KernelConfig(24, 128, 4, swapped=True, promoted=True, staged=True), of(BY_BLOCK, (47, 333, 256), FP8, outdtype="fp32"), 1, 2),
]
SMALL = (KernelConfig(64, 16, 2, 1), of("a16w16", (100, 24, 384)), 1)
BLOCKS = (KernelConfig(64, 96, 2, 1, promoted=True, staged=True), of(BY_BLOCK, (100, 200, 384), FP8), 1)


#: Config, shape, splits, multiprocessors, seeds: `test_ptx_run` runs these orders of events.
ORDERS = [(*case[:2], 2, 2, range(1, 5)) for case in (SMALL, BLOCKS)]
#: Name -> case, pattern in its text, replacement: a plausible mistake of a kernel.
MISTAKES = {
    "the same column is loaded for each step": (SMALL, r"(add\.u32 (%r\d+), \2), 1;\n(    add\.u32 (%r\d+), \4, 1;)", r"\1, 0;\n\3"),
    "column is an element along K": (SMALL, r"\{(%r\d+), (%r\d+), (%r\d+)\}", r"{\1, \2, \1}"),
    "column begins at an element": (
        SMALL,
        r"(tensor\.3d.*\{)%r\d+(, %r\d+, %r\d+\}(?:.*\n)+?    add\.u32 (%r\d+), \3, 64;)",
        r"\1\3\2",
    ),
    "a weight of rows is loaded from columns": (SMALL, r"tensor\.3d(.*\[%d\d+, \{)%r\d+, (%r\d+), (%r\d+)\}", r"tensor.2d\1\3, \2}"),
    "scales of x lie row by row": (BLOCKS, r"mul\.wide\.u32 (%d\d+), %r0, 4;", r"mov.b64 \1, 4;"),
    "scales of x begin at the row's first block": (BLOCKS, r"mad\.lo\.u32 (%r\d+), 0, %r0, (%r\d+);", r"mad.lo.u32 \1, \2, 3, 0;"),
}


@pytest.mark.parametrize(
    "case", [SMALL, BLOCKS, (KernelConfig(16, 128, 4, swapped=True), *SMALL[1:])], ids=["16 bits", "blocks", "swapped"]
)
def test_only_loads_of_the_weight_differ(case: tuple[KernelConfig, Shape, int]) -> None:
    """The text differs from a plain weight's only in the load and in scales."""
    config, shape, splits = case
    plain = attrs.evolve(shape, op=shape.op.removesuffix("_bpreshuffle"), layout="row")
    texts = [text_of(arguments_of(config, splits, each, 132).variant) for each in (plain, shape)]
    assert [len(re.findall(r"bulk\.tensor\.3d", text)) for text in texts] == [0, 1]
    assert [len(re.findall(r"bulk\.tensor\.[23]d\.shared", text)) for text in texts] == [2, 2]
    assert COLUMNS in texts[1].splitlines()[0] and COLUMNS not in texts[0]


def test_a_descriptor_has_the_columns(failing: Any) -> None:
    """The tensor map has three dimensions, and a box is contiguous."""

    def check(dtype: str, kind: int, wide: int) -> None:
        operand = Operand(dtype, 37, 3 * wide, 24, columns=True)
        assert operand.description == MapDescription(kind, (wide, 37, 3), (128, 128 * 37), (wide, 24, 1), swizzle=3, promotion=3)
        assert Operand(dtype, 37, 3 * wide, 24).dimensions == ((3 * wide, 37), (384,), (wide, 24))

    assert not failing(check, [("bf16", 9, 64), ("fp16", 6, 64), ("fp8_e4m3fn", 0, 128), ("int8", 0, 128)])


@pytest.mark.parametrize("extension", [True, False], ids=["extension", "ctypes"])
def test_a_solution_computes_its_product(ptx: ModuleType, extension: bool, failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend launches kernels with the operands that the op makes, through the C extension and
    through ctypes.
    """
    monkeypatch.setattr(build, "ptxas", lambda: None)

    def check(config: KernelConfig, splits: int, shape: Shape) -> None:
        cuda = ptx.Cuda()
        library = cuda.driver()
        backend = attrs.evolve(asm, hooks=Asm(driver=lambda interface: library), host=Device("sm_90", 3, "small"))
        launcher = backend.bind(Solution("asm", config.name, splits), shape, CPU)
        assert isinstance(launcher, Launcher), launcher
        op = op_named(shape.op)
        given = tuple(each for each in op.make_inputs(shape, torch.device("cpu"), 0) if each is not None)
        x, weight, *others = given
        out = launcher.call(x, weight.plain, *others)
        assert cuda.faults == []
        wanted = op.reference(shape, given).double()
        error = (out.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert error.max().item() < op.tolerance(shape).row_error

    cases = [
        (KernelConfig(64, 32, 3, 1), 1, of("a16w16", (37, 73, 192), **BIASED)),
        (KernelConfig(40, 64, 3, 1, swapped=True), 2, of("a16w16", (37, 72, 256), "fp16", outdtype="fp16")),
        (KernelConfig(64, 32, 3, 1, promoted=True), 1, of(BY_ROW, (37, 72, 256), FP8, **BIASED)),
        (KernelConfig(64, 96, 3, 1, promoted=True, staged=True), 2, of(BY_BLOCK, (37, 136, 256), FP8)),
    ]
    with contextlib.nullcontext() if extension else without_extension():
        assert not failing(check, cases)


def test_other_sizes_and_layouts_are_refused(failing: Any) -> None:
    """Other sizes and layouts are refused with the reason."""

    def check(shape: Shape, reason: str) -> None:
        answer = asm.refusal(shape, H200)
        assert isinstance(answer, Unsupported) and reason in str(answer)
        assert asm.heuristic_fallback(shape, H200) is None

    assert not failing(
        check,
        [
            (of("a16w16", (37, 72, 200)), "layout columns128 needs K % 64 = 0 (K=200)"),
            (of(BY_ROW, (37, 72, 192), FP8), "K % 128 = 0 (K=192)"),
            (of(BY_ROW, (37, 96, 256), FP8, layout="aiter16x16"), "weights of layout columns128, not scale row and layout aiter16x16"),
            (of("a16w16", (37, 96, 256), layout="aiter16x16"), "weights of layout row or columns128, not scale none and layout aiter16x16"),
            (
                Shape("a8w8", 37, 96, 256, FP8, "bf16", scale="row", layout=COLUMNS),
                "weights of layout row, not scale row and layout columns128",
            ),
        ],
    )


def test_lists_are_those_of_plain_weights(failing: Any) -> None:
    """Lists are those of plain weights, and untuned calls are served."""

    def check(shape: Shape) -> None:
        plain = attrs.evolve(shape, op=shape.op.removesuffix("_bpreshuffle"), layout="row")
        assert enumerate_candidates(shape, H200) == enumerate_candidates(plain, H200) != []
        first = next(iter(asm.solutions(shape, H200)))
        assert list(refine("asm", first, shape, H200)) == list(refine("asm", first, plain, H200))
        untuned = asm.heuristic_fallback(shape, H200)
        assert untuned is not None
        config = parse_name(untuned.kernel_name)
        assert (unfit(config, untuned.split_k, shape), config.promoted) == (None, shape.dtype == FP8)

    assert not failing(
        check,
        itertools.product(
            [
                of("a16w16", (64, 2112, 7168)),
                of("a16w16", (1, 1280, 8192)),
                of(BY_ROW, (256, 2112, 7168), FP8),
                of(BY_ROW, (33, 8, 128), "int8"),
                of(BY_BLOCK, (1024, 7168, 2048), FP8),
            ]
        ),
    )


@pytest.mark.parametrize("op", ["a16w16", BY_ROW, BY_BLOCK])
def test_a_row_of_a_table_keeps_the_layout(op: str) -> None:
    """A table row keeps the layout."""
    shape = of(op, (64, 2112, 7168), "bf16" if op == "a16w16" else FP8)
    columns = ops()[op].columns
    written = columns.format(shape)
    assert written["layout"] == COLUMNS
    assert columns.parse(written) == shape
    assert columns.parse({**written, "layout": ""}) == attrs.evolve(shape, layout="aiter16x16")
