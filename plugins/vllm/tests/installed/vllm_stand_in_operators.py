"""vLLM's operators in a namespace of their names: its schemas and checks, and products on the host.

The library of the stand-in imports this module on load. Scales by block are read from
memory as the kernels do, whatever the strides of the tensor say.
"""

from __future__ import annotations

import torch
import vllm_stand_in_weights as weights

NAMESPACE = "vllm_stand_in_C"
BLOCK = 128
#: Declared by vLLM 0.20 to 0.33 in ``torch_bindings.cpp``.
SCHEMAS = (
    "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
    "cutlass_scaled_mm_supports_fp8(int cuda_device_capability) -> bool",
    "cutlass_scaled_mm_supports_block_fp8(int cuda_device_capability) -> bool",
    "cutlass_group_gemm_supported(int cuda_device_capability) -> bool",
    "cutlass_moe_mm(Tensor! out_tensors, Tensor a_tensors, Tensor b_tensors, Tensor a_scales, Tensor b_scales, "
    "Tensor expert_offsets, Tensor problem_sizes, Tensor a_strides, Tensor b_strides, Tensor c_strides, "
    "bool per_act_token, bool per_out_ch) -> ()",
    "get_cutlass_moe_mm_data(Tensor topk_ids, Tensor! expert_offsets, Tensor! problem_sizes1, Tensor! problem_sizes2, "
    "Tensor! input_permutation, Tensor! output_permutation, int num_experts, int n, int k, Tensor? blockscale_offsets, "
    "bool is_gated) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    "silu_and_mul(Tensor! result, Tensor input) -> ()",
)
#: Rows of all groups up to which the grouped product swaps its operands, and with them the sizes.
SWAPPED = 64
#: Capabilities asked about.
asked: list[int] = []
#: Calls of the product: M, N, K and whether its scales were read by block.
calls: list[tuple[int, int, int, bool]] = []


def require(condition: bool, message: str) -> None:
    """Raise the exception of a failed check in C++."""
    if not condition:
        raise RuntimeError(message)


