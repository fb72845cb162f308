"""Compile an instance of each op of the families `ck` and `cktile` for the device alone, and count what its code object has.

::

    python benchmarks/ck_compile.py --include CK/include HIP/include CLR/hipamd/include --bitcode BITCODE --objects objects --csv ck.csv
    python benchmarks/ck_compile.py --only a16w16 --clang clang-19 ...

Needs no GPU, but clang 19 or later (20 or later for gfx950), the headers of Composable Kernel and of HIP, and the bitcode of ROCm's device
libraries. A row for each kernel of a code object: registers, spilled registers, bytes of LDS, matrix instructions. One compiler at a time;
code objects and the seconds of their compiles stay in ``--objects`` and are taken from there where the source is the same.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tunedgemm_ck
from tunedgemm_ck import tile, xdl
from tunedgemm_ck.family import Instance
from tunedgemm_ck.problem import Problem
from tunedgemm_ck.stages import split_stages as parts

SOURCES = Path(tunedgemm_ck.__file__).parent / "sources"
FNUZ, OCP, SHUFFLED = "fp8_e4m3fnuz", "fp8_e4m3fn", "aiter16x16"


def moe(gfx: str, q_type: str, q_dtype: str) -> Problem:
    """Both stages of a gated mixture of experts, whose second multiplies the weights of the routing in."""
    return Problem("fmoe", gfx, "bf16", "bf16", layout=SHUFFLED, act="silu", gated=True, q_type=q_type, q_dtype=q_dtype)


#: Family and problem, and the instance: one that AITER's tables choose often, of those that compile in minutes.
CASES = (
    (
        xdl,
        Problem("a16w16", "gfx942", "bf16", "bf16", "bf16"),
        "a16w16_256x128x128x64_32x32_2x2_8x32x1_8x32x1_1x32x1x8_8x8x1_1x1_intrawave_v3",
    ),
    (
        xdl,
        Problem("a8w8", "gfx942", "int8", "bf16"),
        "a8w8_rowwise_256x128x128x128_32x32_2x2_8x32x1_8x32x1_1x32x1x8_8x8x1_1x1_intrawave_v3",
    ),
    (xdl, Problem("a8w8", "gfx942", FNUZ, "bf16"), "a8w8_rowwise_256x16x64x512_16x16_1x1_32x8x1_32x8x1_1x16x1x16_4x4x1_1x1_intrawave_v3"),
    (
        xdl,
        Problem("a8w8_bpreshuffle", "gfx942", FNUZ, "bf16", layout=SHUFFLED),
        "a8w8_bpreshuffle_128x16x32x512_16x16_16x16_32x4x1_32x4x1_1x16x1x8_4x4x1_1x1_intrawave_v1",
    ),
    (
        xdl,
        Problem("a8w8_blockscale", "gfx942", FNUZ, "bf16"),
        "a8w8_blockscale_1x128x128_256x16x64x256_16x16_16x16_1x1_16x16x1_16x16x1_1x16x1x16_4_1x1_intrawave_v1",
    ),
    (
        xdl,
        Problem("a8w8_blockscale_bpreshuffle", "gfx942", FNUZ, "bf16", layout=SHUFFLED),
        "a8w8_blockscale_bpreshuffle_1x128x128_256x16x64x256_16x16_16x16_16x16x1_16x16x1_1x16x1x16_4_1x1_intrawave_v1",
    ),
    (
        xdl,
        Problem("batched_bf16", "gfx942", "bf16", "bf16"),
        "bf16_batched_256x32x96x128_16x16_1x3_16x16x1_16x16x1_1x32x1x8_4x4x1_1x1_intrawave_v3",
    ),
    (
        xdl,
        Problem("batched_a8w8", "gfx942", "int8", "bf16"),
        "a8w8_batched_rowwise_256x32x128x256_32x32_1x1_16x16x1_16x16x1_1x32x1x8_8x8x1_1x1_intrawave_v3",
    ),
    (xdl, Problem("a8w8", "gfx950", OCP, "bf16"), "a8w8_rowwise_256x16x64x512_16x16_1x1_32x8x1_32x8x1_1x16x1x16_4x4x1_1x1_intrawave_v3"),
    (
        xdl,
        Problem("a4w4_blockscale", "gfx950", "fp4x2", "bf16", layout=SHUFFLED),
        "a4w4_blockscale_256x32x128x128_16x16_16x16_8x32x1_8x32x1_1x16x1x16_8_2x2_intrawave_v3",
    ),
    (
        xdl,
        moe("gfx942", "No", "bf16"),
        "moe_ck2stages_gemm1_256x32x64x64_1x4_TypeCast_v1_Nswizzle0_Quant0_MulRoutedWeight0_silu_B16_B16_B16"
        "+moe_ck2stages_gemm2_256x32x64x64_1x4_TypeCastExpertWeight_v1_Nswizzle0_Quant0_MulRoutedWeight1_B16_B16_B16",
    ),
    (
        xdl,
        moe("gfx942", "No", "bf16"),
        "moe_ck2stages_gemm1_256x64x128x64_1x4_TypeCast_v3_Nswizzle0_Quant0_MulRoutedWeight0_silu_B16_B16_B16"
        "+moe_ck2stages_gemm2_256x64x128x128_1x4_TypeCastExpertWeight_v3_Nswizzle0_Quant0_MulRoutedWeight1_B16_B16_B16",
    ),
    (
        xdl,
        moe("gfx942", "per_Token", FNUZ),
        "moe_ck2stages_gemm1_256x32x64x256_1x4_MulABScale_v1_Nswizzle0_Quant2_MulRoutedWeight0_silu_F8_F8_B16"
        "+moe_ck2stages_gemm2_256x32x64x128_1x4_MulABScaleExpertWeight_v1_Nswizzle0_Quant2_MulRoutedWeight1_F8_F8_B16",
    ),
    (
        xdl,
        moe("gfx942", "per_Token", "int8"),
        "moe_ck2stages_gemm1_256x32x64x128_1x4_MulABScale_v1_Nswizzle0_Quant2_MulRoutedWeight0_silu_I8_I8_B16"
        "+moe_ck2stages_gemm2_256x16x128x256_1x4_MulABScaleExpertWeight_v1_Nswizzle0_Quant2_MulRoutedWeight1_I8_I8_B16",
    ),
    (
        xdl,
        moe("gfx942", "per_1x128", FNUZ),
        "moe_ck2stages_gemm1_256x16x128x256_1x4_MulABScaleExpertWeightA8W8blkscale_v1_Nswizzle0_Quant4_MulRoutedWeight0_silu_F8_F8_B16"
        "+moe_ck2stages_gemm2_256x16x128x256_1x4_MulABScaleExpertWeightA8W8blkscale_v1_Nswizzle0_Quant4_MulRoutedWeight1_F8_F8_B16",
    ),
    (
        xdl,
        moe("gfx942", "per_1x128", FNUZ),
        "moe_ck2stages_gemm1_256x64x128x128_1x4_MulABScaleExpertWeightA8W8blkscale_v3_Nswizzle0_Quant4_MulRoutedWeight0_silu_F8_F8_B16"
        "+moe_ck2stages_gemm2_256x64x128x128_1x4_MulABScaleExpertWeightA8W8blkscale_v3_Nswizzle0_Quant4_MulRoutedWeight1_F8_F8_B16",
    ),
    (
        xdl,
        moe("gfx950", "per_Token", OCP),
        "moe_ck2stages_gemm1_256x32x64x256_1x4_TypeCast_v1_Nswizzle0_Quant2_MulRoutedWeight0_silu_F8_F8_B16"
        "+moe_ck2stages_gemm2_256x32x64x128_1x4_TypeCast_v1_Nswizzle0_Quant2_MulRoutedWeight1_F8_F8_B16",
    ),
    (
        tile,
        Problem("a8w8_bpreshuffle", "gfx942", FNUZ, "bf16", layout=SHUFFLED),
        "a8w8_bpreshuffle_cktile_0x0x8x4x1x0x0x0x0x1_16x64x512_1x4x1_16x16x64_default",
    ),
)

#: Those of ROCm's device libraries that HIP links: what a compiler with ROCm around it does by itself.
BITCODE = (
    *("ocml", "ockl", "oclc_daz_opt_off", "oclc_unsafe_math_off", "oclc_finite_only_off", "oclc_correctly_rounded_sqrt_on"),
    *("oclc_wavefrontsize64_on", "oclc_isa_version_{isa}", "oclc_abi_version_500"),
)
FIELDS = (
    "libtype",
    "op",
    "gfx",
    "dtype",
    "bias",
    "clang",
    "headers",
    "kernelName",
    "kernel",
    "seconds",
    "vgpr",
    "agpr",
    "sgpr",
    "spilled",
    "lds",
    "mfma",
    "mfma_kinds",
)


def compiled(told: argparse.Namespace, family: Any, problem: Problem, instance: Instance) -> tuple[Path, float]:
    """The code object of an instance and the seconds of its compile."""
    source, flags = family.FAMILY.render(instance, problem), family.FAMILY.flags(instance, problem)
    key = hashlib.sha256(" ".join([version_of(told), *told.include, *flags, *source.split()]).encode()).hexdigest()[:16]
    stem = told.objects / f"{family.FAMILY.libtype}-{problem.gfx}-{key}"
    path, out, record = stem.with_suffix(".hip"), stem.with_suffix(".co"), stem.with_suffix(".json")
    if not record.is_file():
        path.write_text(source)
        started = time.monotonic()
        subprocess.run([*command(told, problem.gfx), *flags, str(path), "-o", str(out)], check=True)
        record.write_text(json.dumps(time.monotonic() - started))
    return out, json.loads(record.read_text())


def version_of(told: argparse.Namespace) -> str:
    """The compiler as it calls itself."""
    return subprocess.run([told.clang, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]


def command(told: argparse.Namespace, gfx: str) -> list[str]:
    """The compiler's command line without flags of an instance."""
    resources = subprocess.run([told.clang, "-print-resource-dir"], check=True, capture_output=True, text=True).stdout.strip()
    include = [part for folder in (f"{resources}/include/cuda_wrappers", *told.include) for part in ("-isystem", folder)]
    alone = [
        "-x",
        "hip",
        "--cuda-device-only",
        f"--offload-arch={gfx}",
        "-nogpulib",
        "-nogpuinc",
        "--no-gpu-bundle-output",
        "-O3",
        "-std=c++20",
    ]
    linked = [
        part
        for library in BITCODE
        for part in ("-Xclang", "-mlink-builtin-bitcode", "-Xclang", f"{told.bitcode}/{library.format(isa=told.isa)}.bc")
    ]
    # a macro of older compilers that headers of 2024 ask for
    wrapped = ["-include", "__clang_hip_runtime_wrapper.h", "-D__HIP_PLATFORM_AMD__=1", "-D__AMDGCN_WAVEFRONT_SIZE=64", f"-I{SOURCES}"]
    return [told.clang, *alone, "-O3", "-std=c++20", *include, *wrapped, *linked]


