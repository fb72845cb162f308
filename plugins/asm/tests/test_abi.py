"""Compare argument layouts with AITER's launchers and its code objects."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_asm import codeobject, descriptor, manifest
from tunedgemm_asm.abi import ABIS, Abi, Field

#: AITER's variable, which names its tree of code objects.
HSA = Path(os.environ.get("AITER_ASM_DIR") or "/nonexistent")

#: What AITER passes its bf16 kernels, by offset: 22 slots of 16 bytes. ``p`` is an address, ``f`` a
#: float, all others are unsigned.
BF16 = """
0x00 out p, 0x10 c p, 0x20 a p, 0x30 b p, 0x40 alpha f, 0x50 beta f, 0x60 stride_out0, 0x70 stride_out1, 0x80 stride_c0, 0x90 stride_c1,
0xA0 stride_a0, 0xB0 stride_a1, 0xC0 stride_b0, 0xD0 stride_b1, 0xE0 m, 0xF0 n, 0x100 k, 0x110 splits, 0x120 out_is_bf16, 0x130 bias p,
0x140 add_bias, 0x150 semaphore p
"""
#: Its int8 and its block-scaled fp8 kernels.
SCALED = """
0 out p, 16 a p, 32 b p, 48 a_scale p, 64 b_scale p, 80 bias p, 96 m, 112 n, 128 k, 144 stride_a, 160 stride_b, 176 stride_out, 192 splits
"""
#: Its fp4 kernels, after the common head.
FP4 = """
0x110 a_scale p, 0x120 b_scale p, 0x130 stride_a_scale0, 0x140 stride_a_scale1, 0x150 stride_b_scale0, 0x160 stride_b_scale1,
0x170 log2_splits
"""
OWN = """
0x00 out p, 0x08 a p, 0x10 b p, 0x18 bias p, 0x20 workspace p, 0x28 semaphore p, 0x30 stride_out, 0x34 stride_a, 0x38 stride_b, 0x3c m,
0x40 n, 0x44 k, 0x48 tiles_m, 0x4c tiles_n, 0x50 splits, 0x54 k_part, 0x58 out_is_bf16, 0x5c add_bias
"""
LAYOUTS = {
    "aiter-bf16gemm": (BF16, 352),
    "aiter-i8gemm": (SCALED, 256),
    "aiter-f4gemm": (BF16.split("0x110", maxsplit=1)[0] + FP4, 384),
    "aiter-fp8gemm-blockscale": (SCALED + ", 208 scale_m, 224 scale_n, 240 scale_k", 256),
    "tunedgemm-bf16": (OWN, 96),
}
#: Names in AITER's code objects that differ from the fields'.
THEIRS = """
D=out C=c A=a B=b Mdim=m Ndim=n Kdim=k M=m K=k Bias=bias BIAS=bias strideD0=stride_out0 strideD1=stride_out1 strideC0=stride_c0
strideC1=stride_c1 strideA0=stride_a0 strideA1=stride_a1 strideB0=stride_b0 strideB1=stride_b1 strideScaleA0=stride_a_scale0
strideScaleA1=stride_a_scale1 strideScaleB0=stride_b_scale0 strideScaleB1=stride_b_scale1 splitk=splits KS=splits log2_k_split=log2_splits
is_out_b16=out_is_bf16 ptr_semaphore=semaphore SA=a_scale SB=b_scale ScaleA=a_scale ScaleB=b_scale PA=stride_a PB=stride_b PC=stride_out
"""
NAMES = dict(pair.split("=") for pair in THEIRS.split())


def fields_of(text: str) -> list[tuple[str, int, str]]:
    parts = [part.split() for part in text.replace("\n", " ").split(",") if part.strip()]
    kinds = {"p": "pointer", "f": "f32"}
    return [(part[1], int(part[0], 0), kinds[part[2]] if len(part) > 2 else "u32") for part in parts]


def test_every_field_is_placed_as_in_the_launchers(failing: Any) -> None:
    """Each layout has the names, offsets, kinds and size of AITER's launchers."""

    def check(name: str) -> None:
        text, size = LAYOUTS[name]

        assert [(field.name, field.offset, field.kind) for field in ABIS[name].fields] == fields_of(text)
        assert ABIS[name].size == size
        assert set(LAYOUTS) == set(ABIS)

    assert not failing(check, itertools.product(LAYOUTS))


def test_a_packed_value_fills_only_its_bytes(failing: Any) -> None:
    """A packed value changes only the bytes of its field."""

    def check(name: str) -> None:
        abi = ABIS[name]
        for field in abi.fields:
            value = {"pointer": 0x7F01_2345_6789_ABC0, "u32": 0x89AB_CDEF, "f32": 1.5}[field.kind]
            expected = bytearray(abi.size)
            written = struct.pack({"pointer": "<Q", "u32": "<I", "f32": "<f"}[field.kind], value)
            expected[field.offset : field.offset + len(written)] = written

            assert abi.pack({field.name: value}) == bytes(expected)
        assert abi.pack({}) == bytes(abi.size)

    assert not failing(check, itertools.product(LAYOUTS))


