"""vLLM's operators in a namespace of their names: its schemas and checks, and products on the host.

The library of the stand-in imports this module on load. Scales by block are read from
memory as the kernels do, whatever the strides of the tensor say.
"""

from __future__ import annotations

import torch

NAMESPACE = "vllm_stand_in_C"
BLOCK = 128
#: Declared by vLLM 0.20 to 0.33 in ``torch_bindings.cpp``.
SCHEMAS = (
    "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
    "cutlass_scaled_mm_supports_fp8(int cuda_device_capability) -> bool",
    "cutlass_scaled_mm_supports_block_fp8(int cuda_device_capability) -> bool",
)
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


def supports_fp8(capability):
    """Answer as a library built with CUDA 12.4 or later."""
    asked.append(capability)
    return capability >= 89


def supports_block_fp8(capability):
    """Answer as a library built with CUDA 12.8 or later."""
    asked.append(capability)
    return capability >= 90


library = torch.library.Library(NAMESPACE, "FRAGMENT")
for schema, function in zip(SCHEMAS, (cutlass_scaled_mm, supports_fp8, supports_block_fp8), strict=True):
    library.define(schema)
    library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
