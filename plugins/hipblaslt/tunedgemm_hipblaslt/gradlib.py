"""Provide gradlib's functions: products of hipBLASLt by algorithm index.

Names, arguments and meaning are those of AITER's ``gradlib/csrc/hipbsolgemm.cu``. An index holds
for the library that listed it. Unlike in AITER, an algorithm is launched only where the library
lists it for the product.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tunedgemm.plugin import Device, Launcher, Shape, Solution, Unsupported, UserError, device_of
from tunedgemm.tools.launching import parse_dtype

from tunedgemm_hipblaslt import hipblaslt, launch
from tunedgemm_hipblaslt.descriptors import ALIGNMENT
from tunedgemm_hipblaslt.library import device_context, library_build, library_handle
from tunedgemm_hipblaslt.limits import SHUFFLED_LAYOUT, is_quantised, make_problem
from tunedgemm_hipblaslt.names import FIRST, AlgorithmIndex

if TYPE_CHECKING:
    import torch

#: The backend behind the functions.
backend: Any = hipblaslt


def hipb_create_extension() -> None:
    """Load the library and create its handle on the current device, ahead of the first call.

    Raises:
        PluginError: no hipBLASLt can be loaded.
    """
    device, hooks = _device_of(), backend.hooks
    with device_context(device.index):
        library_handle(hooks.load(hooks.abi), device.index)


def hipb_destroy_extension() -> None:
    """Drop the bound launchers; the library's handle lives as long as the process."""
    _bind.cache_clear()


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
    """Return the indices of all algorithms for ``mat1[M, K] @ mat2[K, N]``, best first.

    The arguments are those of `hipb_mm`.

    Raises:
        UserError: the library has no such product.
    """
    del scaleC
    shape, device = _make_shape(mat1, mat2, bias, out_dtype, (scaleA, scaleB), bpreshuffle, use_gelu), _device_of(mat1)
    _check_supported(shape, device)
    hooks = backend.hooks
    return list(launch.results_by_index(hooks.load(hooks.abi), make_problem(shape), device.index, launch.ALL_RESULTS))


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
    """Return ``mat1[M, K] @ mat2[K, N] (+ bias[N])`` by an algorithm of hipBLASLt.

    Args:
        mat1: activations in bf16, fp16, fp32, fp8 or int8.
        mat2: transposed view of a weight [N, K]; of its shuffled bytes with *bpreshuffle*.
        solution_index: an index from `hipb_findallsols`, or -1 for the library's first answer.
        bias: [N], or None.
        out_dtype: dtype of the output; by default that of *mat1*.
        scaleA, scaleB: float32 scales: one value each, or [M, 1] and [1, N].
        scaleOut: scale of the output.
        bpreshuffle: whether `shuffle_weight` shuffled the weight.
        use_gelu: must be False.

    Returns:
        A new tensor [M, N].

    Raises:
        UserError: the library has no such product, or does not list the algorithm for it.
    """
    shape, device = _make_shape(mat1, mat2, bias, out_dtype, (scaleA, scaleB), bool(bpreshuffle), bool(use_gelu)), _device_of(mat1)
    call = _bind(backend, shape, device, solution_index).call
    x, weight = _align(mat1), _align(mat2.t())
    contiguous_bias = None if bias is None else bias.contiguous()
    scales = [scale.contiguous() for scale in (scaleA, scaleB) if scale is not None]
    if shape.op == "a16w16":
        operands: tuple[Any, ...] = (x, weight, contiguous_bias, *scales)
        while operands[-1] is None:
            operands = operands[:-1]
    else:
        operands = (x, weight, *scales, *(() if contiguous_bias is None else (contiguous_bias,)))
    out: torch.Tensor = call(*operands)
    return out if scaleOut is None else out.mul_(scaleOut)