def kernels_of(told: argparse.Namespace, path: Path) -> Iterator[dict[str, Any]]:
    """What the notes and the instructions of a code object say of each kernel; CK's names are long, so a number stands for each."""
    notes = subprocess.run([told.readelf, "--notes", str(path)], check=True, capture_output=True, text=True).stdout
    listing = subprocess.run([told.objdump, "-d", str(path)], check=True, capture_output=True, text=True).stdout
    products: dict[str, Counter[str]] = {}
    for part in re.split(r"\n(?=[0-9a-f]{16} <)", listing):
        if found := re.match(r"[0-9a-f]{16} <(.+)>:", part):
            products[found[1]] = Counter(re.findall(r"\b(v_mfma_\w+)", part))
    for number, part in enumerate(re.split(r"\n  - (?=\.agpr_count|\.args)", notes)[1:], 1):
        values = dict(re.findall(r"\.(\w+): +'?([^'\n]+)'?", part))
        kinds = products.get(values["name"].strip(), Counter())
        if not kinds:  # CK's own, which empties the cache of instructions
            continue
        yield {
            "kernel": number,
            "vgpr": values["vgpr_count"],
            "agpr": values.get("agpr_count", "0"),
            "sgpr": values["sgpr_count"],
            "spilled": int(values["vgpr_spill_count"]) + int(values["sgpr_spill_count"]),
            "lds": values["group_segment_fixed_size"],
            "mfma": kinds.total(),
            "mfma_kinds": " ".join(sorted(kinds)),
        }


