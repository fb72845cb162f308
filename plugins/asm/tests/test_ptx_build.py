"""Assemble listed kernels with ptxas without spills and without serialized wgmma."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, LaunchError, Shape
from tunedgemm_asm.ptx import build
from tunedgemm_asm.ptx.kernel import text_of
from tunedgemm_asm.ptx.launch import arguments_of
from tunedgemm_asm.ptx.limits import unfit
from tunedgemm_asm.ptx.names import COLUMNS, KernelConfig, Variant
from tunedgemm_asm.ptx.space import TURNS, enumerate_candidates, enumerate_configs

pytestmark = pytest.mark.nightly

needs_ptxas = pytest.mark.skipif(build.ptxas() is None, reason="ptxas not found; it comes with Triton and the CUDA toolkit")
H200 = Device("sm_90", 132, "nvidia-h200")
VARIANTS = [
    Variant(KernelConfig(128, 256, 4), "bf16", "bf16", "bf16"),
    Variant(KernelConfig(128, 160, 5, cluster=2), "fp16", "fp32", "fp16", split=True),
    Variant(KernelConfig(256, 192, 3), "fp16", "fp16", "fp32", together=1),
    Variant(KernelConfig(16, 128, 12, swapped=True), "bf16", "bf16", "bf16", split=True),
    Variant(KernelConfig(128, 128, 5, promoted=True), "fp8_e4m3fn", "bf16", "fp32", scale="row"),
    Variant(KernelConfig(128, 256, 4), "fp8_e4m3fn", "fp16", "fp16", True, scale="row"),
    Variant(KernelConfig(64, 256, 4, swapped=True, promoted=True, staged=True), "fp8_e4m3fn", "fp32", split=True, scale="block"),
    Variant(KernelConfig(128, 192, 5, promoted=True, staged=True), "fp8_e4m3fn", "bf16", together=2, scale="block"),
    Variant(KernelConfig(128, 256, 4, promoted=True, staged=True), "fp8_e4m3fn", "bf16", split=True, scale="block"),
    Variant(KernelConfig(128, 224, 5, promoted=True, staged=True), "fp8_e4m3fn", "bf16", split=True, scale="block"),
    Variant(KernelConfig(128, 112, 5, promoted=True, staged=True), "fp8_e4m3fn", "bf16", split=True, scale="block"),
    Variant(KernelConfig(256, 128, 4, promoted=True), "fp8_e4m3fn", "fp32", "fp32", True, 1, "row"),
    Variant(KernelConfig(256, 192, 3), "int8", "fp32", "fp32", True, 1, "row"),
    Variant(KernelConfig(128, 256, 3, swapped=True), "int8", "bf16", "bf16", scale="tensor"),
    Variant(KernelConfig(128, 200, 4, turns=True), "bf16", "fp32", "bf16", True, 1),
    Variant(KernelConfig(192, 128, 5, cluster=2, turns=True), "fp16", "fp16", "fp32", True, 2),
    Variant(KernelConfig(96, 128, 7, swapped=True, turns=True), "bf16", "bf16", "bf16", True),
    Variant(KernelConfig(128, 256, 4, panels=2), "bf16", "bf16", "bf16"),
    Variant(KernelConfig(256, 192, 3, panels=3), "fp16", "fp16", "fp32", True),
    Variant(KernelConfig(128, 224, 4, cluster=2, promoted=True, staged=True, panels=6), "fp8_e4m3fn", "bf16", split=True, scale="block"),
    Variant(KernelConfig(256, 192, 3, panels=3), "int8", "bf16", "bf16", True, scale="row"),
    Variant(KernelConfig(128, 256, 4, promoted=True, panels=2), "fp8_e4m3fn", "bf16", "fp32", scale="row"),
    Variant(KernelConfig(256, 112, 3, panels=14), "int8", "fp16", "fp16", True, scale="row"),
    Variant(KernelConfig(64, 96, 4, 1), "bf16", "fp32"),
    Variant(KernelConfig(128, 192, 4, folded=True), "bf16", "bf16", "bf16"),
    Variant(KernelConfig(256, 96, 4, cluster=2, folded=True, panels=2), "fp16", "fp16", "fp32"),
    Variant(KernelConfig(64, 128, 9, 1, folded=True), "bf16", "fp32", columns=True),
    Variant(KernelConfig(128, 160, 6, turns=True), "bf16", "bf16", columns=True),
    Variant(KernelConfig(16, 128, 12, swapped=True), "bf16", "bf16", "bf16", split=True, columns=True),
    Variant(KernelConfig(128, 192, 4, cluster=2, panels=3), "fp16", "fp16", "fp32", True, columns=True),
    Variant(KernelConfig(128, 128, 5, promoted=True), "fp8_e4m3fn", "bf16", "fp32", scale="row", columns=True),
]

#: Scales by block in the other orders of x's scales, with a plain weight and one in columns.
VARIANTS += [
    Variant(KernelConfig(*sizes, swapped=swapped, promoted=True, staged=True), "fp8_e4m3fn", outdtype, split=True, scale="block", **layout)
    for sizes, swapped, outdtype in (((128, 256, 4), False, "bf16"), ((128, 224, 5), False, "bf16"), ((64, 256, 4), True, "fp32"))
    for layout in ({"columns": True, "transposed": True}, {"transposed": True}, {"transposed": True, "padded": True})
]

#: Promotion that overlaps the next portion.
VARIANTS += [
    Variant(
        KernelConfig(*sizes, promoted=True, overlapped=True, staged=scale == "block", swapped=swapped),
        "fp8_e4m3fn", "bf16", scale=scale, split=True, **layout,
    )
    for sizes, swapped in [
        ((128, 96, 7), False), ((256, 128, 3), False), ((128, 192, 4, 2, 2), False), ((64, 128, 5, 1), False), ((32, 128, 6), True),
    ]
    for scale, layout in [("block", {}), ("block", {"transposed": True, "padded": True}), ("row", {})]
]  # fmt: skip

#: The same with stream-K, which excludes parts of K in one CTA.
VARIANTS += [attrs.evolve(each, config=attrs.evolve(each.config, stream=True), split=True) for each in VARIANTS if not each.config.folded]


def faults(variant: Variant) -> str:
    """Return what ptxas reports against a kernel, or an empty text."""
    found = build.ptxas()
    assert found is not None
    try:
        _, said = build.assembled(text_of(variant), found[0])
    except LaunchError as error:
        return str(error)
    stack, stores, loads = map(int, re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", said))
    used = int(re.findall(r"Used (\d+) registers", said)[0])
    wrong = stack or stores or loads or used > variant.config.entry_registers or "(C75" in said
    return f"{variant.config.name}: {' '.join(said.split())}" if wrong else ""


@needs_ptxas
def test_ptxas_accepts_every_part(failing: Any) -> None:
    """Kernels with every feature assemble."""

    def check(variant: Variant) -> None:
        assert faults(variant) == ""

    assert not failing(check, itertools.product(VARIANTS))


@needs_ptxas
@pytest.mark.parametrize("m", [1, 40, 4096])
def test_ptxas_accepts_every_listed_kernel(m: int) -> None:
    """The first twelve listed kernels and every fifth configuration assemble."""
    shape = Shape("a16w16", m, 7168, 8192, epilogue="bias")
    first = [arguments_of(config, splits, shape, 132).variant for config, splits in enumerate_candidates(shape, H200)[:12]]
    others = [Variant(config, "bf16", "bf16", "bf16", True) for config in list(enumerate_configs(shape))[m % 5 :: 5]]
    assert [fault for variant in dict.fromkeys([*first, *others]) if (fault := faults(variant))] == []


@needs_ptxas
def test_ptxas_accepts_every_listed_kernel_of_eight_bits(failing: Any) -> None:
    """The first eight listed 8-bit kernels and every ninth configuration assemble."""

    def check(m: int, op: str, dtype: str, scale: str) -> None:
        bias = "" if scale == "block" else "bf16"
        columns = op.endswith("_bpreshuffle")
        layout = {"columns": columns, "transposed": columns or m % 2 == 0, "padded": not columns and m == 40}
        shape = Shape(op, m, 7168, 8192, dtype, "bf16", "bias" if bias else "none", bias, scale, COLUMNS if columns else "row")
        first = [
            Variant(config, dtype, "bf16", bias, splits > 1 or config.stream, scale=scale, **layout)
            for config, splits in enumerate_candidates(shape, H200)[:8]
        ]
        listed = [config for config in enumerate_configs(shape) if not unfit(config, 2, shape)]
        others = [Variant(config, dtype, "bf16", bias, True, scale=scale, **layout) for config in listed[m % 9 :: 9]]
        assert [fault for variant in dict.fromkeys([*first, *others]) if (fault := faults(variant))] == []

    assert not failing(
        check,
        [
            (case0, *case1)
            for case0 in [1, 40, 127, 4096]
            for case1 in [
                ("a8w8", "fp8_e4m3fn", "row"),
                ("a8w8", "int8", "row"),
                ("a8w8_blockscale", "fp8_e4m3fn", "block"),
                ("a8w8_blockscale_bpreshuffle", "fp8_e4m3fn", "block"),
            ]
        ],
    )


@needs_ptxas
def test_ptxas_accepts_alternating_consumers(failing: Any) -> None:
    """Every ping-pong tile assembles."""

    def check(tile_m: int, tile_n: int) -> None:
        (config,) = (
            config
            for config in enumerate_configs(Shape("a16w16", 4096, 7168, 8192))
            if config.turns and (config.tile_m, config.tile_n) == (tile_m, tile_n)
        )
        variants = [
            Variant(config, "bf16", "bf16"),
            Variant(config, "bf16", "bf16", together=1),
            Variant(attrs.evolve(config, cluster=2), "bf16", "bf16", "bf16", True),
            Variant(config, "fp16", "fp32", "fp16", together=1),
            Variant(config, "fp8_e4m3fn", "bf16", "bf16", scale="row"),
            Variant(config, "int8", "fp32", "fp32", True, 1, "row"),
        ]
        assert [fault for variant in variants if (fault := faults(variant))] == []

    assert not failing(check, [(tile_a, tile_b) for (tile_a, _), ladder in TURNS.items() for tile_b in ladder])


@needs_ptxas
@pytest.mark.parametrize(
    ("dtype", "scale", "bias"),
    [("bf16", "none", "bf16"), ("fp8_e4m3fn", "row", "fp32"), ("fp8_e4m3fn", "block", ""), ("int8", "row", "fp16")],
)
def test_ptxas_accepts_every_plan_with_panels(dtype: str, scale: str, bias: str) -> None:
    """Every tile with TMA stores assembles."""
    op = {"none": "a16w16", "block": "a8w8_blockscale"}.get(scale, "a8w8")
    shape = Shape(op, 4096, 7168, 8192, dtype, "bf16", "bias" if bias else "none", bias, scale=scale)
    storing = [Variant(config, dtype, "bf16", bias, True, scale=scale) for config in enumerate_configs(shape) if config.panels]
    assert len(storing) >= 10
    assert [fault for variant in storing if (fault := faults(variant))] == []


@needs_ptxas
def test_what_does_not_assemble_is_an_error() -> None:
    """Unknown instructions and serialized wgmma raise."""
    found, text = build.ptxas(), text_of(VARIANTS[0])
    assert found is not None
    with pytest.raises(LaunchError, match=r"ptxas: .*error"):
        build.assembled(text.replace("wgmma.fence.sync.aligned", "wgmma.fences"), found[0])
    # ptxas 12.8 to 13.0 serialize a wgmma that some threads may skip.
    skipped = text.replace("    wgmma.mma_async", "    @%p0 wgmma.mma_async", 1)
    with pytest.raises(LaunchError, match="instructions are serialized"):
        build.assembled(skipped, found[0])
    with pytest.raises(LaunchError, match="nowhere"):
        build.assembled(text, Path("/nowhere/ptxas"))


@needs_ptxas
def test_code_is_assembled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code comes from the artifact cache the second time."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path))
    variant = VARIANTS[-1]
    first = build.code(variant)
    assert first[:4] == b"\x7fELF"
    monkeypatch.setattr(build, "assembled", lambda *_: pytest.fail("assembled again"))
    assert build.code(variant) == first
    monkeypatch.setattr(build, "ptxas", lambda: None)
    assert build.code(variant) == text_of(variant).encode() + b"\0"


def test_an_assembler_that_does_not_run_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ptxas that does not run is skipped."""
    broken = tmp_path / "ptxas"
    broken.write_text("no program")
    broken.chmod(0o755)
    works = tmp_path / "cuda" / "bin" / "ptxas"
    works.parent.mkdir(parents=True)
    works.write_text("#!/bin/sh\necho release 99.1, V99.1.7\n")
    works.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(build, "_in_triton", lambda: iter(()))
    build.ptxas.cache_clear()
    try:
        assert build.ptxas() == (works, "99.1, V99.1.7")
    finally:
        build.ptxas.cache_clear()
