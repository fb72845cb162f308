"""Parse AITER's kernel names: what a kernel needs of AITER, and for which shapes it is made.

The names are those of AITER's tables at its commit e4048607.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import attrs
from tunedgemm.plugin import Device, PluginError, Shape
from tunedgemm.tools.launching import ARCHITECTURES

from tunedgemm_aiter.installed import Need

#: The name of a row that leaves the kernel to AITER.
AUTO = "auto"
#: Fused MoE: the argument of AITER's implementation that names a table for one call.
MOE = Need("fused_moe.py", "_metadata_config_file", "newer than 0.1.20.post1 (commit d78f4797, 22 August 2026)")
MOE_AUTO = Need("fused_moe.py", "def fused_moe(", "0.1.5 or newer")
_OPUS_KERNELS = "csrc/opus_gemm/opus_gemm_common.py"
GLUON = {
    "a16w16": Need("ops/triton/gemm/basic/gemm_a16w16.py", "gluon", "0.1.16 or newer"),
    "a8w8": Need("ops/triton/gluon/gemm_a8w8.py", "def gemm_a8w8(", "0.1.12 or newer"),
    "a8w8_blockscale": Need("ops/triton/gluon/gemm_a8w8_blockscale.py", "def gemm_a8w8_blockscale(", "0.1.9 or newer"),
}
_TYPES = {"f16": "fp16", "bf16": "bf16"}

_HGEMM = re.compile(
    r"flydsl_gemm(?P<stages>\d+)_a(?P<dtype>\w+?)_w(?P=dtype)_\w+?_t(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_split_k(?P<split>\d+)_"
    r".*_b_preshuffle(?P<shuffled>True|False)_.*?(?P<small>small_m_.*)?(?P<gfx>gfx[0-9a-z]+)"
)
_PRESHUFFLE = re.compile(
    r"flydsl_bpreshuflle_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_\w+_\w+_\w+_(?P<copies>\d+)x\d+(?:x\d+){0,2}(?P<scheduler>_[A-Za-z]\w*)?"
)
_WAVES = re.compile(r"flydsl_bpreshuffle_8w_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_\w+_\w+_\w+_\d+x\d+")
_WMMA = re.compile(r"flydsl_bpreshuffle_wmma_t(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_mw\d+_nw\d+_nb(?P<stages>\d+)_sk(?P<split>\d+)_cm\d+_cn\d+")
#: Tiles that AITER counts for splits of K; where it runs one kind of kernel alone: from M, N, K on.
_COUNTERS, _LARGE = 256, 4096
#: Bytes that a lane copies to LDS at a time; copies that a wave may wait for.
_COPIED, _IN_FLIGHT = {"gfx942": 4, "gfx950": 16}, 63
_LARGE_KERNEL = re.compile(r"flydsl_gemm2_\w+_t256x256x64_split_k1_block_m_warp2_block_n_warp4_block_k_warp1_")
_OPUS = re.compile(
    r"opus_gemm_(?:(?P<gfx>gfx\d+)_)?(?P<family>[a-z]\w*?_)?(?P<threads>\d+)x(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_(?P<waves>\d+x\d+)_\d+x\d+x\d+_\d+x\d+x\d+"
    r"(?P<rest>\w*)"
)


@attrs.frozen
class Kernel:
    """What a kernel's name says.

    Attributes:
        name: as in AITER's tables.
        need: what it needs of AITER.
        gfx: its architectures; empty for all of the op.
        tile: its tile along M, N and K.
        family: how it works, which decides about odd sizes.
        split: splits of K in the name; 0 where a row's splitK has them.
        dtype: of the operands; "" for any of the op.
        steps: least steps of its tile along K in each split.
    """

    name: str
    need: Need
    gfx: tuple[str, ...] = ()
    tile: tuple[int, int, int] = (1, 1, 1)
    family: str = ""
    split: int = 0
    dtype: str = ""
    steps: int = 1


def parse(libtype: str, op: str, name: str) -> Kernel:
    """Return what the name of a kernel says.

    Raises:
        PluginError: the libtype has no kernels with such names for this op.
    """
    parser = _PARSERS.get((libtype, op))
    kernel = parser(name) if parser is not None else None
    if kernel is None:
        raise PluginError(f"{libtype}: no kernel of {op} has such a name (got {name!r})")
    return kernel


def _hgemm(name: str) -> Kernel | None:
    found = _HGEMM.fullmatch(name)
    if not found or found["dtype"] not in _TYPES or found["shuffled"] == "True":
        return None
    # Since 0.1.16 the names have the warps along K.
    need = Need("ops/flydsl/gemm_kernels.py", "block_k_warp", "0.1.16 or newer")
    steps = 1 if found["small"] else int(found["stages"])
    return Kernel(name, need, (found["gfx"],), _tile(found), "hgemm", int(found["split"]), _TYPES[found["dtype"]], steps)


def _preshuffled(name: str) -> Kernel | None:
    file = "ops/gemm_op_a8w8.py"
    if found := _PRESHUFFLE.fullmatch(name):
        need = Need(file, "scheduler", "0.1.18 or newer") if found["scheduler"] else Need(file, "bpreshuflle", "0.1.13 or newer")
        # LLVM ends the process on gfx942, which copies no 16 bytes of a lane to LDS.
        gfx = ("gfx942", "gfx950") if found["copies"] == "0" else ("gfx950",)
        return Kernel(name, need, gfx, _tile(found), "preshuffle")
    if found := _WAVES.fullmatch(name):
        need = Need(file, "flydsl_bpreshuffle_8w_", "0.1.20 or newer")
        return Kernel(name, need, ("gfx950",), (1, 16, int(found["k"])), "8w", 1, "fp8_e4m3fn", 2)
    if found := _WMMA.fullmatch(name):
        need = Need("ops/flydsl/bpreshuffle_gemm_gfx1250.py", "flydsl_bpreshuffle_wmma_", "0.1.16 or newer")
        return Kernel(name, need, ("gfx1250",), _tile(found), "wmma", int(found["split"]), "fp8_e4m3fn", int(found["stages"]))
    return None


def _opus(name: str) -> Kernel | None:
    found = _OPUS.fullmatch(name)
    if not found or "a8w8" in (found["family"] or ""):
        return None
    family = (found["family"] or "") + found["rest"]
    tile = _tile(found)
    if "wkc" in family:  # the waves of a block that are not along M and N share K
        waves = [int(text) for text in found["waves"].split("x")]
        tile = (*tile[:2], tile[2] * (int(found["threads"]) // 64) // (waves[0] * waves[1]))
    return Kernel(name, Need(_OPUS_KERNELS, "def name", "0.1.16 or newer"), (found["gfx"] or "gfx950",), tile, family)


def _opus_blockscale(name: str) -> Kernel | None:
    found = _OPUS.fullmatch(name)
    if not found or "a8w8_bs_bpreshuf" not in (found["family"] or ""):
        return None
    need = Need("ops/opus/gemm_op_a8w8.py", "def opus_gemm_a8w8_blockscale_bpreshuffle_tune(", "0.1.18 or newer")
    return Kernel(name, need, (found["gfx"] or "gfx942",), (1, *_tile(found)[1:]), "blockscale")


_PARSERS: Mapping[tuple[str, str], Callable[[str], Kernel | None]] = {
    ("flydsl", "a16w16"): _hgemm,
    ("flydsl", "a8w8_bpreshuffle"): _preshuffled,
    ("opus", "a16w16"): _opus,
    ("opus", "a8w8_blockscale_bpreshuffle"): _opus_blockscale,
    **{("gluon", op): lambda name, need=need: Kernel(name, need) if name in (AUTO, "") else None for op, need in GLUON.items()},
    **{(libtype, "fmoe"): lambda name: Kernel(name, MOE_AUTO if name == AUTO else MOE) for libtype in ("flydsl", "aiter")},
}


def _tile(found: re.Match[str]) -> tuple[int, int, int]:
    return int(found["m"]), int(found["n"]), int(found["k"])


def unfit(kernel: Kernel, split: int, shape: Shape, device: Device) -> str:
    """Return why a kernel does not serve a shape on a device; "" where its name excludes nothing."""
    if kernel.gfx and device.gfx not in kernel.gfx:
        return f"{kernel.name} is compiled for {' and '.join(kernel.gfx)} (got {device.gfx})"
    if kernel.dtype and shape.dtype != kernel.dtype:
        return f"{kernel.name} multiplies {kernel.dtype} (got {shape.dtype})"
    if kernel.name.startswith("opus_"):
        return _unfit_for_opus(kernel, split, shape)
    _, n, k = kernel.tile
    steps = n and max(kernel.split, 1) * k
    if shape.n % n or shape.k % steps:
        return f"{kernel.name} needs N in multiples of {n} and K in multiples of {steps} (got N={shape.n}, K={shape.k})"
    if shape.k < kernel.steps * steps:
        return f"{kernel.name} needs K of at least {kernel.steps * steps} (got K={shape.k})"
    if kernel.family == "hgemm" and kernel.steps > 1:
        return _unfit_for_hgemm(kernel, shape, device)
    return _unfit_for_8w(kernel, shape) if kernel.family == "8w" else ""


def _unfit_for_hgemm(kernel: Kernel, shape: Shape, device: Device) -> str:
    """Return why AITER or its kernel refuses a shape of bf16 or fp16 that its tile divides."""
    m, n, k = kernel.tile
    tiles = -(-shape.m // m) * (shape.n // n)
    if kernel.split > 1 and tiles > _COUNTERS:
        return f"{kernel.name} splits K of {_COUNTERS} tiles at most (got {tiles})"
    if min(shape.m, shape.n, shape.k) >= _LARGE and not _LARGE_KERNEL.match(kernel.name):
        return f"{kernel.name} is none that AITER runs where M, N and K are {_LARGE} or more"
    warps = [int(count) for count in re.findall(r"block_[mnk]_warp(\d+)", kernel.name)] or [1]
    if max(kernel.steps * (m + n) * k, warps[-1] * m * n) * 2 > ARCHITECTURES[device.gfx].shared_bytes:
        return f"{kernel.name} needs more LDS than {device.gfx} has"
    copied = math.prod(warps) * 64 * _COPIED.get(device.gfx, 16)
    if (kernel.steps - 2) * (m * k * 2 // copied + n * k * 2 // copied) >= _IN_FLIGHT:
        return f"{kernel.name} has more copies in flight than {device.gfx} counts"
    return ""


def _unfit_for_8w(kernel: Kernel, shape: Shape) -> str:
    """Return why AITER refuses a kernel of eight waves whose tile divides the shape."""
    if shape.outdtype != "bf16":
        return f"{kernel.name} writes bf16 (got {shape.outdtype})"
    if max(shape.m * shape.n * 2, shape.m * shape.k, shape.n * shape.k) >= 1 << 31:
        return f"{kernel.name} takes operands of less than 2 GiB (got M={shape.m}, N={shape.n}, K={shape.k})"
    return ""


def _unfit_for_opus(kernel: Kernel, split: int, shape: Shape) -> str:
    """Return why an opus kernel does not serve a shape, by the rules of AITER's tuner.

    AITER's launchers check only a part of them, and a kernel out of bounds writes wrong elements.
    """
    m, n, k = kernel.tile
    sizes = f"(got M={shape.m}, N={shape.n}, K={shape.k})"
    steps = -(-shape.k // k)
    if "nooob" in kernel.family and (shape.m % m or shape.n % n or shape.k % k):
        return f"{kernel.name} needs multiples of its tile {m}x{n}x{k} {sizes}"
    if split and "splitk" not in kernel.family:
        return f"{kernel.name} does not split K (got splitK {split})"
    if "4g_safe" not in kernel.family and max(shape.m * shape.k * 2, shape.n * shape.k * 2, shape.m * shape.n * 4) >= 1 << 32:
        return f"{kernel.name} takes operands of less than 4 GiB {sizes}"
    if kernel.family == "blockscale" and (shape.n % n or shape.k % k):
        return f"{kernel.name} needs N in multiples of {n} and K in multiples of {k} {sizes}"
    if "wkc" in kernel.family and shape.k % k:
        return f"{kernel.name} needs K in multiples of {k} {sizes}"
    if "splitk_p1" in kernel.family and split > 0 and not _are_even(steps, split):
        return f"{kernel.name} needs an even number of steps of {k} in each of {split} splits {sizes}"
    whole = not any(word in kernel.family for word in ("splitk", "wkc", "mono", "blockscale"))
    if whole and (steps < 2 or steps % 2 or shape.n % 16):
        return f"{kernel.name} needs an even number of steps of {k} along K, and N in multiples of 16 {sizes}"
    if "mono" in kernel.family and (shape.m % m or shape.n % n or shape.k % k):
        return f"{kernel.name} needs multiples of its tile {m}x{n}x{k} {sizes}"
    return ""


def _are_even(steps: int, split: int) -> bool:
    """Tell whether each split has an even number of steps, at least two."""
    each = -(-steps // split)
    last = steps - (split - 1) * each
    return last >= 2 and each % 2 == 0 and last % 2 == 0


def cells(extra: tuple[tuple[str, object], ...]) -> Mapping[str, str]:
    """Return the further columns of a row as texts."""
    return {name: str(value).strip() for name, value in extra}