def cutlass_scaled_mm(out, a, b, a_scales, b_scales, bias):
    """Check the operands as vLLM's entry and kernels do, and multiply in float64."""
    require(a.dim() == b.dim() == out.dim() == 2, "2-D operands")
    (m, k), n = a.shape, b.shape[1]
    require(b.shape[0] == k and out.shape == (m, n), "conforming sizes")
    require(a.stride(1) == out.stride(1) == b.stride(0) == 1, "a and out row-major, b column-major")
    require(out.stride(0) % 16 == b.stride(1) % 16 == 0, "16-byte alignment")
    require(m < 2 or a.stride(0) == k, "a is packed")
    require(b.stride(1) == k and (m < 2 or out.stride(0) == n), "b and out are packed")
    require(all(tensor.data_ptr() % 16 == 0 for tensor in (out, a, b)), "aligned pointers")
    require(out.dtype in (torch.bfloat16, torch.float16), "out in 16 bits")
    require(a.dtype == b.dtype and a.dtype in (torch.int8, torch.float8_e4m3fn), "int8 or e4m3fn")
    require(a_scales.dtype == b_scales.dtype == torch.float32, "scales in float32")
    if bias is not None:
        require(bias.dim() == 1 and bias.numel() == n and bias.is_contiguous(), "bias [N]")
        require(bias.dtype == out.dtype, "bias in the dtype of out")
    left, right = a.double(), b.double()
    by_block = not (a_scales.numel() in (1, m) and b_scales.numel() in (1, n))
    if by_block:
        require(a.dtype is torch.float8_e4m3fn and bias is None, "fp8 without bias")
        require(a_scales.dim() == b_scales.dim() == 2, "2-D scales")
        require(k % BLOCK == 0, "full tiles in K")
        rows, columns = -(-n // BLOCK), -(-k // BLOCK)
        require(a_scales.shape == (m, columns) and b_scales.shape == (columns, rows), "scales of blocks")
        of_x = a_scales.as_strided((m, columns), (1, m))
        of_weight = b_scales.as_strided((columns, rows), (1, columns))
        left = left * of_x.double().repeat_interleave(BLOCK, 1)[:, :k]
        right = right * of_weight.double().repeat_interleave(BLOCK, 0)[:k].repeat_interleave(BLOCK, 1)[:, :n]
        product = left @ right
    else:
        require(a_scales.is_contiguous() and b_scales.is_contiguous(), "contiguous scales")
        product = (left @ right) * a_scales.double().reshape(-1, 1) * b_scales.double().reshape(1, -1)
    calls.append((m, n, k, by_block))
    out.copy_(product if bias is None else product + bias.double())


def cutlass_moe_mm(  # noqa: PLR0917 - vLLM's arguments
    out, a, b, a_scales, b_scales, starts, sizes, a_strides, b_strides, c_strides, by_token, by_channel
):
    """Check the operands as vLLM's kernels do, and multiply each group; other rows stay unwritten."""
    (rows, k), (experts, n, _) = a.shape, b.shape
    require(out.shape == (rows, n) and b.shape[2] == k and rows > 0, "conforming sizes")
    require(n % 16 == k % 16 == 0, "16-byte alignment")
    require(a.dtype == b.dtype == torch.float8_e4m3fn and out.dtype in (torch.bfloat16, torch.float16), "e4m3fn to 16 bits")
    require(a_scales.dtype == b_scales.dtype == torch.float32 and by_token and by_channel, "scales by row in float32")
    require(a_scales.numel() == rows and b_scales.numel() == experts * n, "a scale a row")
    require(starts.dtype is torch.int64 and starts.shape == (experts,), "int64 offsets")
    require(sizes.dtype is torch.int32 and sizes.shape == (experts, 3), "int32 sizes")
    tensors = (out, a, b, a_scales, b_scales, starts, sizes, a_strides, b_strides, c_strides)
    require(all(tensor.is_contiguous() for tensor in tensors), "contiguous operands")
    require(all(tensor.data_ptr() % 16 == 0 for tensor in (out, a, b)), "aligned pointers")
    for strides, length in ((a_strides, k), (b_strides, k), (c_strides, n)):
        require(strides.dtype is torch.int64 and strides.tolist() == [length] * experts, "int64 strides")
    of_weight = b_scales.view(experts, n)
    for expert, (start, (first, second, depth)) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        count, width = (second, first) if rows <= SWAPPED else (first, second)
        require(width == n and depth == k and 0 <= start <= start + count <= rows, "sizes of a group")
        part = slice(start, start + count)
        product = a[part].double() @ b[expert].double().t()
        out[part] = (product * a_scales.view(-1, 1)[part].double() * of_weight[expert].double()).to(out.dtype)


def get_cutlass_moe_mm_data(  # noqa: PLR0917 - vLLM's arguments
    ids, ends, sizes1, sizes2, order, places, experts, n, k, blockscale_offsets, gated
):
    """Group pairs by expert; a group's order is any, here the reverse. Unknown ids leave it undefined."""
    tensors = (ids, ends, sizes1, sizes2, order, places)
    require(all(tensor.dtype is torch.int32 and tensor.is_contiguous() for tensor in tensors), "int32, contiguous")
    require(ids.dim() == 2 and ends.numel() == experts + 1 and order.numel() == places.numel() == ids.numel(), "sizes of the lists")
    require(sizes1.shape == sizes2.shape == (experts, 3) and gated and blockscale_offsets is None, "gated fp8")
    flat = ids.reshape(-1)
    require(bool(((flat >= 0) & (flat < experts)).all()), "known experts")
    by_expert = torch.argsort(flat.flip(0), stable=True).neg().add(flat.numel() - 1)
    counts = torch.bincount(flat, minlength=experts)
    ends.copy_(torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
    order.copy_(by_expert // ids.shape[1])
    places[by_expert] = torch.arange(flat.numel(), dtype=torch.int32)
    for sizes, width, depth in ((sizes1, 2 * n, k), (sizes2, k, n)):
        columns = [counts, torch.full_like(counts, width), torch.full_like(counts, depth)]
        sizes.copy_(torch.stack([columns[1], columns[0], columns[2]] if flat.numel() <= SWAPPED else columns, 1))


def dynamic_per_token_scaled_fp8_quant(result, x, scale, scale_ub):
    """Quantise each row by its largest value."""
    require(result.shape == x.shape and result.dtype is torch.float8_e4m3fn and x.element_size() == 2, "16 bits to e4m3fn")
    require(scale.numel() == len(x) and scale.dtype is torch.float32 and scale_ub is None, "a scale a row")
    require(result.is_contiguous() and x.is_contiguous() and scale.is_contiguous(), "contiguous")
    scale.copy_((x.float().abs().amax(1, keepdim=True) / 448).clamp(min=1 / (448 * 512)).view_as(scale))
    result.copy_((x.float() / scale.view(-1, 1)).clamp(-448, 448))


def silu_and_mul(result, x):
    """Multiply the second half of each row by the activated first half."""
    require(result.shape == (len(x), x.shape[1] // 2) and result.dtype == x.dtype, "halves in one dtype")
    gate, factor = x.float().chunk(2, 1)
    result.copy_(torch.nn.functional.silu(gate) * factor)


def group_gemm_supported(capability):
    """Answer as a library built with grouped products."""
    asked.append(capability)
    return capability >= 90


def supports_fp8(capability):
    """Answer as a library built with CUDA 12.4 or later."""
    asked.append(capability)
    return capability >= 89


def supports_block_fp8(capability):
    """Answer as a library built with CUDA 12.8 or later."""
    asked.append(capability)
    return capability >= 90


FUNCTIONS = (
    cutlass_scaled_mm,
    supports_fp8,
    supports_block_fp8,
    group_gemm_supported,
    cutlass_moe_mm,
    get_cutlass_moe_mm_data,
    dynamic_per_token_scaled_fp8_quant,
    silu_and_mul,
)
library = torch.library.Library(NAMESPACE, "FRAGMENT")
for schema, function in zip((*SCHEMAS, *weights.SCHEMAS), (*FUNCTIONS, *weights.FUNCTIONS), strict=True):
    library.define(schema)
    library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
