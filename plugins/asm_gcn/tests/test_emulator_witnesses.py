"""Run kernels made by Triton and AMD on the emulator, and compare with numpy."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tunedgemm.plugin import Shape
from tunedgemm_asm.abi import ABIS
from tunedgemm_asm.launch import arguments_of
from tunedgemm_asm.manifest import read

pytestmark = pytest.mark.nightly

#: Read before a fixture hides it.
TREE = Path(os.environ.get("AITER_ASM_DIR") or "/nonexistent")
OBJDUMPS = [found for name in (*(f"llvm-objdump-{n}" for n in range(26, 16, -1)), "llvm-objdump") if (found := shutil.which(name))]


def disassembled(path):
    """Disassemble a code object with LLVM; skip without llvm-objdump."""
    for objdump in OBJDUMPS:
        command = [objdump, "--mcpu=gfx942", str(path)]
        done = [subprocess.run([*command, *more], capture_output=True, text=True) for more in (["-d"], ["-D", "-j", ".rodata"])]
        if not any(each.returncode for each in done):
            return done[0].stdout, done[1].stdout
    pytest.skip("no llvm-objdump that knows gfx942")


TRITON = """
import json, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def product(a, b, c, M, N, K, sa, sb, sc, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    pa, pb = a + rm[:, None] * sa + rk[None, :], b + rn[None, :] * sb + rk[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(pa, mask=(rm[:, None] < M) & (rk[None, :] + k < K), other=0.0)
        y = tl.load(pb, mask=(rn[None, :] < N) & (rk[:, None] + k < K), other=0.0)
        acc = tl.dot(x, y, acc)
        pa += BK
        pb += BK
    tl.store(c + rm[:, None] * sc + rn[None, :], acc.to(c.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))

for line in json.loads(sys.argv[1]):
    gfx, bm, bn, bk, warps, stages, side, out = line
    names = ["a", "b", "c", "M", "N", "K", "sa", "sb", "sc", "BM", "BN", "BK"]
    types = ["*bf16", "*bf16", "*" + out] + ["i32"] * 6 + ["constexpr"] * 3
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 5, 6, 7, 8)}
    source = ASTSource(product, dict(zip(names, types)), {"BM": bm, "BN": bn, "BK": bk}, aligned)
    made = triton.compile(source, GPUTarget("hip", gfx, 64), dict(num_warps=warps, num_stages=stages, matrix_instr_nonkdim=side))
    print(json.dumps([made.asm["amdgcn"], made.metadata.shared]))