def test_values_that_do_not_fit_are_never_truncated(failing: Any) -> None:
    """A value that its field cannot hold raises instead of wrapping around."""

    def check(values: dict[str, int], message: str) -> None:
        with pytest.raises(PluginError, match="aiter-bf16gemm") as caught:
            ABIS["aiter-bf16gemm"].pack(values)
        assert message in str(caught.value)

    assert not failing(
        check,
        [
            ({"k": 1 << 32}, "k=4294967296 does not fit its field of 32 bits"),
            ({"m": -1}, "m=-1 does not fit"),
            ({"a": 1 << 64}, "does not fit its field of 64 bits"),
            ({"depth": 1}, "no field 'depth'; fields: out, c, a, b, alpha"),
        ],
    )


def test_an_impossible_layout_is_refused(failing: Any) -> None:
    """Overlapping, unordered, unaligned or truncated fields raise."""

    def check(fields: tuple[Field, ...], sizes: tuple[int, ...]) -> None:
        with pytest.raises(PluginError, match="abi wrong"):
            Abi("wrong", ("a16w16",), {}, fields, sizes, 64, "aiter16x16")

    assert not failing(
        check,
        [
            ((Field("a", 0, "pointer"), Field("b", 4, "u32")), (16,)),
            ((Field("a", 8, "u32"), Field("b", 0, "pointer")), (16,)),
            ((Field("a", 4, "pointer"),), (16,)),
            ((Field("a", 0, "pointer"), Field("b", 8, "pointer")), (12,)),
            ((Field("a", 0, "pointer"),), (16, 8)),
        ],
    )


@pytest.mark.skipif(not HSA.is_dir(), reason="needs AITER_ASM_DIR, a tree of AITER's code objects")
@pytest.mark.parametrize("gfx", ["gfx942", "gfx950"])
@pytest.mark.parametrize("family", descriptor.AITER)
def test_the_layouts_are_those_of_aiters_code_objects(family: str, gfx: str) -> None:
    """Each argument of AITER's code objects is a field of the layout, and no field is missing."""
    abi, seen = ABIS[descriptor.AITER[family][1]], set()
    ours = {field.offset: field for field in abi.fields}
    names = NAMES | ({} if "c" in {field.name for field in abi.fields} else {"C": "out"})
    for path in sorted((HSA / gfx / family).glob("*.co")):
        for kernel in codeobject.read(path.read_bytes()).kernels.values():
            arguments = [arg for arg in kernel.args if arg.name not in ("", "pad")]
            for arg in arguments:
                field = ours[arg.offset]
                assert (names.get(arg.name, arg.name), arg.bytes, arg.pointer) == (field.name, field.bytes, field.kind == "pointer"), path
            assert kernel.kernarg_bytes in abi.sizes
            below = {field.offset for field in abi.fields if field.offset < kernel.kernarg_bytes}
            assert not arguments or {arg.offset for arg in arguments} == below, path
            seen.add(kernel.kernarg_bytes)

    assert seen <= set(abi.sizes) and (seen or (family, gfx) == ("f4gemm", "gfx942"))


OBJDUMP = shutil.which("llvm-objdump-19") or shutil.which("llvm-objdump")
#: A scalar load from the argument segment, whose address is in s[0:1]: dwords, offset.
LOAD = re.compile(r"s_load_dword(?:x(\d+))? s\[?[\d:]+\]?, s\[0:1\], (0x[0-9a-f]+|\d+)")


@pytest.mark.skipif(not HSA.is_dir() or OBJDUMP is None, reason="needs AITER_ASM_DIR and llvm-objdump")
@pytest.mark.parametrize("gfx", ["gfx942", "gfx950"])
@pytest.mark.parametrize("family", descriptor.AITER)
def test_aiters_kernels_load_our_fields(family: str, gfx: str, tmp_path: Path) -> None:
    """AITER's kernels load only fields of the layout, and split-K kernels load those for splits."""
    listed, name = descriptor.AITER[family]
    abi = ABIS[name]
    fields = {field.offset: field for field in abi.fields}
    for kernel in manifest.read(HSA / gfx / family / listed, abi).kernels:
        content = bytearray((HSA / gfx / family / kernel.file).read_bytes())
        content[48] = 0x4C  # LLVM 19 knows no gfx950; scalar loads are the same on gfx942
        (path := tmp_path / "k.co").write_bytes(content)
        text = subprocess.run([str(OBJDUMP), "-d", str(path)], capture_output=True, text=True, check=True).stdout
        loads = [(int(found[2], 0), 4 * int(found[1] or 1)) for found in LOAD.finditer(text)]

        assert loads and all(offset in fields and size == fields[offset].bytes for offset, size in loads), kernel.name
        loaded = {fields[offset].name for offset, _ in loads}
        assert {"out", "a", "b", "m", "n", "k"} <= loaded
        assert set(abi.for_splits) <= loaded if kernel.splits else not set(abi.for_splits) & loaded, kernel.name
