"""Parse code objects and reject those that do not fit their manifest or device."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm_asm import codeobject, descriptor, manifest
from tunedgemm_asm.abi import ABIS
from tunedgemm_asm.codeobject import read
from tunedgemm_asm.manifest import KernelConfig, PackError
from tunedgemm_asm.resources import unfit

HSA = Path(os.environ.get("AITER_ASM_DIR") or "/nonexistent")
ABI = ABIS["aiter-bf16gemm"]
KERNEL = KernelConfig("k", "k.co", ABI.name, 96, 64, 0, True, True, 64, True, ("bf16", "fp32"))
CLANG = shutil.which("clang-19") or shutil.which("clang")

SOURCE = """
  .amdgcn_target "amdgcn-amd-amdhsa--gfx942"
  .text
  .globl k
  .p2align 8
  .type k,@function
k:
  s_endpgm
.Lend:
  .size k, .Lend-k
  .rodata
  .p2align 6
  .amdhsa_kernel k
    .amdhsa_group_segment_fixed_size 4096
    .amdhsa_kernarg_size 96
    .amdhsa_next_free_vgpr 160
    .amdhsa_accum_offset 128
    .amdhsa_next_free_sgpr 40
  .end_amdhsa_kernel
  .amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--gfx942
amdhsa.kernels:
  - .name: k
    .symbol: k.kd
    .kernarg_segment_size: 96
    .kernarg_segment_align: 8
    .group_segment_fixed_size: 4096
    .private_segment_fixed_size: 0
    .wavefront_size: 64
    .sgpr_count: 46
    .vgpr_count: 160
    .agpr_count: 32
    .vgpr_spill_count: 3
    .sgpr_spill_count: 2
    .max_flat_workgroup_size: 256
    .reqd_workgroup_size: [256, 1, 1]
    .args:
      - {.name: out, .offset: 0, .size: 8, .value_kind: global_buffer, .address_space: global}
      - {.offset: 48, .size: 4, .value_kind: by_value}
...
  .end_amdgpu_metadata
"""


def test_a_code_objects_metadata_is_read(objects: ModuleType) -> None:
    """A code object's architecture, hash, sizes and arguments are read."""
    content = objects.made(["a", "k"], "gfx950", 352, 163840, args=[objects.named("D", 0, 8, pointer=True)])
    code = read(content)

    assert code.gfx == "gfx950" and list(code.kernels) == ["a", "k"]
    seen = code.kernels["k"]
    assert (seen.kernarg_bytes, seen.lds_bytes, seen.workgroup, seen.wavefront) == (352, 163840, 256, 64)
    assert seen.args == (codeobject.Argument("D", 0, 8, pointer=True),)
    assert code.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.skipif(CLANG is None, reason="no clang")
def test_assembled_code_objects_are_read(tmp_path: Path) -> None:
    """The metadata of a code object assembled by LLVM is read field by field."""
    source, path = tmp_path / "k.s", tmp_path / "k.co"
    source.write_text(SOURCE)
    command = [str(CLANG), "-x", "assembler", "-target", "amdgcn-amd-amdhsa", "-mcpu=gfx942", str(source), "-o", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"{CLANG} does not link for gfx942")
    code = read(path.read_bytes())

    assert code.gfx == "gfx942"
    assert code.kernels["k"] == codeobject.Metadata(
        kernarg_bytes=96, lds_bytes=4096, scratch_bytes=0, vgprs=160, agprs=32, sgprs=46, spills=5, workgroup=256, required=(256, 1, 1),
        wavefront=64, args=(codeobject.Argument("out", 0, 8, pointer=True), codeobject.Argument("", 48, 4, pointer=False)),
    )  # fmt: skip


@pytest.mark.skipif(not HSA.is_dir(), reason="needs AITER_ASM_DIR, a tree of AITER's code objects")
def test_aiters_code_objects_match_its_manifests() -> None:
    """Every kernel of AITER's manifests is in its file and fits its architecture."""
    count = 0
    for gfx in ("gfx942", "gfx950"):
        for family, (listed, name) in descriptor.AITER.items():
            for kernel in manifest.read(HSA / gfx / family / listed, ABIS[name]).kernels:
                code = read((HSA / gfx / family / kernel.file).read_bytes())
                assert unfit(code, kernel, ABIS[name], gfx) is None
                count += 1

    assert count == 110


def test_an_object_that_contradicts_itself_is_refused(objects: ModuleType, failing: Any) -> None:
    """Header, symbols, descriptor and metadata that contradict each other raise."""

    def check(made: Mapping[str, Any], reason: str) -> None:
        content = objects.made(["k"], **made)
        if not reason:
            assert unfit(read(content), KERNEL, ABI, "gfx942") is None
            return
        with pytest.raises(PackError) as caught:
            read(content)
        assert reason in str(caught.value)

    assert not failing(
        check,
        [
            ({"machine": 62}, "ELF file for another machine (got EM_X86_64"),
            ({"target": "gfx950"}, "header and metadata disagree (got gfx942 and amdgcn-amd-amdhsa--gfx950)"),
            ({"target": "gfx942:sramecc+:xnack-"}, ""),
            ({"target": ""}, ""),
            ({"exported": ["other"]}, "metadata names k.kd, which is not exported"),
            ({"descriptor_bytes": 96}, "descriptor and metadata of k disagree"),
            ({"descriptor_bytes": 0}, ""),
            ({"changes": {".group_segment_fixed_size": 1024}}, "descriptor and metadata of k disagree"),
            ({"changes": {".symbol": "k"}}, "metadata names k, which"),
            ({"changes": {".vgpr_count": -1}}, "metadata: expected a number (got '-1')"),
            ({"changes": {".vgpr_count": "many"}}, "metadata: expected a number (got 'many')"),
            ({"changes": {".kernarg_segment_size": None}}, "corrupt or truncated (KeyError: '.kernarg_segment_size')"),
            ({"changes": {".args": 7}}, "corrupt or truncated (TypeError"),
        ],
    )


