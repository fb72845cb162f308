"""Compare argument bytes with offsets and units written here from AITER's launchers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from tunedgemm.plugin import Shape
from tunedgemm_asm.launch import ADDRESSES, arguments_of

gfx950 = pytest.mark.parametrize("asm", ["gfx950"], indirect=True)
ONE = 0x3F800000  # 1.0 as bits


def launched(asm: Any, fake: ModuleType, over: ModuleType, shape: Shape, name: str, split_k: int) -> Any:
    """Launch once, check the output, and return what the fake received."""
    assert over.fault(asm, fake, shape, name, split_k) == ""
    return over.native(asm, fake).fake_last().contents


def numbers(launch: Any, addresses: dict[int, bool]) -> dict[int, int]:
    """Return the nonzero slots of 16 bytes by offset, and check addresses."""
    found = {}
    for offset in range(0, launch.bytes, 16):
        value = launch.u64(offset)
        if offset in addresses:
            assert value % 16 == 0
            assert bool(value) is addresses[offset], hex(offset)
        elif value:
            found[offset] = value
        assert launch.content[offset + 8 : offset + 16] == bytes(8)
    return found


@gfx950
def test_bf16_as_aiters_launcher_fills_it(asm: Any, fake: ModuleType, over: ModuleType) -> None:
    """bf16 arguments without splits are AITER's."""
    shape = Shape("a16w16", 70, 128, 256)
    launch = launched(asm, fake, over, shape, fake.bf16(64, shuffled=False, prefetch=3)["knl_name"], 1)
    assert launch.bytes == 352
    there = {0x00: True, 0x10: False, 0x20: True, 0x30: True, 0x130: False, 0x150: False}
    assert numbers(launch, there) == {
        0x40: ONE,
        0x60: 256,
        0x80: 256,
        0xA0: 512,
        0xC0: 512,
        0xE0: 70,
        0xF0: 128,
        0x100: 256,
        0x110: 1,
        0x120: 1,
    }
    assert (tuple(launch.grid), tuple(launch.block), launch.shared, launch.stream) == ((2, 2, 1), (256, 1, 1), 0, 0)


@gfx950
def test_bf16_with_a_split_a_bias_and_float32(asm: Any, fake: ModuleType, over: ModuleType) -> None:
    """bf16 arguments with splits, bias and fp32 output are AITER's."""
    shape = Shape("a16w16", 33, 192, 512, outdtype="fp32", epilogue="bias", layout="aiter16x16")
    launch = launched(asm, fake, over, shape, fake.bf16(32, shuffled=True, splits=True)["knl_name"], 3)
    there = {0x00: True, 0x10: False, 0x20: True, 0x30: True, 0x130: True, 0x150: True}
    assert numbers(launch, there) == {
        0x40: ONE,
        0x60: 768,
        0x80: 768,
        0xA0: 1024,
        0xC0: 1024,
        0xE0: 33,
        0xF0: 192,
        0x100: 512,
        0x110: 3,
        0x140: 1,
    }
    assert tuple(launch.grid) == (3, 2, 3)


@gfx950
def test_int8_as_aiters_launcher_fills_it(asm: Any, fake: ModuleType, over: ModuleType) -> None:
    """int8 arguments are AITER's."""
    shape = Shape("a8w8_bpreshuffle", 40, 256, 512, dtype="int8", outdtype="bf16", scale="row", layout="aiter16x16")
    launch = launched(asm, fake, over, shape, fake.ROWS["i8gemm"][0]["knl_name"], 4)
    there = dict.fromkeys(range(0x00, 0x60, 0x10), True)
    assert numbers(launch, there) == {0x60: 40, 0x70: 256, 0x80: 512, 0x90: 512, 0xA0: 512, 0xB0: 512, 0xC0: 4}
    assert tuple(launch.grid) == (8, 2, 1)


@gfx950
def test_fp8_with_blocks_as_aiters_launcher_fills_it(asm: Any, fake: ModuleType, over: ModuleType) -> None:
    """Block-scaled fp8 arguments are AITER's."""
    shape = Shape("a8w8_blockscale_bpreshuffle", 40, 256, 384, dtype="fp8_e4m3fn", outdtype="bf16", scale="block", layout="aiter16x16")
    launch = launched(asm, fake, over, shape, fake.ROWS["fp8gemm_blockscale"][0]["knl_name"], 3)
    assert launch.bytes == 256
    found = {0x60: 40, 0x70: 256, 0x80: 384, 0x90: 384, 0xA0: 384, 0xB0: 512, 0xC0: 3, 0xD0: 40, 0xE0: 2, 0xF0: 3}
    assert numbers(launch, dict.fromkeys(range(0x00, 0x60, 0x10), True)) == found
    assert tuple(launch.grid) == (6, 2, 1)


@gfx950
def test_fp4_as_aiters_launcher_fills_it(asm: Any, fake: ModuleType, over: ModuleType) -> None:
    """fp4 arguments are AITER's, with a ragged N."""
    shape = Shape("a4w4_blockscale", 40, 528, 1280, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16")
    launch = launched(asm, fake, over, shape, fake.ROWS["f4gemm"][1]["knl_name"], 1)
    there = {0x00: True, 0x10: False, 0x20: True, 0x30: True, 0x110: True, 0x120: True}
    assert numbers(launch, there) == {
        0x40: ONE,
        0x80: 528,
        0xA0: 1280,
        0xC0: 1280,
        0xE0: 40,
        0xF0: 528,
        0x100: 1280,
        0x130: 40,
        0x150: 40,
        0x170: 1,
    }
    assert tuple(launch.grid) == (2, 1, 2)  # 640 of K, rounded up to 768


@gfx950
def test_our_own_layout(asm: Any, fake: ModuleType, over: ModuleType) -> None:
    """The arguments of the plugin's layout are as documented."""
    shape = Shape("a16w16", 70, 100, 320, outdtype="fp32", epilogue="bias", bias_dtype="fp32")
    launch = launched(asm, fake, over, shape, "tunedgemm_bf16_32x32_pf2_splitk", 3)
    assert launch.bytes == 96
    assert all(launch.u64(offset) for offset in range(0, 0x30, 8))
    assert [launch.u32(offset) for offset in range(0x30, 0x60, 4)] == [400, 640, 640, 70, 100, 320, 3, 4, 3, 128, 0, 1]
    assert tuple(launch.grid) == (12, 1, 3)


@gfx950
def test_what_is_needed_beside_operands(asm: Any, fake: ModuleType, over: ModuleType) -> None:
    """Workspace, counters, zeroing and padded rows are those of each layout."""
    kernels = {name: loaded.kernel for name, loaded in asm.catalog("gfx950").kernels.items()}
    product = Shape("a16w16", 70, 128, 512)
    own = arguments_of(kernels["tunedgemm_bf16_64x64_pf2_splitk"], 2, product)
    assert (own.workspace, own.counters, own.zeroed, own.rows) == (4 * 2 * 4 * 64 * 64, 1024, False, 70)
    bf16 = arguments_of(kernels[fake.bf16(64, shuffled=False, splits=True)["knl_name"]], 2, product)
    assert (bf16.workspace, bf16.counters, bf16.zeroed) == (0, 1024, False)
    fp4 = Shape("a4w4_blockscale", 70, 528, 1024, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16")
    for splits in (1, 4):
        told = arguments_of(kernels[fake.ROWS["f4gemm"][1]["knl_name"]], splits, fp4)
        assert (told.rows, told.zeroed, told.counters) == (96, splits > 1, 0)
    for each in (own, bf16, told):
        assert [name for name in ADDRESSES if name in each.addresses] == list(each.addresses)