def _align(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix contiguous and at a multiple of 16 bytes, as launchers take it."""
    contiguous = matrix.contiguous()
    return contiguous.clone() if contiguous.data_ptr() % ALIGNMENT else contiguous


@functools.lru_cache(maxsize=4096)
def _bind(lt: Any, shape: Shape, device: Device, index: int) -> Launcher:
    _check_supported(shape, device)
    library = lt.hooks.load(lt.hooks.abi)
    name = FIRST if index < 0 else str(AlgorithmIndex(index, *library_build(library, device.index)))
    launcher = lt.bind(Solution(lt.libtype, name), shape, device)
    if isinstance(launcher, Unsupported):
        raise UserError(f"hipb_mm: {shape}: {launcher.reason}")
    return launcher  # type: ignore[no-any-return]


def _check_supported(shape: Shape, device: Device) -> None:
    if refusal := backend.refusal(shape, device):
        raise UserError(f"hipb_mm: {shape}: {refusal}")


def _device_of(tensor: torch.Tensor | None = None) -> Device:
    """Return the device of a tensor; without one, the current device."""
    import torch

    if tensor is not None:
        return device_of(tensor.get_device())
    return device_of(torch.cuda.current_device() if torch.cuda.is_available() else -1)


def _make_shape(
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    shuffled: bool,
    gelu: bool,
) -> Shape:
    """Return the shape of a call.

    Raises:
        UserError: the operands form no product.
    """
    if gelu:
        raise UserError("hipb_mm: use_gelu: not supported (got True); apply torch.nn.functional.gelu(out, approximate='tanh')")
    if mat1.dim() != 2 or mat2.dim() != 2 or mat1.shape[1] != mat2.shape[0] or mat1.dtype != mat2.dtype:
        raise UserError(
            f"hipb_mm: operands: must be mat1 [M, K] and mat2 [K, N] of one dtype "
            f"(got {tuple(mat1.shape)} {mat1.dtype}, {tuple(mat2.shape)} {mat2.dtype})"
        )
    _check_vectors(mat1, mat2, bias, scales)
    dtype = parse_dtype(str(mat1.dtype))
    by_row = any(scale is not None and scale.numel() > 1 for scale in scales)
    scale = "none" if scales[0] is None else "row" if by_row else "tensor"
    op = "a16w16" if not is_quantised(dtype) or scale == "none" else "a8w8_bpreshuffle" if shuffled else "a8w8"
    return Shape(
        op=op,
        m=mat1.shape[0],
        n=mat2.shape[1],
        k=mat1.shape[1],
        dtype=dtype,
        outdtype=parse_dtype(str(out_dtype or mat1.dtype)),
        epilogue="none" if bias is None else "bias",
        bias_dtype="" if bias is None else parse_dtype(str(bias.dtype)),
        scale=scale,
        layout=SHUFFLED_LAYOUT if shuffled else "row",
    )


def _check_vectors(
    mat1: torch.Tensor, mat2: torch.Tensor, bias: torch.Tensor | None, scales: tuple[torch.Tensor | None, torch.Tensor | None]
) -> None:
    """Check the sizes, dtypes and devices of bias and scales.

    Raises:
        UserError: one of them does not match *mat1* and *mat2*.
    """
    m, n = mat1.shape[0], mat2.shape[1]
    tensors = {"mat2": mat2, "bias": bias, "scaleA": scales[0], "scaleB": scales[1]}
    if foreign := {name: str(x.device) for name, x in tensors.items() if x is not None and x.device != mat1.device}:
        raise UserError(f"hipb_mm: {', '.join(foreign)}: must be on mat1's device {mat1.device} (got {', '.join(foreign.values())})")
    if bias is not None and bias.numel() != n:
        raise UserError(f"hipb_mm: bias: must be [{n}] (got {tuple(bias.shape)})")
    given = [scale for scale in scales if scale is not None]
    if len(given) == 1:
        raise UserError("hipb_mm: scaleA, scaleB: one is missing (got one scale); give both or neither")
    sizes = tuple(scale.numel() for scale in given)
    if given and (sizes not in ((1, 1), (m, n)) or any(str(scale.dtype) != "torch.float32" for scale in given)):
        got = ", ".join(f"{tuple(scale.shape)} {scale.dtype}" for scale in given)
        raise UserError(f"hipb_mm: scaleA, scaleB: must be float32, one value each or [{m}, 1] and [1, {n}] (got {got})")
