"""Stand-in for DeepGEMM's extension `_C`: the signatures and checks of 2.5, computed on the host.

It reads its variables at the first use, as the library does. A product compiles a kernel into the
library's cache where that lacks it, and logs the compilation.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

SMS = 132
#: Block N by whether the operands have scales: beyond 128 the kernels with scales have few.
BLOCKS = {False: range(16, 257, 16), True: (*range(16, 129, 16), 144, 160, 192)}


def require(holds: bool, condition: str) -> None:
    """Raise as the library's assertions do."""
    if not holds:
        raise RuntimeError(f"Assertion error (csrc/apis/../gemm.hpp:1): {condition}")


class Extension:
    """One loaded copy of the extension.

    Args:
        described: whether the device is only described: a product fails once its kernel is
            compiled.
    """

    def __init__(self, described: bool = False) -> None:
        self.described = described
        self.roots: tuple[str, str] | None = None
        self.num_sms, self.pdl, self.multiple = 0, False, (1, 1)
        self.expert_rows = 128
        self.variables: dict[str, str] | None = None
        self.cache: Path | None = None
        self.loaded = Path()
        self.calls: list[tuple[int, bool, tuple[int, int], str]] = []

    def init(self, library_root_path: str, cuda_home: str) -> None:
        self.roots = (library_root_path, cuda_home)

    def _device(self) -> None:
        if self.variables is None:
            names = ("DG_USE_PYTORCH_CUBLASLT_HANDLE", "DG_USE_TEMP_CUBLASLT_WORKSPACE")
            self.variables = {name: os.environ.get(name, "0") for name in names}

    def set_num_sms(self, arg0: int) -> None:
        self._device()
        require(0 <= arg0 <= SMS, "0 <= new_num_sms and new_num_sms <= get_prop()->multiProcessorCount")
        self.num_sms = arg0

    def get_num_sms(self) -> int:
        self._device()
        return self.num_sms or SMS

    def set_pdl(self, arg0: bool) -> None:
        require(type(arg0) is bool, "bool")
        self._device()
        self.pdl = arg0

    def get_pdl(self) -> bool:
        return self.pdl

    def set_block_size_multiple_of(self, arg0: int | tuple[int, int]) -> None:
        self.multiple = (arg0, arg0) if isinstance(arg0, int) else arg0

    def set_mk_alignment_for_contiguous_layout(self, arg0: int) -> None:
        self.expert_rows = arg0

    def bf16_gemm_nt(self, a: Any, b: Any, d: Any, c: Any = None, compiled_dims: str = "nk") -> None:
        require(c is None, "no accumulation in this plugin")
        m, n, k = self._sizes(a, b, d)
        require(a.dtype == b.dtype == torch.bfloat16, "a.scalar_type() == torch::kBFloat16")
        require(d.dtype in (torch.bfloat16, torch.float32), "d.scalar_type() == torch::kBFloat16 or d.scalar_type() == torch::kFloat")
        if self._build("bf16", (m, n, k), d, compiled_dims, (a, b, d)):
            d.copy_(a.float() @ b.float().t())

    def fp8_gemm_nt(  # noqa: PLR0917  the library's signature
        self,
        a: tuple[Any, Any],
        b: tuple[Any, Any],
        d: Any,
        c: Any = None,
        recipe: Any = None,
        recipe_a: Any = None,
        recipe_b: Any = None,
        compiled_dims: str = "nk",
        disable_ue8m0_cast: bool = False,
    ) -> None:
        require(c is recipe is recipe_a is recipe_b is None and not disable_ue8m0_cast, "defaults in this plugin")
        (x, x_scale), (weight, w_scale) = a, b
        m, n, k = self._sizes(x, weight, d)
        require(x.dtype == weight.dtype == torch.float8_e4m3fn, "ab.scalar_type() == torch::kFloat8_e4m3fn")
        blocks, aligned = -(-k // 128), -(-m // 4) * 4
        require(x_scale.dtype == w_scale.dtype == torch.float32, "sf.scalar_type() == torch::kFloat")
        require(tuple(x_scale.shape) == (m, blocks), "sf.size(-2) == ceil_div(mn, gran_mn)")
        require(tuple(w_scale.shape) == (-(-n // 128), blocks), "sf.size(-1) == ceil_div(k, gran_k)")
        require(w_scale.stride() == (blocks, 1), "sf.stride(-1) == 1 and sf.stride(-2) == sf.size(-1)")
        read = [x, weight, d]
        if x_scale.stride() != (1, aligned) and x_scale.is_contiguous() and not self._build("transpose", (0, 0, 0), d, "", ()):
            return
        if x_scale.stride() == (1, aligned):
            read.append(x_scale)
        require(d.dtype == torch.bfloat16, "not c.has_value() and d.scalar_type() == torch::kBFloat16")
        if self._build("fp8", (m, n, k), d, compiled_dims, read):
            wide = x_scale.repeat_interleave(128, 1)[:, :k], w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
            d.copy_((x.float() * wide[0]) @ (weight.float() * wide[1]).t())

    def m_grouped_fp8_gemm_nt_contiguous(  # noqa: PLR0917  the library's signature
        self,
        a: tuple[Any, Any],
        b: tuple[Any, Any],
        d: Any,
        grouped_layout: Any,
        recipe: Any = None,
        recipe_a: Any = None,
        recipe_b: Any = None,
        compiled_dims: str = "nk",
        disable_ue8m0_cast: bool = False,
        use_psum_layout: bool = False,
        expected_m_for_psum_layout: Any = None,
    ) -> None:
        require(not (recipe or recipe_a or recipe_b or disable_ue8m0_cast or use_psum_layout), "defaults in this plugin")
        require(expected_m_for_psum_layout is None, "not expected_m_for_psum_layout.has_value()")
        (x, x_scale), (m, k), block = a, a[0].shape, self.expert_rows
        require(tuple(grouped_layout.shape) == (m,), "m == m__")
        require(block in {16, 32, 64, 128}, "BLOCK_M % WGMMA::M == 0 or BLOCK_M < WGMMA::M")
        require(x_scale.stride() == (1, m), "in place: no other kernel")
        weight = self._grouped(a, b, d, grouped_layout, ())
        if not self._build(f"contiguous{block}", (m, d.shape[1], k), d, compiled_dims, (x, x_scale, d)):
            return
        require(m % block == 0, "whole blocks")
        wide = x.float() * x_scale.repeat_interleave(128, 1)[:, :k]
        owners = grouped_layout.view(-1, block)
        require(bool(((owners == owners[:, :1]) | (owners == -1)).all()), "an expert for each block")
        for first in range(0, m, min(block, 64)):  # a warp group multiplies 64 rows, or stores zeros
            rows, expert = slice(first, first + min(block, 64)), int(grouped_layout[first])
            d[rows] = wide[rows] @ weight(int(grouped_layout[first // block * block])).t() if expert >= 0 else 0.0

    def m_grouped_fp8_gemm_nt_masked(  # noqa: PLR0917  the library's signature
        self,
        a: tuple[Any, Any],
        b: tuple[Any, Any],
        d: Any,
        masked_m: Any,
        expected_m: int,
        recipe: Any = None,
        recipe_a: Any = None,
        recipe_b: Any = None,
        compiled_dims: str = "nk",
        disable_ue8m0_cast: bool = False,
    ) -> None:
        require(not (recipe or recipe_a or recipe_b or disable_ue8m0_cast), "defaults in this plugin")
        (x, x_scale), (experts, m, k) = a, a[0].shape
        require(masked_m.numel() == experts and expected_m > 0, "num_groups == num_groups___")
        require(x_scale.stride() == (m * -(-k // 128), 1, m), "in place: no other kernel")
        weight = self._grouped(a, b, d, masked_m, (experts,))
        if not self._build(f"masked{expected_m}", (m, d.shape[2], k), d, compiled_dims, (x[0], x_scale[0], d[0])):
            return
        require(m % 128 == 0, "blocks of another expert's rows")
        for expert, count in enumerate(masked_m.tolist()):
            wide = x[expert, :count].float() * x_scale[expert, :count].repeat_interleave(128, 1)[:, :k]
            d[expert, :count] = wide @ weight(expert).t()

    def _grouped(self, a: Any, b: Any, d: Any, layout: Any, leading: tuple[int, ...]) -> Any:
        """Check operands of a grouped product; return a function from an expert to its weight in float32."""
        (x, x_scale), (weight, w_scale) = a, b
        for tensor in (x, weight, d):
            require(tensor.is_contiguous() and tensor.dim() in {2, 3}, "t.stride(0) == t.size(-2) * t.size(-1)")
        (*_, m, k), (experts, n, depth) = x.shape, weight.shape
        require(tuple(d.shape) == (*leading, m, n) and k == depth, "m == m_ and n == n_ and k == k_")
        require(x.dtype == weight.dtype == torch.float8_e4m3fn, "ab.scalar_type() == torch::kFloat8_e4m3fn")
        require(d.dtype == torch.bfloat16 and layout.dtype == torch.int32, "d.scalar_type() == torch::kBFloat16")
        require(layout.is_contiguous() and layout.data_ptr() % 16 == 0, "grouped_layout.is_contiguous()")
        blocks = -(-n // 128), -(-k // 128)
        require(tuple(w_scale.shape) == (experts, *blocks) and w_scale.is_contiguous(), "sf.stride(-3) == sf.size(-2) * sf.size(-1)")
        require(tuple(x_scale.shape) == (*leading, m, blocks[1]), "sf.size(-2) == ceil_div(mn, gran_mn)")
        require(x_scale.dtype == w_scale.dtype == torch.float32, "sf.scalar_type() == torch::kFloat")

        def wide(expert: int) -> Any:
            by_row = w_scale[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
            return weight[expert].float() * by_row

        return wide

    def _sizes(self, a: Any, b: Any, d: Any) -> tuple[int, int, int]:
        """Check dimensions and majors of the operands."""
        for tensor in (a, b, d):
            require(tensor.dim() == 2 and tensor.stride(-1) == 1, "t.dim() == 2 and t.stride(-1) == 1")
        (m, k), (n, depth) = a.shape, b.shape
        require(tuple(d.shape) == (m, n) and k == depth, "m == m_ and n == n_ and k == k_")
        return m, n, k

    def _build(self, kind: str, sizes: tuple[int, int, int], d: Any, compiled_dims: str, read: Any) -> bool:
        """Find the kernel, compile it where it is missing, and return whether it runs."""
        for tensor in read:  # TMA, which fails without a message of the library
            stride = tensor.stride(1 if tensor.dtype == torch.float32 and tensor is not d else 0)
            if stride * tensor.element_size() % 16 or tensor.data_ptr() % 16:
                raise RuntimeError("CUDA driver error (csrc/tma.hpp:1): 1 (CUDA_ERROR_INVALID_VALUE, invalid argument)")
        scaled = kind not in {"bf16", "transpose"}
        if kind != "transpose":
            require(any(block % self.multiple[1] == 0 for block in BLOCKS[scaled]), "not candidates.empty()")
        if self.cache is None:
            require(os.access(os.environ.get("DG_JIT_NVCC_COMPILER", ""), os.X_OK), "std::filesystem::exists(nvcc_path)")
            self.cache = Path(os.environ.get("DG_JIT_CACHE_DIR", "/no/such/folder"))
        named = [size if name in compiled_dims else 0 for name, size in zip("mnk", sizes, strict=True)]
        file = self.cache / "cache" / f"kernel.{kind}.{'x'.join(map(str, named))}.{self.get_num_sms()}.{self.multiple[1]}" / "kernel.cubin"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")
            with (self.cache / "log").open("a") as log:
                log.write(f"{file.parent.name}{' described' * self.described}\n")
        self.calls.append((self.get_num_sms(), self.pdl, self.multiple, compiled_dims))
        self.loaded = file
        if self.described:
            raise RuntimeError("CUDA driver error (csrc/jit/handle.hpp:1): 100 (CUDA_ERROR_NO_DEVICE, the GPU is only described)")
        return True
