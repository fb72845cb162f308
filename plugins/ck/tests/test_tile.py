"""Check names, spaces, limits and sources of CK Tile's instances."""

from __future__ import annotations

import re

import attrs
import pytest
from tunedgemm.plugin import Device, PluginError, Shape
from tunedgemm.tools.tables import op_named
from tunedgemm_ck.problem import Problem
from tunedgemm_ck.tile import FAMILY
from tunedgemm_ck.tile.limits import ACCEPTS
from tunedgemm_ck.tile.names import EXAMPLES, PREFIXES, parse_name
from tunedgemm_ck.tile.space import listed_instances
from tunedgemm_ck.tile.template import flags, render

MI300X, MI355X = Device("gfx942", 304), Device("gfx950", 256)
SHUFFLED = EXAMPLES["a8w8_bpreshuffle_cktile"]
BLOCKSCALE = EXAMPLES["a8w8_blockscale_cktile"]
EIGHT = "a8w8_blockscale_cktile_192x256x128_4x2x1_16x16x128_intrawave_0x1x0_2"


def shape_of(op: str, m: int, n: int, k: int, gfx: str) -> Shape:
    """Return a shape of AITER's row of *op*, in the fp8 of an architecture."""
    shape = op_named(op).columns.parse({"M": str(m), "N": str(n), "K": str(k), "q_dtype_w": "fp8_e4m3fnuz"})
    return attrs.evolve(shape, dtype="fp8_e4m3fn" if gfx == "gfx950" else "fp8_e4m3fnuz")


def problem_of(op: str, gfx: str = "gfx942") -> Problem:
    """Return a problem of an op with a bf16 output."""
    return Problem(op, gfx, "fp8_e4m3fn" if gfx == "gfx950" else "fp8_e4m3fnuz", "bf16", "", ACCEPTS[op].scale, ACCEPTS[op].layout)


def test_a_bad_name_is_refused_by_the_part_that_is_wrong() -> None:
    """An invalid name raises PluginError that names the part."""
    cases = [
        ("a8w8_bpreshuffle", BLOCKSCALE, "names look like a8w8_bpreshuffle_cktile"),
        ("a8w8_blockscale", SHUFFLED, "names look like a8w8_blockscale_cktile"),
        ("a8w8_blockscale", BLOCKSCALE + "_v3", "names look like"),
        ("a8w8_blockscale", BLOCKSCALE.replace("0x1x0", "0x2x0"), "switches must be 0 or 1"),
        ("a8w8_blockscale", BLOCKSCALE.replace("intrawave", "outrawave"), "scheduler"),
        ("a8w8_blockscale", BLOCKSCALE.replace("16x16x64", "16x16x48"), "warp tile"),
        ("a8w8_blockscale", BLOCKSCALE.replace("128x128x128", "128x96x128"), "tile"),
        ("a8w8_blockscale", BLOCKSCALE[:-1] + "5", "blocks per compute unit"),
        ("a8w8_blockscale", BLOCKSCALE + "_aqrm", "row-major scales"),
        ("a8w8_bpreshuffle", SHUFFLED.replace("0x0x8x4x1x0x0", "0x0x8x4x1x2x0"), "switch"),
        ("a8w8_bpreshuffle", SHUFFLED.replace("0x0x8x4x1x0x0", "0x1x8x4x1x0x0"), "sparsity"),
        ("a16w16", SHUFFLED, "no instances of op 'a16w16'"),
    ]
    for op, name, part in cases:
        with pytest.raises(PluginError, match=part):
            parse_name(name, op)


def test_listed_instances_fit_and_are_unique() -> None:
    """Listed instances and their neighbours fit, and are unique."""
    for op in sorted(PREFIXES):
        for device in [MI300X, MI355X]:
            for full in [False, True]:
                shape = shape_of(op, 64, 6144, 8192, device.gfx)
                assert FAMILY.unsupported(shape, device) is None
                offered = list(FAMILY.enumerate_instances(shape, device, full))
                assert offered
                assert len(set(offered)) == len(offered)
                assert len({instance for instance, _ in offered}) <= (len(listed_instances(op)) if full else 24)
                assert all(FAMILY.unfit(instance, split, shape, device) is None for instance, split in offered)
                for instance, split in offered:
                    neighbours = list(FAMILY.enumerate_neighbours(instance, split, shape, device))
                    assert (instance, split) not in neighbours
                    assert neighbours
                    assert all(FAMILY.unfit(other, parts, shape, device) is None for other, parts in neighbours)


