"""Marlin and Machete on the host: operands are decoded thread by thread, as the kernels hold them.

Nothing here is of the core, so a wrong order of codes, scales or zero points gives a wrong product.
"""

from __future__ import annotations

import functools
import math

import torch

#: Declared by vLLM 0.33 in ``torch_bindings.cpp``.
SCHEMAS = (
    "marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, Tensor b_scales, Tensor? a_scales, "
    "Tensor? global_scale, Tensor? b_zeros_or_none, Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, SymInt size_k, "
    "bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor",
    "machete_supported_schedules(ScalarType a_type, int b_type, ScalarType? maybe_group_scales_type, "
    "ScalarType? maybe_group_zeros_type, ScalarType? maybe_channel_scales_type, ScalarType? maybe_token_scales_type, "
    "ScalarType? maybe_out_type) -> str[]",
    "machete_mm(Tensor A, Tensor B, int b_type, ScalarType? out_type, Tensor? group_scales, Tensor? group_zeros, int? group_size, "
    "Tensor? channel_scales, Tensor? token_scales, str? schedule) -> Tensor",
)
#: Those of vLLM 0.20, with an index.
OLD_MARLIN = (
    SCHEMAS[0]
    .replace("Tensor workspace", "Tensor? g_idx_or_none, Tensor? perm_or_none, Tensor workspace")
    .replace("bool use_atomic_add", "bool is_k_full, bool use_atomic_add")
)
#: vLLM's ids of types, as its ``scalar_type.py`` computes them, with bits and name.
TYPES = {
    0x4000000000400: (4, "uint4"),
    0x4000000100400: (4, "uint4b8"),
    0x4000001000800: (8, "uint8b128"),
    0xA000000010304: (8, "float8_e4m3fn"),
    0x2000000010102: (4, "float4_e2m1f"),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Places of 8 codes in a word, and of 4: each holds the code of this number.
EIGHT, FOUR = (0, 2, 4, 6, 1, 3, 5, 7), (0, 2, 1, 3)
SCHEDULES = {f"{tile}_{cluster}_TmaMI__TmaCoop_streamK" for tile, cluster in (
    ("128x16", "1x1x1"), ("256x16", "1x1x1"), ("128x32", "2x1x1"), ("128x64", "2x1x1"), ("128x128", "2x1x1"),
    ("128x256", "2x1x1"), ("256x32", "2x1x1"), ("256x64", "2x1x1"), ("256x128", "2x1x1"),
)}  # fmt: skip
#: Calls: name, M, N, K, and the schedule or whether sums are atomic.
calls: list[tuple[object, ...]] = []


def require(condition: bool, message: str) -> None:
    """Raise the exception of a failed check in C++."""
    if not condition:
        raise RuntimeError(message)


@functools.cache
def marlin_places(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and column of each code of a tile of 64 rows and 16 columns, in memory's order."""
    rows, columns = [], []
    for thread in range(32):
        for warp in range(4):
            numbers = EIGHT if bits == 4 else [half + each for half in (0, 4) for each in FOUR]
            for number in numbers:
                rows.append(16 * warp + thread // 4 + 8 * (number // 4))
                columns.append(2 * (thread % 4) + (0, 1, 8, 9)[number % 4])
    return torch.tensor(rows), torch.tensor(columns)


@functools.cache
def machete_places(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and column of each code of a block of 128 rows and 64 columns, in memory's order."""
    rows, columns = [], []
    for thread in range(256):
        lane = thread % 32
        for step in range(4):
            for number in EIGHT if bits == 4 else range(8):
                rows.append(16 * (thread // 32) + lane // 4 + 8 * (number // 2 % 2))
                columns.append(16 * step + 2 * (lane % 4) + number % 2 + 8 * (number // 4))
    return torch.tensor(rows), torch.tensor(columns)


def codes_of(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of int32 words in memory's order, the lowest bits first."""
    words = packed.reshape(-1).to(torch.int64) & 0xFFFFFFFF
    return torch.stack([words >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)], 1).reshape(-1)


def spread(codes: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor], n: int, k: int, tile: tuple[int, int]) -> torch.Tensor:
    """Put the codes of tiles where they belong in [N, K]; tiles along N are adjacent."""
    out = torch.full((n, k), -1, dtype=torch.int64)
    tiles = codes.view(-1, len(places[0]))
    for number, values in enumerate(tiles):
        along_k, along_n = divmod(number, n // tile[0])
        out[places[0] + along_n * tile[0], places[1] + along_k * tile[1]] = values
    require(bool((out >= 0).all()), "every code has a place")
    return out


def column_places(n: int, grouped: bool) -> list[int]:
    """Return where Marlin's scale of each column is."""
    if grouped:
        return [c // 64 * 64 + 8 * (c % 8) + c % 64 // 8 for c in range(n)]
    return [c // 32 * 32 + 8 * (c % 8 // 2) + 2 * (c % 32 // 8) + c % 2 for c in range(n)]


def in_bf16(byte: int) -> float:
    """Return the scale that Marlin makes of a byte of five and three bits, for bf16."""
    bits = (byte & 128) << 7 | (byte & 127) << 4
    return math.ldexp(1 + (bits & 127) / 128, (bits >> 7) - 127) if bits >> 7 else math.ldexp((bits & 127) / 128, -126)


def marlin_scales(scales: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the scales [groups, N] that the kernel multiplies by."""
    places = column_places(n, scales.shape[0] > 1)
    if scales.element_size() == 1:
        places = [place // 4 * 4 + FOUR[place % 4] for place in places]
        raw = scales.view(torch.uint8)[:, places]
        if scales.dtype is torch.float8_e8m0fnu:
            return torch.exp2(raw.double() - 127)
        if dtype is torch.float16:
            return (raw.to(torch.int16) << 7).view(torch.float16).double()
        table = torch.tensor([in_bf16(byte) for byte in range(256)], dtype=torch.float64)
        return table[raw.to(torch.int64)]
    return scales[:, places].double()


def marlin_gemm(  # noqa: PLR0917 - vLLM's arguments
    a, c, weight, bias, scales, a_scales, factor, zeros, workspace, kind, m, n, k, atomic, wide, float_zeros
):
    """Check the operands as vLLM does, and multiply by the weight that the threads see."""
    bits, name = TYPES[kind]
    require(a.shape == (m, k) and a.stride(1) == 1 and a.stride(0) % 8 == 0 and a.data_ptr() % 16 == 0, "a")
    require(a.dtype in (torch.bfloat16, torch.float16) and c is bias is a_scales is None and wide and not float_zeros, "16 bits")
    require(weight.dtype is torch.int32 and weight.shape == (k // 16, n * bits // 2) and weight.is_contiguous(), "weight in tiles")
    require((n % 64 == 0 and k % 128 == 0) or (n % 128 == 0 and k % 64 == 0), "sizes of a configuration of threads")
    require(scales.dim() == 2 and scales.shape[1] == n and scales.is_contiguous() and k % scales.shape[0] == 0, "scales [groups, N]")
    require(workspace.dtype is torch.int32 and workspace.numel() >= 132 and not workspace.any(), "locks that are zero")
    is_nvfp4 = scales.dtype is torch.float8_e4m3fn
    require((factor is not None) == is_nvfp4 and (factor is None or factor.dtype is torch.float32), "a global scale for nvfp4 alone")
    require((zeros is not None) == (name == "uint4"), "zero points for uint4 alone")
    if scales.element_size() == 2:
        require(scales.dtype is a.dtype and name != "float4_e2m1f", "scales in the dtype of a")
    else:
        require(name.startswith("float") and (is_nvfp4 or a.dtype is torch.bfloat16), "scales of 8 bits")
    groups = scales.shape[0]
    codes = spread(codes_of(weight, bits), marlin_places(bits), n, k, (64, 16))
    values = marlin_values(codes, name, a.dtype) if scales.dtype is not torch.float8_e8m0fnu else marlin_values(codes, name)
    if zeros is not None:
        require(zeros.dtype is torch.int32 and zeros.shape == (groups, n // 8) and zeros.is_contiguous(), "zero points")
        flat = codes_of(zeros, 4).view(groups, n)
        places = [place // 8 * 8 + EIGHT.index(place % 8) for place in column_places(n, grouped=True)]
        values -= flat[:, places].t().repeat_interleave(k // groups, 1)
    values = values * marlin_scales(scales, n, a.dtype).t().repeat_interleave(k // groups, 1)
    calls.append(("marlin", m, n, k, atomic))
    out = a.double() @ values.t()
    return (out if factor is None else out * factor.double()).to(a.dtype)


def marlin_values(codes: torch.Tensor, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return what the kernel makes of codes, before zero points and scales.

    Floats have the exponent's bias of *dtype*, for which scales compensate; with e8m0 ones it does.
    """
    if name == "float8_e4m3fn":
        values, bias = codes.to(torch.uint8).view(torch.float8_e4m3fn).double(), {torch.bfloat16: -120, torch.float16: -8}
    elif name == "float4_e2m1f":
        table = torch.tensor([sign * size for sign in (1, -1) for size in E2M1], dtype=torch.float64)
        values, bias = table[codes], {torch.bfloat16: -126, torch.float16: -14}
    else:
        return codes.double() - {"uint4": 0, "uint4b8": 8, "uint8b128": 128}[name]
    return values * 2.0 ** bias[dtype] if dtype else values


def old_marlin_gemm(*arguments):
    """Take the arguments of vLLM 0.20, without an index."""
    require(arguments[8] is arguments[9] is None and arguments[15] is True, "no index")
    return marlin_gemm(*arguments[:8], *arguments[10:15], *arguments[16:])


def machete_supported_schedules(a_type, kind, scales, zeros, channels, tokens, out):
    """Answer as the library of a wheel for Hopper."""
    require(channels is tokens is out is None and scales == a_type, "scales of groups")
    name = TYPES[kind][1]
    known = name in ("uint4b8", "uint8b128") if zeros is None else name == "uint4" and zeros == a_type
    return sorted(SCHEDULES) if known else []


def machete_mm(a, weight, kind, out_type, scales, zeros, group, channels, tokens, schedule):  # noqa: PLR0917 - vLLM's arguments
    """Check the operands as vLLM does, and multiply by the weight that the threads see."""
    bits, name = TYPES[kind]
    (m, k), n = a.shape, weight.shape[1]
    require(a.is_contiguous() and a.data_ptr() % 16 == 0 and out_type is channels is tokens is None, "a")
    require(weight.dtype is torch.int32 and weight.shape == (k * bits // 32, n) and weight.is_contiguous(), "weight in blocks")
    require(n % 128 == 0 and k % 64 == 0 and (group == -1 or group % 64 == 0), "sizes of a block")
    require(schedule is None or schedule in SCHEDULES, "a schedule")
    groups = 1 if group == -1 else k // group
    for each in (scales, zeros) if name == "uint4" else (scales,):
        require(each.dtype is a.dtype and each.shape == (groups, n) and each.is_contiguous(), "scales and zero points [groups, N]")
    require(zeros is None or name == "uint4", "zero points for uint4 alone")
    values = spread(codes_of(weight, bits), machete_places(bits), n, k, (128, 64)).double()
    values -= {"uint4": 0, "uint4b8": 8, "uint8b128": 128}[name]
    values *= scales.double().t().repeat_interleave(k // groups, 1)
    if zeros is not None:
        values += zeros.double().t().repeat_interleave(k // groups, 1)
    calls.append(("machete", m, n, k, schedule))
    return (a.double() @ values.t()).to(a.dtype)


FUNCTIONS = (marlin_gemm, machete_supported_schedules, machete_mm)
