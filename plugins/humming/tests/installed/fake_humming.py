"""The plugin's backend over a Humming that computes on the host, for processes that tests start.

A launch decodes its operands thread by thread, as Humming's kernel holds them. That needs nothing
of the core, so a wrong order of codes, scales or zero points gives a wrong product.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import attrs
import torch
from tunedgemm.plugin import Device
from tunedgemm.tools.files import private_folder
from tunedgemm_humming import Humming, humming
from tunedgemm_humming.library import Installation, Library

VERSION = "humming 0.1.20"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8e4m3": torch.float8_e4m3fn, "float8e8m0": torch.float8_e8m0fnu}
BITS = {"uint4": 4, "uint8": 8, "float8e4m3": 8, "float4e2m1": 4}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Binaries by number, what was compiled, and launches: the kernel and M.
kernels: dict[int, dict[str, Any]] = {}
built: list[dict[str, Any]] = []
launches: list[tuple[dict[str, Any], int]] = []


def choose(layer: dict[str, Any], m: int, index: int) -> dict[str, Any]:
    """Return a tuning that depends on M, with the settings that Humming's heuristics for Hopper have."""
    assert layer["sm_version"] == 90 and m > 0 and index == 0
    if m <= 16:
        rows = 8 if m <= 8 else 16
        tuning = {"mma_type": "mma", "block_shape": (rows, 128, 128), "warp_shape": (rows, 64, 32), "use_tma": False}
        return tuning | {"num_stages": 4, "num_ctas_per_sm": 1, "use_stream_k": True, "use_warp_spec": False, "raster_group_m": 1}
    rows = min(m // 8 * 8, 128)
    tuning = {"mma_type": "wgmma", "block_shape": (rows, 128, 64), "warp_shape": (rows, 32, 64), "use_tma": True}
    return tuning | {
        "num_stages": 4,
        "use_stream_k": True,
        "use_warp_spec": True,
        "use_f16_accum": False,
        "multi_cast_size_a": 1 + (m > 500),
    }


def check(config: dict[str, Any]) -> None:
    """Assert the limits of sizes, as Humming does."""
    tile, warp = config["block_shape"], config["warp_shape"]
    assert not config["shape_n"] % tile[1] and not config["shape_k"] % tile[2]
    assert not any(block % part for block, part in zip(tile, warp, strict=True))
    assert config["num_stages"] >= (3 if config["mma_type"] == "wgmma" else 2)
    assert sum(tile[:2]) * tile[2] * 2 * config["num_stages"] * config["num_ctas_per_sm"] < 228 << 10


def build(config: dict[str, Any]) -> str:
    """Write a binary that states its configuration."""
    check(config)
    text = json.dumps(config)
    file = private_folder("fake_humming") / f"{hashlib.sha256(text.encode()).hexdigest()}.cubin"
    file.write_text(text)
    built.append(config)
    return str(file)


def register(path: str) -> int:
    """Read a binary."""
    number = int(Path(path).stem[:12], 16)
    kernels[number] = json.loads(Path(path).read_text())
    return number


def require(condition: bool, message: str) -> None:
    """Raise the exception of a failed check in C++."""
    if not condition:
        raise RuntimeError(message)


def codes_of(words: torch.Tensor, bits: int, n: int, k: int) -> torch.Tensor:
    """Return the codes [N, K] by the loops of ``weight_repack_nk`` in Humming's ``process.cuh``."""
    words = words.to(torch.int64) & 0xFFFFFFFF
    per = 32 // bits
    flat = torch.empty(k // 16, n // 64, 32, bits, per, dtype=torch.int64)
    for place in range(per):  # get_interleaved_index
        flat[..., place % (per // 2) * 2 + place // (per // 2)] = words.view(k // 16, n // 64, 32, bits) >> place * bits & (1 << bits) - 1
    # Threads are 8 by 4. Each has 16 rows by four, then 8 rows by two, 8 columns by two, and pairs.
    return flat.view(k // 16, n // 64, 8, 4, 4, 2, 2, 2).permute(1, 4, 5, 2, 0, 6, 3, 7).reshape(n, k)


def places(n: int, on_output: bool) -> list[int]:
    """Return where the scale of each row of the weight is."""
    if on_output:
        return [c // 32 * 32 + 8 * (c % 8 // 2) + 2 * (c % 32 // 8) + c % 2 for c in range(n)]
    return [c // 64 * 64 + 8 * (c % 8) + c % 64 // 8 for c in range(n)]


def values_of(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the values of codes without zero points."""
    if kind == "float8e4m3":
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    if kind == "float4e2m1":
        return torch.tensor([sign * size for sign in (1, -1) for size in E2M1], dtype=torch.float64)[codes]
    return codes.double()


def launch(*, configs, inputs, weight, weight_scale, weight_scale_2=None, zero_point=None, outputs, locks=None) -> torch.Tensor:
    """Check the operands as ``tensor.h`` does, and multiply by the weight that the threads see."""
    first, last, number, sms = configs.tolist()
    kernel, m = kernels[number], inputs.shape[0]
    require(configs.dtype is torch.int64 and (first, last, sms) == (0, 1 << 30, 0), "configs")
    n, k, kind, dtype = kernel["shape_n"], kernel["shape_k"], kernel["b_dtype"], DTYPES[kernel["a_dtype"]]
    require(not (kind == "uint8" and dtype is torch.bfloat16), "codes of 8 bits are packed otherwise for bfloat16")
    bits, group = BITS[kind], kernel["weight_scale_group_size"]
    groups, scale_dtype = k // (group or k), DTYPES[kernel.get("bs_dtype", kernel["a_dtype"])]
    wanted = {inputs: (dtype, (m, k)), outputs: (dtype, (m, n)), weight: (torch.int32, (k // 16, n * bits // 2))}
    for tensor, (its_dtype, sizes) in {**wanted, weight_scale: (scale_dtype, (groups, n))}.items():
        require(tensor.is_contiguous() and tensor.dtype is its_dtype and tuple(tensor.shape) == sizes, f"{tuple(tensor.shape)} for {sizes}")
    values = values_of(codes_of(weight, bits, n, k), kind)
    if kernel["has_zero_point"]:
        require(zero_point.dtype is torch.int32 and tuple(zero_point.shape) == (groups, n // 8), "bzp")
        nibbles = torch.stack([zero_point.to(torch.int64) >> shift & 15 for shift in range(0, 32, 4)], -1).view(groups, n)
        values -= nibbles[:, places(n, False)].t().repeat_interleave(k // groups, 1)
    elif kind.startswith("uint"):
        values -= 1 << bits - 1
    scales = weight_scale.float().double()[:, places(n, not group)]
    values *= scales.t().repeat_interleave(k // groups, 1)
    require((weight_scale_2 is not None) == ("weight_scale_2_type" in kernel), "bs2")
    if kernel["use_stream_k"]:
        require(locks.numel() >= kernel["num_ctas_per_sm"] * 132 * 1.1 and not locks.any(), "locks that are zero")
    launches.append((kernel, m))
    product = inputs.double() @ values.t()
    outputs.copy_(product if weight_scale_2 is None else product * weight_scale_2.double())
    return outputs


library = Library(choose, check, build, register, launch)
hooks = Humming("fakehumming", lambda: Installation(VERSION), str, lambda: library)
fakehumming = attrs.evolve(humming, libtype="fakehumming", hooks=hooks, host=Device("sm_90", 132, "nvidia-h200"))
