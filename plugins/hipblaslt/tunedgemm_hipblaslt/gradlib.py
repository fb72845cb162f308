"""gradlib's functions, with its names, arguments and meaning: products of hipBLASLt by the number of an algorithm.

AITER's ``gradlib/csrc/hipbsolgemm.cu``. Numbers hold for the library that listed them. Unlike there, an algorithm is launched only
where the library lists it for the product.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tunedgemm.plugin import Device, Launcher, Shape, Solution, Unsupported, UserError, device_of
from tunedgemm.tools import short_dtype

from tunedgemm_hipblaslt import hipblaslt, launch
from tunedgemm_hipblaslt.descriptors import ALIGNMENT
from tunedgemm_hipblaslt.library import build, device_context, handle
from tunedgemm_hipblaslt.limits import LAYOUT
from tunedgemm_hipblaslt.names import FIRST, Numbered
from tunedgemm_hipblaslt.problem import problem_of, quantised

if TYPE_CHECKING:
    import torch

#: The backend behind the functions.
backend = hipblaslt


def hipb_create_extension() -> None:
    """Load the library and make its handle on the current device, so that no later call has to.

    Raises:
        PluginError: there is no hipBLASLt in this process.
    """
    device = _device()
    with device_context(device.index):
        handle(backend.load(backend.abi), device.index)


def hipb_destroy_extension() -> None:
    """Forget what was bound; the library's handle lives as long as the process."""
    _launcher.cache_clear()


def hipb_findallsols(  # noqa: PLR0913, PLR0917 - gradlib's
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scaleA: torch.Tensor | None = None,
    scaleB: torch.Tensor | None = None,
    scaleC: torch.Tensor | None = None,
    bpreshuffle: bool = False,
    use_gelu: bool = False,
) -> list[int]:
    """The numbers of all algorithms that multiply ``mat1[M, K] @ mat2[K, N]``, best guesses first; the arguments are those of `hipb_mm`.

    Raises:
        UserError: the library has no such product.
    """
    del scaleC
    shape, device = _shape(mat1, mat2, bias, out_dtype, (scaleA, scaleB), bpreshuffle, use_gelu), _device(mat1)
    _check(shape, device)
    problem = problem_of(shape)
    return list(launch.answers_by_number(backend.load(backend.abi), problem, device.index, launch.ALL))


def hipb_mm(  # noqa: PLR0913, PLR0917 - gradlib's
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    solution_index: int,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scaleA: torch.Tensor | None = None,
    scaleB: torch.Tensor | None = None,
    scaleOut: torch.Tensor | None = None,
    bpreshuffle: bool | None = None,
    use_gelu: bool | None = None,
) -> torch.Tensor:
    """``mat1[M, K] @ mat2[K, N] (+ bias[N])`` by the algorithm of a number, or for -1 by the library's first answer.

    Args:
        mat1: activations in bf16, fp16, fp32, fp8 or int8.
        mat2: the transpose of a weight [N, K], a view of it; of shuffled bytes with *bpreshuffle*.
        solution_index: one of `hipb_findallsols`, or -1.
        bias: [N] or absent.
        out_dtype: of the output; that of *mat1* if absent.
        scaleA, scaleB: float32 factors: one value each, or [M, 1] and [1, N].
        scaleOut: one factor of the output.
        bpreshuffle: whether the weight was shuffled by `shuffle_weight`.
        use_gelu: only False.

    Returns:
        A new tensor [M, N].

    Raises:
        UserError: the library has no such product, or does not list the algorithm for it.
    """
    shape, device = _shape(mat1, mat2, bias, out_dtype, (scaleA, scaleB), bool(bpreshuffle), bool(use_gelu)), _device(mat1)
    call = _launcher(backend, shape, device, solution_index).call
    x, weight = _aligned(mat1), _aligned(mat2.t())
    added = None if bias is None else bias.contiguous()
    scales = [scale.contiguous() for scale in (scaleA, scaleB) if scale is not None]
    if shape.op == "a16w16":
        operands: tuple[Any, ...] = (x, weight, added, *scales)
        while operands[-1] is None:
            operands = operands[:-1]
    else:
        operands = (x, weight, *scales, *(() if added is None else (added,)))
    out: torch.Tensor = call(*operands)
    return out if scaleOut is None else out.mul_(scaleOut)


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """As launchers take it: contiguous, at a multiple of 16 bytes."""
    whole = matrix.contiguous()
    return whole.clone() if whole.data_ptr() % ALIGNMENT else whole