"""
# Architecture, block of M, N and K, waves, stages, side of the matrix instruction, output.
QUICK = [("gfx942", 32, 32, 32, 1, 1, 16, "bf16"), ("gfx950", 64, 64, 64, 4, 2, 32, "fp32")]


def by_triton(folder, configurations):
    """Compile with Triton in a child process, because its LLVM aborts at errors."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton")
    program = folder / "product.py"
    program.write_text(TRITON)
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(configurations)], capture_output=True, text=True, check=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def check_triton(gcn, configuration, text, lds_bytes):
    """Check a product with tails in M, N and K."""
    _, bm, bn, _, warps, _, _, out = configuration
    m, n, k = 72, 80, 160
    draw = np.random.default_rng(bm)
    x, weight = (gcn.numbers.bf16(draw.standard_normal((rows, k))) for rows in (m, n))
    memory = gcn.Memory()
    addresses = [memory.place("x", x), memory.place("weight", weight), memory.place("out", m * n * (2 if out == "bf16" else 4))]
    given = [*(("Q", address) for address in addresses), *(("i", value) for value in (m, n, k, k, k, n)), ("Q", 0), ("Q", 0)]
    # Triton's ping-pong between halves of a workgroup relies on the order in which LDS gets reads
    # and writes.
    rules = gcn.Rules(late_reads=warps < 8)
    kernel = gcn.kernels_of(text)["product"]
    gcn.launch(kernel, (-(-m // bm), -(-n // bn)), (64 * warps,), gcn.arguments(*given), memory, rules, lds_bytes)
    found = memory.read("out", np.uint16 if out == "bf16" else np.float32).reshape(m, n)
    assert gcn.numbers.wrong(gcn.numbers.fp32(found) if out == "bf16" else found, x, weight, None, out) <= 1


def test_products_that_triton_compiles(gcn, tmp_path):
    """Triton's products of both architectures are right."""
    made = by_triton(tmp_path, QUICK)
    assert len(made) == len(QUICK)
    for configuration, (text, lds_bytes) in zip(QUICK, made, strict=True):
        check_triton(gcn, configuration, text, lds_bytes)


def aiter_kernels(gfx):
    """Return AITER's bf16 kernels by its manifest."""
    manifest = TREE / gfx / "bf16gemm" / "bf16gemm_fp32bf16.csv"
    return read(manifest, ABIS["aiter-bf16gemm"]).kernels if manifest.exists() else []


AITER = [(gfx, kernel) for gfx in ("gfx942", "gfx950") for kernel in aiter_kernels(gfx)]


def aiter_text(gcn, gfx, kernel, folder):
    """Return the text of an AITER bf16 kernel, with instructions that LLVM 19 does not decode."""
    path = TREE / gfx / "bf16gemm" / kernel.file
    if "256x256" not in kernel.name:
        return disassembled(path)
    code, found = gcn.newer.without(path.read_bytes())
    assert len(found) > 500
    known = folder / kernel.file
    known.write_bytes(code)
    text, descriptors = disassembled(known)
    return gcn.newer.put_back(text, found), descriptors


def check_aiter(gcn, gfx, kernel, out, order, folder):
    """Check a product with a tail in M through the launcher's arguments, with a bf16 bias."""
    abi, splits = ABIS["aiter-bf16gemm"], 3 if kernel.splits else 1
    layout, adds = "aiter16x16" if kernel.shuffled else "row", {"epilogue": "bias", "bias_dtype": "bf16"} if kernel.bias else {}
    shape = Shape("a16w16", kernel.tile_m + 5, 2 * kernel.tile_n, 512, outdtype=out, layout=layout, **adds)
    problem = arguments_of(kernel, splits, shape)
    draw = np.random.default_rng(kernel.tile_m)
    x, weight, bias = (gcn.numbers.bf16(draw.standard_normal(size)) for size in ((shape.m, shape.k), (shape.n, shape.k), shape.n))
    memory = gcn.Memory()
    size = 2 if out == "bf16" else 4
    given = {
        "out": np.full(size * shape.m * shape.n, 0x7F, np.uint8), "a": x, "b": gcn.numbers.shuffled(weight) if kernel.shuffled else weight,
        "bias": bias, "semaphore": np.zeros(problem.counters, np.uint32),
    }  # fmt: skip
    values = {**problem.values, **{name: memory.place(name, given[name]) for name in problem.addresses}}
    text, descriptors = aiter_text(gcn, gfx, kernel, folder)
    # Workgroups of split-K wait for those of the first part, so their turns are short where those
    # come last. Those of 256 by 256 rely on the hardware to hold back what reads a product too
    # soon.
    early = "256x256" in kernel.name
    rules = gcn.Rules(unobserved=False, wait_states=not early, order=order, slice=200_000 if order == "up" else 500)
    gcn.launch(gcn.kernels_of(text, gfx, descriptors)[kernel.name], problem.grid, (abi.threads,), abi.pack(values), memory, rules)
    found = memory.read("out", np.uint16 if out == "bf16" else np.float32).reshape(shape.m, shape.n)
    found = gcn.numbers.fp32(found) if out == "bf16" else found
    # Each split is added in bf16 and rounded.
    assert gcn.numbers.wrong(found, x, weight, gcn.numbers.fp32(bias) if kernel.bias else None, out, splits + (splits > 1)) <= 1
    if splits > 1:
        assert not memory.read("semaphore").any()


@pytest.mark.skipif(not AITER, reason="needs AITER_ASM_DIR, a tree of AITER's code objects")
@pytest.mark.parametrize("name", ["32x64_bshuffle_splitkE", "32x64_pf3_splitkE", "32x64_splitk_cleanE"])
def test_kernels_of_amd_compute_with_the_arguments_of_our_launcher(gcn, name, tmp_path):
    """AITER's bf16 kernels compute products from our arguments."""
    gfx, kernel = next((gfx, kernel) for gfx, kernel in AITER if name in kernel.name)
    for out in ("fp32",) if kernel.splits else ("bf16", "fp32"):
        check_aiter(gcn, gfx, kernel, out, "up", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not AITER, reason="needs AITER_ASM_DIR, a tree of AITER's code objects")
@pytest.mark.parametrize(("gfx", "kernel"), AITER, ids=lambda value: getattr(value, "name", value))
def test_every_kernel_of_amd_computes_with_the_arguments_of_our_launcher(gcn, gfx, kernel, tmp_path):
    """All tiles of AITER's manifests do, with workgroups in either order."""
    turn = AITER.index((gfx, kernel)) % 2
    out = "bf16" if "256x256" in kernel.name else ("bf16", "fp32")[turn]
    check_aiter(gcn, gfx, kernel, out, ("up", "down")[turn], tmp_path)


def scaled_kernels():
    """Return AITER's scaled gfx942 kernels, except one with indirect registers."""
    found = []
    for family, manifest in (("i8gemm", "i8gemm_bf16_perTokenI8.csv"), ("fp8gemm_blockscale", "fp8gemm_bf16_blockscale.csv")):
        path = TREE / "gfx942" / family / manifest
        if path.exists():
            kernels = read(path, ABIS[f"aiter-{family.replace('_', '-')}"]).kernels
            found += [(family, kernel) for kernel in kernels if "112x256" not in kernel.name]
    return found


SCALED = scaled_kernels()


def scaled_operands(gcn, family, m, n, k):
    """Return codes of x and weight, their scales, and the values in fp64."""
    draw = np.random.default_rng(m)
    if family == "i8gemm":
        x, weight = (draw.integers(-128, 128, (rows, k)).astype(np.int8) for rows in (m, n))
        scales = [(draw.random(rows).astype(np.float32) + 1) / 64 for rows in (m, n)]
        return x, weight, scales, x * scales[0][:, None].astype(np.float64), weight * scales[1][:, None].astype(np.float64)
    codes = np.asarray([code for code in range(256) if code & 0x7F < 0x50 and code != 0x80], np.uint8)
    x, weight = (codes[draw.integers(0, len(codes), (rows, k))] for rows in (m, n))
    of_x, of_weight = (draw.random((rows, k // 128)).astype(np.float32) + 0.5 for rows in (m, -(-n // 128)))
    value = gcn.numbers.e4m3(fnuz=True).astype(np.float64)
    wide = np.repeat(np.repeat(of_weight, 128, 0)[:n], 128, 1)
    return x, weight, [np.ascontiguousarray(of_x.T), of_weight], value[x] * np.repeat(of_x, 128, 1), value[weight] * wide


def check_scaled(gcn, family, kernel, splits):
    """Check a product with a tail in M; these kernels truncate to bf16 and add splits in bf16."""
    abi = ABIS[kernel.abi]
    op, dtype, scale = {"i8gemm": ("a8w8_bpreshuffle", "int8", "row")}.get(family, ("a8w8_blockscale_bpreshuffle", "fp8_e4m3fnuz", "block"))
    m, n, k = kernel.tile_m + 5, 2 * kernel.tile_n, 512
    problem = arguments_of(kernel, splits, Shape(op, m, n, k, dtype=dtype, outdtype="bf16", scale=scale, layout=abi.layout))
    x, weight, scales, left, right = scaled_operands(gcn, family, m, n, k)
    given = {
        "out": np.zeros((m, n), np.uint16) if problem.zeroed else np.full((m, n), 0x7F7F, np.uint16), "a": x,
        "b": gcn.numbers.shuffled(weight), "a_scale": scales[0], "b_scale": scales[1], "bias": np.zeros(n, np.float32),
    }  # fmt: skip
    memory = gcn.Memory()
    values = {**problem.values, **{name: memory.place(name, given[name]) for name in problem.addresses}}
    text, descriptors = disassembled(TREE / "gfx942" / family / kernel.file)
    # The fp8 kernels read products sooner than LLVM would let them, and so rely on the hardware to
    # hold them back.
    rules = gcn.Rules(unobserved=False, wait_states=family == "i8gemm")
    gcn.launch(gcn.kernels_of(text, "gfx942", descriptors)[kernel.name], problem.grid, (abi.threads,), abi.pack(values), memory, rules)
    found = gcn.numbers.fp32(memory.read("out", np.uint16).reshape(m, n))
    exact, size = left @ right.T, np.abs(left) @ np.abs(right).T
    slack = 2.0**-7 * (np.abs(exact) if splits == 1 else np.abs(exact) + splits * size / 8) + 2.0**-20 * size
    assert (np.abs(found - exact) <= slack).all()


@pytest.mark.skipif(not SCALED, reason="needs AITER_ASM_DIR, a tree of AITER's code objects")
@pytest.mark.parametrize("name", ["I8gemm_bf16_perTokenI8_BpreShuffle_16x128E", "fp8gemm_bf16_blockscale_BpreShuffle_32x128E"])
def test_scaled_kernels_of_amd_compute_with_the_arguments_of_our_launcher(gcn, name):
    """AITER's scaled kernels compute products from our scales, strides and weight layout."""
    check_scaled(gcn, *next((family, kernel) for family, kernel in SCALED if kernel.name.endswith(name)), 1)


@pytest.mark.slow
@pytest.mark.skipif(not SCALED, reason="needs AITER_ASM_DIR, a tree of AITER's code objects")
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("family", "kernel"), SCALED, ids=lambda value: getattr(value, "name", value))
def test_every_scaled_kernel_of_amd_computes_with_the_arguments_of_our_launcher(gcn, family, kernel, splits):
    """All their tiles do, with one split and with two."""
    check_scaled(gcn, family, kernel, splits)