def test_a_file_that_is_not_a_code_object_is_refused(failing: Any) -> None:
    """Files that are not AMD code objects raise."""

    def check(content: bytes, reason: str) -> None:
        with pytest.raises(PackError) as caught:
            read(content)
        assert reason in str(caught.value)

    assert not failing(
        check,
        [
            (b"", "not an ELF file: it begins with nothing"),
            (b"\x7fEL", "not an ELF file"),
            (b"__CLANG_OFFLOAD_BUNDLE__", "not an ELF file: it begins with 5f5f434c"),
            (b"version https://git-lfs.github.com/spec/v1", "not an ELF file"),
            (b"\x7fELF", "corrupt or truncated"),
            (b"\x7fELF\x01\x01\x01" + b"\0" * 60, "32 bits"),
        ],
    )


def test_an_object_that_is_not_linked_is_refused(objects: ModuleType) -> None:
    """A relocatable object raises."""
    content = bytearray(objects.made(["k"]))
    content[16:18] = struct.pack("<H", 1)
    with pytest.raises(PackError, match="not linked: expected type ET_DYN"):
        read(bytes(content))


def test_an_object_cut_off_anywhere_is_refused(objects: ModuleType) -> None:
    """A code object truncated at any length raises."""
    content = objects.made(["k"])
    for length in range(len(content)):
        with pytest.raises(PackError):
            read(content[:length])


def test_garbled_bytes_never_raise_anything_else(objects: ModuleType) -> None:
    """Randomly corrupted bytes are read or raise PackError."""
    draw, content = random.Random(11), objects.made(["a", "k"], args=[objects.named("D", 0, 8, pointer=True)])
    refused = 0
    for _ in range(1500):
        garbled = bytearray(content)
        for _ in range(draw.choice((1, 1, 2, 8))):
            garbled[draw.randrange(len(garbled))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        try:
            unfit(read(bytes(garbled)), KERNEL, ABI, "gfx942")
        except PackError:
            refused += 1
    assert 100 < refused < 1500


def test_a_kernel_that_contradicts_its_manifest_is_refused(objects: ModuleType, failing: Any) -> None:
    """A kernel that differs from its manifest or exceeds the hardware is unfit."""

    def check(made: Mapping[str, Any], kernel: Mapping[str, Any], reason: str) -> None:
        told = unfit(read(objects.made(["k"], **made)), attrs.evolve(KERNEL, **kernel), ABI, "gfx942") or ""
        assert reason in told and bool(reason) == bool(told)

    assert not failing(
        check,
        [
            ({}, {}, ""),
            ({"gfx": "gfx950"}, {}, "built for gfx950, not gfx942"),
            ({"gfx": "gfx90a"}, {}, "built for gfx90a, not gfx942"),
            ({}, {"name": "other"}, "no kernel other; kernels: k"),
            ({"kernarg_bytes": 96}, {}, "arguments take 96 bytes; aiter-bf16gemm passes 336 or 352"),
            ({"kernarg_bytes": 368}, {}, "arguments take 368 bytes"),
            ({"kernarg_bytes": 336}, {"splits": False}, ""),
            ({"kernarg_bytes": 336}, {}, "manifest claims split-K, but the code does not read semaphore"),
            ({"workgroup": 128}, {}, "built for workgroups of 128 threads; aiter-bf16gemm launches 256"),
            ({"workgroup": 2048}, {}, "workgroup of 2048 threads exceeds 1024"),
            ({"changes": {".reqd_workgroup_size": [64, 4, 1]}}, {}, "built for workgroups of (64, 4, 1) threads"),
            ({"changes": {".reqd_workgroup_size": [256, 1, 1]}}, {}, ""),
            ({"lds_bytes": 65537}, {}, "65537 bytes of LDS exceed the 65536 of gfx942"),
            ({"changes": {".wavefront_size": 32}}, {}, "waves of 32 threads"),
            ({"changes": {".vgpr_count": 513}}, {}, "with 513 registers"),
            ({}, {"tile_m": 4096}, "manifest's tile of 4096x64 exceeds the registers of a workgroup"),
        ],
    )


def test_a_kernel_for_an_unknown_architecture_is_refused(objects: ModuleType) -> None:
    """A kernel for an unknown architecture is unfit for that reason."""
    told = unfit(read(objects.made(["k"], "gfx1100")), KERNEL, ABI, "gfx1100")
    assert told == "unknown architecture gfx1100; known: gfx942, gfx950"


def test_listed_arguments_must_equal_the_passed_ones(objects: ModuleType, failing: Any) -> None:
    """Listed arguments must match the fields of the layout; padding may be listed."""

    def check(wrong: str) -> None:
        args = [objects.named(field.name, field.offset, field.bytes, pointer=field.kind == "pointer") for field in ABI.fields]
        assert unfit(read(objects.made(["k"], args=args)), KERNEL, ABI, "gfx942") is None
        if wrong == "missing":
            del args[3]
        else:
            args[3] |= {"moved": {".offset": 52}, "narrow": {".size": 4}, "a number": {".value_kind": "by_value"}}[wrong]

        assert (
            unfit(read(objects.made(["k"], args=args)), KERNEL, ABI, "gfx942") == "no pointer argument at 48, where aiter-bf16gemm passes b"
        )

    assert not failing(check, itertools.product(["missing", "moved", "narrow", "a number"]))