@functools.lru_cache(maxsize=4096)
def _launcher(lt: Any, shape: Shape, device: Device, number: int) -> Launcher:
    _check(shape, device)
    library = lt.load(lt.abi)
    name = FIRST if number < 0 else str(Numbered(number, *build(library, device.index)))
    bound = lt.bind(Solution(lt.abi.libtype, name), shape, device)
    if isinstance(bound, Unsupported):
        raise UserError(f"hipb_mm: {shape}: {bound.reason}")
    return bound  # type: ignore[no-any-return]


def _check(shape: Shape, device: Device) -> None:
    answer = backend.supports(shape, device)
    if isinstance(answer, Unsupported):
        raise UserError(f"hipb_mm: {shape}: {answer.reason}")


def _device(tensor: torch.Tensor | None = None) -> Device:
    """The device of a tensor, or the current one."""
    import torch

    if tensor is not None:
        return device_of(tensor.get_device())
    return device_of(torch.cuda.current_device() if torch.cuda.is_available() else -1)


def _shape(
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    shuffled: bool,
    gelu: bool,
) -> Shape:
    """The shape of a call; raises UserError for one that forms none."""
    if gelu:
        raise UserError("hipb_mm: use_gelu=True is not covered: apply torch.nn.functional.gelu(out, approximate='tanh')")
    if mat1.dim() != 2 or mat2.dim() != 2 or mat1.shape[1] != mat2.shape[0] or mat1.dtype != mat2.dtype:
        raise UserError(
            f"hipb_mm: mat1 [M, K] and mat2 [K, N] of one dtype are multiplied (got {tuple(mat1.shape)} {mat1.dtype}, "
            f"{tuple(mat2.shape)} {mat2.dtype})"
        )
    _check_vectors(mat1, mat2, bias, scales)
    dtype = short_dtype(mat1.dtype)
    by_row = any(scale is not None and scale.numel() > 1 for scale in scales)
    scale = "none" if scales[0] is None else "row" if by_row else "tensor"
    op = "a16w16" if not quantised(dtype) or scale == "none" else "a8w8_bpreshuffle" if shuffled else "a8w8"
    return Shape(
        op=op,
        m=mat1.shape[0],
        n=mat2.shape[1],
        k=mat1.shape[1],
        dtype=dtype,
        outdtype=short_dtype(out_dtype or mat1.dtype),
        epilogue="none" if bias is None else "bias",
        bias_dtype="" if bias is None else short_dtype(bias.dtype),
        scale=scale,
        layout=LAYOUT if shuffled else "row",
    )


def _check_vectors(
    mat1: torch.Tensor, mat2: torch.Tensor, bias: torch.Tensor | None, scales: tuple[torch.Tensor | None, torch.Tensor | None]
) -> None:
    """That bias and scales have as many values as are read of them, on the device of *mat1*; raises UserError."""
    m, n = mat1.shape[0], mat2.shape[1]
    given = {"mat2": mat2, "bias": bias, "scaleA": scales[0], "scaleB": scales[1]}
    if elsewhere := [name for name, tensor in given.items() if tensor is not None and tensor.device != mat1.device]:
        raise UserError(f"hipb_mm: {', '.join(elsewhere)} must be on {mat1.device}, as mat1")
    if bias is not None and bias.numel() != n:
        raise UserError(f"hipb_mm: bias must be [{n}] (got {tuple(bias.shape)})")
    found = [scale for scale in scales if scale is not None]
    if len(found) == 1:
        raise UserError("hipb_mm: scaleA and scaleB are given together, or neither")
    sizes = tuple(scale.numel() for scale in found)
    if found and (sizes not in ((1, 1), (m, n)) or any(str(scale.dtype) != "torch.float32" for scale in found)):
        got = ", ".join(f"{tuple(scale.shape)} {scale.dtype}" for scale in found)
        raise UserError(f"hipb_mm: scaleA and scaleB must be float32 with one value each, or [{m}, 1] and [1, {n}] (got {got})")