def test_matrix_instructions_of_gfx950_do_not_fit_gfx942() -> None:
    """Instructions with 128 values of K fit gfx950 only."""
    instance = parse_name(EIGHT, "a8w8_blockscale")
    assert "gfx950" in FAMILY.unfit(instance, 0, shape_of("a8w8_blockscale", 256, 4096, 4096, "gfx942"), MI300X)
    assert FAMILY.unfit(instance, 0, shape_of("a8w8_blockscale", 256, 4096, 4096, "gfx950"), MI355X) is None


def test_refused_shapes_have_reasons() -> None:
    """A refused shape has a reason."""
    cases = [
        ("a8w8_bpreshuffle", {"epilogue": "bias", "bias_dtype": "bf16"}, "no bias"),
        ("a8w8_bpreshuffle", {"dtype": "int8"}, "operands in"),
        ("a8w8_bpreshuffle", {"k": 8190}, "K and N must be multiples"),
        ("a8w8_bpreshuffle", {"n": 4128}, "does not pad"),
        ("a8w8_blockscale", {"k": 8208}, "multiple of 128"),
        ("a8w8_blockscale", {"outdtype": "fp32"}, "output in"),
    ]
    for op, fields, reason in cases:
        shape = attrs.evolve(shape_of(op, 64, 4096, 8192, "gfx942"), **fields)
        assert reason in FAMILY.unsupported(shape, MI300X)


def test_only_block_scales_split_k() -> None:
    """Only block scales split K, and split sums do not claim to be deterministic."""
    shuffled, scaled = parse_name(SHUFFLED, "a8w8_bpreshuffle"), parse_name(BLOCKSCALE, "a8w8_blockscale")
    assert "splitK must be 0" in FAMILY.unfit(shuffled, 1, shape_of("a8w8_bpreshuffle", 16, 4096, 8192, "gfx942"), MI300X)
    assert FAMILY.unfit(scaled, 2, shape_of("a8w8_blockscale", 16, 4096, 8192, "gfx942"), MI300X) is None
    assert (FAMILY.deterministic(scaled, 0), FAMILY.deterministic(scaled, 2)) == (True, False)


def test_a_source_is_the_same_each_time_and_names_what_it_is() -> None:
    """Sources are reproducible, complete and distinct."""
    for op in sorted(PREFIXES):
        first, second = listed_instances(op)[:2]
        source = render(first, problem_of(op))
        assert source == render(attrs.evolve(first), problem_of(op))
        assert source != render(second, problem_of(op))
        assert source.splitlines()[0] == f"// {first.name}"
        assert '#include "call.h"' in source
        assert "#if !__has_include(" in source
        assert all(f"TUNED_GEMM_EXPORT {function}" in source for function in ("int tunedgemm_launch", "int64_t tunedgemm_workspace"))
        assert not re.search(r"hipMalloc|Synchronize|\{\{[a-z]", source)
        assert all(source.count(left) == source.count(right) for left, right in ("()", "{}", "[]"))


def test_scales_are_transposed_where_the_kernel_reads_them_otherwise() -> None:
    """Scales of x are transposed exactly where their order in memory differs from the kernel's."""
    cases = [
        ("a8w8_blockscale", BLOCKSCALE, "false"),
        ("a8w8_blockscale", EIGHT, "true"),
        ("a8w8_blockscale", EIGHT + "_aqrm", "false"),
        ("a8w8_blockscale_bpreshuffle", BLOCKSCALE, "true"),
        ("a8w8_blockscale_bpreshuffle", EIGHT, "false"),
    ]
    for op, name, transposed in cases:
        assert f"constexpr bool transposed = {transposed};" in render(parse_name(name, op), problem_of(op, "gfx950"))


def test_the_kind_of_fp8_is_a_flag_of_the_architecture() -> None:
    """The flags select the architecture's fp8, and rounding of bfloat16."""
    instance = listed_instances("a8w8_bpreshuffle")[0]
    assert "-DCK_TILE_USE_OCP_FP8=0" in flags(instance, problem_of("a8w8_bpreshuffle"))
    assert "-DCK_TILE_USE_OCP_FP8=1" in flags(instance, problem_of("a8w8_bpreshuffle", "gfx950"))
    assert "-DCK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=0" in flags(instance, problem_of("a8w8_bpreshuffle"))