def main() -> None:
    """Compiles the cases that are asked for, one after the other, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--include", nargs="+", required=True, help="folders of headers: of CK and of HIP")
    parser.add_argument("--bitcode", required=True, help="folder of ROCm's device libraries")
    parser.add_argument("--isa", default="942", help="oclc_isa_version that is linked (940 where the libraries are older)")
    parser.add_argument("--clang", default="clang-19")
    parser.add_argument("--readelf", default="llvm-readelf-19")
    parser.add_argument("--objdump", default="llvm-objdump-19")
    parser.add_argument("--objects", type=Path, required=True, help="folder of code objects")
    parser.add_argument("--only", nargs="*", default=[], help="ops, libtypes or architectures, all of which a case must have")
    parser.add_argument("--headers", default="", help="what the table calls the headers of CK: their date or release")
    parser.add_argument("--csv", type=Path, required=True)
    told = parser.parse_args()
    told.objects.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for family, problem, name in CASES:
        libtype = family.FAMILY.libtype
        if not set(told.only) <= {libtype, problem.op, problem.gfx, problem.q_dtype or problem.dtype}:
            continue
        dtype = problem.q_dtype or problem.dtype
        case = {"libtype": libtype, "op": problem.op, "gfx": problem.gfx, "dtype": dtype, "bias": problem.bias_dtype}
        case |= {"clang": re.sub(r".*version (\S+).*", r"\1", version_of(told)), "headers": told.headers}
        for instance, part in parts(family.FAMILY.parse(name, problem.op), problem):
            path, seconds = compiled(told, family, part, instance)
            found = [{**case, "kernelName": instance.name, "seconds": f"{seconds:.0f}", **kernel} for kernel in kernels_of(told, path)]
            print(f"{libtype} {problem.op} {problem.gfx} {dtype}: {seconds:.0f} s, {len(found)} kernels", flush=True)
            rows += found
    with told.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
