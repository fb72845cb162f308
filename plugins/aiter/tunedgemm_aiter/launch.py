"""Bind a row of AITER's tables to AITER's function for its libtype: every op but fmoe."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tunedgemm.plugin import Device, Launcher, PluginError, Shape, Solution, Unsupported
from tunedgemm.tools.launching import on_device, torch_dtype, torch_launcher

from tunedgemm_aiter import opus_kernels
from tunedgemm_aiter.installed import function, lacking
from tunedgemm_aiter.names import Kernel, parse, unfit

if TYPE_CHECKING:
    import torch

    Call = Callable[..., torch.Tensor]


def lacks(family: str, solution: Solution, shape: Shape, device: Device) -> str:
    """Return why a solution does not serve a shape, as far as AITER's sources tell; "" where it does.

    Raises:
        PluginError: AITER has no kernels of such names.
    """
    kernel = parse(family, shape.op, solution.kernel_name)
    reason = unfit(kernel, solution.split_k, shape, device) or lacking(kernel.need, family == "flydsl")
    if not reason and family == "opus" and opus_kernels.number(kernel.name) is None:
        reason = f"the installed AITER has no opus kernel {kernel.name!r}"
    return reason


def bind(family: str, solution: Solution, shape: Shape, device: Device) -> Launcher:
    """Return the launcher of a solution, after a call on zeros, in which AITER compiles the kernel.

    Raises:
        PluginError: AITER lacks the function or refuses.
    """
    kernel = parse(family, shape.op, solution.kernel_name)
    call = on_device(_MAKERS[family, shape.op](kernel, solution, shape), device.index)
    if not _call_on_zeros(call, shape, device):
        call = compiling_eagerly(call, shape, device)
    return Launcher(call, graph_safe=not _keeps_counters(family, kernel))


def _keeps_counters(family: str, kernel: Kernel) -> bool:
    """Tell whether a kernel adds its splits by counters or in memory that AITER makes once per stream.

    A graph's stream has none before the capture.
    """
    return kernel.split > 1 if kernel.family == "hgemm" else family == "opus" and "splitk" in kernel.family


def compiling_eagerly(call: Call, shape: Shape, device: Device) -> Call:
    """Wrap a call in which AITER compiles at first: torch's call serves graph captures until it has run.

    Raises:
        PluginError: torch has no call for the shape.
    """
    import torch

    torchs = torch_launcher(shape, device)
    if isinstance(torchs, Unsupported):
        raise PluginError(torchs.reason)
    native, has_run = torchs.call, False

    def guarded(*operands: torch.Tensor | None) -> torch.Tensor:
        nonlocal has_run
        if has_run:
            return call(*operands)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return native(*operands)  # type: ignore[no-any-return]
        out = call(*operands)
        has_run = True
        return out

    return guarded


def _call_on_zeros(call: Call, shape: Shape, device: Device) -> bool:
    """Call once, so that AITER compiles, and check the output; return whether there was memory for it.

    Raises:
        PluginError: AITER refuses, or the output is not that of the op.
    """
    import torch

    where, dtype = device.torch_device, torch_dtype(shape.dtype)
    try:
        operands = [torch.zeros(rows, shape.k, dtype=dtype, device=where) for rows in (shape.m, shape.n)]
        operands += [torch.ones(sizes, device=where) for sizes in _scale_sizes(shape)]
        operands += [torch.zeros(shape.n, dtype=torch_dtype(shape.bias_dtype), device=where)] if shape.bias else []
        out = call(*operands)
    except torch.OutOfMemoryError:
        return False  # the model needs it
    except Exception as error:  # AITER may raise anything
        raise PluginError(f"AITER refuses {shape}: {type(error).__name__}: {error}") from error
    if out.shape != (shape.m, shape.n) or out.dtype != torch_dtype(shape.outdtype):
        raise PluginError(f"AITER's output must be [{shape.m}, {shape.n}] in {shape.outdtype} (got {list(out.shape)} in {out.dtype})")
    return True


def _scale_sizes(shape: Shape) -> tuple[tuple[int, int], ...]:
    if shape.scale == "row":
        return (shape.m, 1), (shape.n, 1)
    blocks = -(-shape.k // 128)
    return ((shape.m, blocks), (-(-shape.n // 128), blocks)) if shape.scale == "block" else ()


def _flydsl_a16w16(kernel: Kernel, solution: Solution, shape: Shape) -> Call:
    run, config = function("aiter.tuned_gemm", "flydsl_gemm"), _config(kernel, solution)
    if function("aiter.ops.flydsl.gemm_kernels", "get_flydsl_splitk_hgemm_kernel_params")(kernel.name) is None:
        raise PluginError(f"the installed AITER has no FlyDSL kernel {kernel.name!r}")
    k, n, number, dtype = shape.k, shape.n, solution.solidx, torch_dtype(shape.outdtype)

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        flat = None if bias is None else bias.view(-1)  # AITER takes no [1, N]
        out = run(x.reshape(-1, k), weight, number, flat, dtype, None, None, None, False, config=config)
        return out.view(*x.shape[:-1], n)  # type: ignore[no-any-return]

    return call


def _flydsl_a8w8_bpreshuffle(kernel: Kernel, solution: Solution, shape: Shape) -> Call:
    import torch

    run, config = function("aiter.ops.gemm_op_a8w8", "gemm_a8w8_bpreshuffle_flydsl"), _config(kernel, solution)
    k, n, dtype = shape.k, shape.n, torch_dtype(shape.outdtype)

    def call(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, k)
        out = torch.empty((rows.shape[0], n), dtype=dtype, device=x.device)
        run(rows, weight, x_scale.reshape(-1, 1), w_scale.reshape(-1, 1), out, config)
        return out.view(*x.shape[:-1], n)

    return call


def _opus_a16w16(kernel: Kernel, solution: Solution, shape: Shape) -> Call:
    import torch

    run, number = function("aiter.ops.opus.gemm_op_a16w16", "opus_gemm_a16w16_tune"), opus_kernels.number(kernel.name)
    k, n, split, dtype = shape.k, shape.n, solution.split_k, torch_dtype(shape.outdtype)

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(1, -1, k)
        out = torch.empty((1, rows.shape[1], n), dtype=dtype, device=x.device)
        run(rows, weight.unsqueeze(0), out, bias=None, kernelId=number, splitK=split)
        return out.view(*x.shape[:-1], n)

    return call


def _opus_blockscale(kernel: Kernel, solution: Solution, shape: Shape) -> Call:
    import torch

    del solution
    run, number = function("aiter.ops.opus.gemm_op_a8w8", "opus_gemm_a8w8_blockscale_bpreshuffle_tune"), opus_kernels.number(kernel.name)
    k, n, dtype = shape.k, shape.n, torch_dtype(shape.outdtype)

    def call(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, k)
        out = torch.empty((rows.shape[0], n), dtype=dtype, device=x.device)
        run(rows, weight, x_scale.reshape(-1, x_scale.shape[-1]), w_scale, out, kernelId=number)
        return out.view(*x.shape[:-1], n)

    return call


def _gluon_a16w16(kernel: Kernel, solution: Solution, shape: Shape) -> Call:
    del kernel
    run, number = function("aiter.tuned_gemm", "triton_gemm"), solution.solidx
    k, n, dtype = shape.k, shape.n, torch_dtype(shape.outdtype)

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return run(x.reshape(-1, k), weight, number, None, dtype).view(*x.shape[:-1], n)  # type: ignore[no-any-return]

    return call


def _gluon_scaled(kernel: Kernel, solution: Solution, shape: Shape) -> Call:
    del kernel, solution
    name = f"gemm_{shape.op}"
    run, k, n, dtype = function(f"aiter.ops.triton.gluon.{name}", name), shape.k, shape.n, torch_dtype(shape.outdtype)
    by_row = shape.scale == "row"

    def call(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        x_scale = x_scale.reshape(-1, 1 if by_row else x_scale.shape[-1])
        out = run(x.reshape(-1, k), weight, x_scale, w_scale.view(1, -1) if by_row else w_scale, dtype=dtype)
        return out.view(*x.shape[:-1], n)  # type: ignore[no-any-return]

    return call


def _config(kernel: Kernel, solution: Solution) -> dict[str, object]:
    """Return a row as AITER's look-up gives it to its functions."""
    return {"libtype": "flydsl", "kernelName": kernel.name, "solidx": solution.solidx, "splitK": solution.split_k}


_MAKERS: dict[tuple[str, str], Callable[[Kernel, Solution, Shape], Call]] = {
    ("flydsl", "a16w16"): _flydsl_a16w16,
    ("flydsl", "a8w8_bpreshuffle"): _flydsl_a8w8_bpreshuffle,
    ("opus", "a16w16"): _opus_a16w16,
    ("opus", "a8w8_blockscale_bpreshuffle"): _opus_blockscale,
    ("gluon", "a16w16"): _gluon_a16w16,
    ("gluon", "a8w8"): _gluon_scaled,
    ("gluon", "a8w8_blockscale"): _gluon_scaled,
}
