"""Turn a solution and a shape into a launcher with everything but addresses fixed."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from tunedgemm.plugin import Device, Launcher, LaunchError, Shape, Solution, Unsupported
from tunedgemm.tools.launching import on_device, scale_order, torch_dtype, workspace

from tunedgemm_hipblaslt.descriptors import HeuristicResult, ProblemDescriptors, locked_descriptors
from tunedgemm_hipblaslt.library import Library, device_context, library_build, library_handle
from tunedgemm_hipblaslt.limits import BLOCK, Problem, is_quantised, make_problem
from tunedgemm_hipblaslt.names import AlgorithmIndex, KernelConfig, SolutionName, name_of
from tunedgemm_hipblaslt.native import Launch, launch_of

#: Results to ask for when looking up an index: first the library's best, then all.
TOP_RESULTS, ALL_RESULTS = 32, 1 << 16
#: Multiple to which rows of 128x128 scales are padded (cuBLAS manual, 128x128 scaling factors).
_SCALE_PADDING = 4


def bind(library: Library, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
    """Return the launcher of a solution for exactly this shape, or why the library has none.

    Raises:
        PluginError: no algorithm of the library has such a name.
    """
    name = name_of(library.abi, solution)
    problem = make_problem(shape, bias_after=name.bias_after, fast_accum=name.fast_accum)
    with device_context(device.index):
        descriptors = ProblemDescriptors(library, problem, device.index)
        result = find_algorithm(descriptors, name, device.index, solution.solidx)
        if isinstance(result, HeuristicResult):
            product = _make_product(library, problem, launch_of(descriptors, result), result.workspace, device)
            return Launcher(on_device(_CALLS[shape.op](shape, problem, product), device.index), workspace_bytes=result.workspace)
    # The library may add no bias of this dtype.
    if name.algorithm is None and problem.bias_dtype and not name.bias_after:
        return bind(library, attrs.evolve(solution, kernel_name=str(attrs.evolve(name, bias_after=True))), shape, device)
    return result


def find_algorithm(descriptors: ProblemDescriptors, name: SolutionName, index: int, hint: int = 0) -> HeuristicResult | Unsupported:
    """Return the library's algorithm for a name and a problem, or why it has none.

    The device must be the current one. Only algorithms that this library has just accepted are
    launched: a configuration is checked, an index or a name must be among its results. Of several
    algorithms with the name that of index *hint* is preferred, else the library's best.
    """
    library, algorithm = descriptors.library, name.algorithm
    limit = library.abi.workspace
    if algorithm is None:
        results = descriptors.heuristic_results(1, limit)
        return results[0] if results else Unsupported(f"{library.abi.libtype}: no algorithm for this shape")
    if isinstance(algorithm, KernelConfig):
        result = descriptors.check(algorithm)
        if isinstance(result, str):
            return Unsupported(result)
        return result if result.workspace <= limit else Unsupported(f"workspace: the limit is {limit} bytes (got {result.workspace})")
    if isinstance(algorithm, str):
        return _find_name(library, algorithm, descriptors.problem, index, hint)
    return _find_index(library, algorithm, descriptors.problem, index)


def _find_name(library: Library, name: str, problem: Problem, index: int, hint: int) -> HeuristicResult | Unsupported:
    if not library.namers:
        return Unsupported(
            f"kernelName: this hipBLASLt ({library_build(library, index)[0]}) tells no names (got {name}); tune the shape again"
        )
    indices = indices_by_name(library, problem, index).get(name)
    if not indices:
        return Unsupported(f"kernelName: the library lists no algorithm {name} for this shape")
    return results_by_index(library, problem, index, ALL_RESULTS)[hint if hint in indices else indices[0]]


def _find_index(library: Library, algorithm: AlgorithmIndex, problem: Problem, index: int) -> HeuristicResult | Unsupported:
    version, revision = library_build(library, index)
    if (algorithm.version, algorithm.revision) != (version, revision):
        return Unsupported(
            f"kernelName: algorithm {algorithm.index} belongs to hipBLASLt {algorithm.version} ({algorithm.revision}) "
            f"(got {version} ({revision})); tune again with --stale"
        )
    for count in (TOP_RESULTS, ALL_RESULTS):
        if result := results_by_index(library, problem, index, count).get(algorithm.index):
            return result
    return Unsupported(f"kernelName: the library does not list algorithm {algorithm.index} for this shape")


@functools.lru_cache(maxsize=16)
def results_by_index(library: Library, problem: Problem, index: int, count: int) -> Mapping[int, HeuristicResult]:
    """Return up to *count* results of hipBLASLt by algorithm index, best first.

    The index is the first four bytes of a ``MatmulAlgo_t``.
    """
    with locked_descriptors(library, problem, index) as descriptors:
        results = descriptors.heuristic_results(count, library.abi.workspace)
    return {struct.unpack_from("i", result.algo)[0]: result for result in results}


@functools.lru_cache(maxsize=16)
def indices_by_name(library: Library, problem: Problem, index: int) -> Mapping[str, tuple[int, ...]]:
    """Return the indices of all results of hipBLASLt by its names of kernels and solutions, best first."""
    indices: dict[str, tuple[int, ...]] = {}
    with device_context(index):
        handle = library_handle(library, index)
        for number, result in results_by_index(library, problem, index, ALL_RESULTS).items():
            for name in dict.fromkeys(library.names(handle, result.algo)):
                indices[name] = (*indices.get(name, ()), number)
    return indices


#: (x, weight, bias, scales of x, scales of the weight, sizes of the output) -> the output
Product = Callable[[Any, Any, Any, Any, Any, tuple[int, ...]], Any]


def _make_product(library: Library, problem: Problem, launch: Launch, nbytes: int, device: Device) -> Product:
    """Return the library's product of tensors, with the bias in its epilogue or after it."""
    import torch

    empty, torch_device, index, dtype = torch.empty, device.torch_device, device.index, torch_dtype(problem.d.dtype)
    stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if index >= 0 else lambda _: 0
    bias_after = problem.remainder == "bias"

    def product(x: Any, weight: Any, bias: Any, x_scale: Any, w_scale: Any, sizes: tuple[int, ...]) -> Any:
        out = empty(sizes, dtype=dtype, device=torch_device)
        scratch = workspace(nbytes, torch_device) if nbytes else None
        status = launch(
            stream(index), out.data_ptr(), weight.data_ptr(), x.data_ptr(),
            0 if scratch is None else scratch.data_ptr(),
            0 if bias is None or bias_after else bias.data_ptr(),
            0 if w_scale is None else w_scale.data_ptr(),
            0 if x_scale is None else x_scale.data_ptr(),
        )  # fmt: skip
        if status:
            raise LaunchError(f"{library.abi.libtype}: {library.abi.prefix}Matmul: {library.abi.status(status)}")
        return out.add_(bias) if bias_after else out

    return product


def _plain(shape: Shape, problem: Problem, product: Product) -> Callable[..., Any]:
    """Return a call of x [..., K], weight [N, K] and an optional bias [N], batches first."""
    del problem
    n = shape.n

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        return product(x, weight, bias, None, None, (*x.shape[:-1], n))

    return call


def _batched(shape: Shape, problem: Problem, product: Product) -> Callable[..., Any]:
    """Return a call like `_plain` with a bias [B, N] or [B, 1, N], added after the product."""
    assert problem.remainder == ("bias" if shape.bias else "")
    n = shape.n

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        return product(x, weight, None if bias is None else bias.view(-1, 1, n), None, None, (*x.shape[:-1], n))

    return call


def _a16w16(shape: Shape, problem: Problem, product: Product) -> Callable[..., Any]:
    """Return a call like `_plain`; fp8 also takes one scale each for x, weight and output."""
    if not is_quantised(shape.dtype):
        return _plain(shape, problem, product)
    scaled = _scaled(shape, problem, product)

    def call(x: Any, weight: Any, bias: Any = None, scale_a: Any = None, scale_b: Any = None, scale_c: Any = None) -> Any:
        out = scaled(x, weight, _to_float(scale_a), _to_float(scale_b), bias)
        return out if scale_c is None else out.mul_(scale_c)

    return call


def _to_float(scale: Any) -> Any:
    return None if scale is None else scale.float()


def _scaled(shape: Shape, problem: Problem, product: Product) -> Callable[..., Any]:
    """Return a call of x, weight, their scales and an optional bias [N].

    Scales that the library does not apply are applied after the product, in float32.
    """
    if problem.remainder == "scales":
        return _scaled_after(shape, product)
    n = shape.n

    def call(x: Any, weight: Any, x_scale: Any, w_scale: Any, bias: Any = None) -> Any:
        return product(x, weight, bias, x_scale, w_scale, (*x.shape[:-1], n))

    return call


def _scaled_after(shape: Shape, product: Product) -> Callable[..., Any]:
    """Return a call of the exact product, then scales and bias in float32, then one rounding."""
    n, dtype = shape.n, torch_dtype(shape.outdtype)
    lead = (int(shape["B"]),) if shape.op.startswith("batched_") else ()

    def call(x: Any, weight: Any, x_scale: Any, w_scale: Any, bias: Any = None) -> Any:
        out = product(x, weight, None, None, None, (*x.shape[:-1], n)).view(*lead, -1, n)
        out = out.float().mul_(x_scale.reshape(*lead, -1, 1)).mul_(w_scale.reshape(*lead, 1, -1))
        out = out if bias is None else out.add_(bias.reshape(*lead, 1, n))
        return out.to(dtype).view(*x.shape[:-1], n)

    return call


def _blocks(shape: Shape, problem: Problem, product: Product) -> Callable[..., Any]:
    """Return a call of x [..., K], weight [N, K] and their block scales.

    The scales are [..., ceil(K/128)] and [ceil(N/128), ceil(K/128)]. cuBLASLt takes those of x with
    M innermost. It needs M and the weight's K blocks in multiples of 4. M-major scales are copied
    only for another M, if their memory has no padding.
    """
    import torch

    pad, (m, n, k), rows = torch.nn.functional.pad, (shape.m, shape.n, shape.k), problem.b.columns
    blocks = -(-k // BLOCK)
    row_padding, block_padding = rows - m, -blocks % _SCALE_PADDING
    is_padded = scale_order(shape) == "m_major_padded"

    def call(x: Any, weight: Any, x_scale: Any, w_scale: Any) -> Any:
        by_row, by_block = x_scale.reshape(m, blocks).t(), w_scale
        if block_padding:
            by_block = pad(w_scale, (0, block_padding))
        if row_padding:
            x_bytes = pad(x.view(torch.uint8).reshape(m, k), (0, 0, 0, row_padding))
            by_row = x_scale if is_padded and _holds(x_scale, rows * blocks) else pad(by_row, (0, row_padding))
            out = product(x_bytes, weight, None, by_row, by_block, (rows, n))[:m]
        else:
            out = product(x, weight, None, by_row.contiguous(), by_block, (rows, n))
        return out.view(*x.shape[:-1], n)

    return call


def _holds(scale: Any, count: int) -> bool:
    """Return whether the memory of float32 scales has *count* floats from their first one."""
    return bool(scale.untyped_storage().nbytes() >= 4 * (scale.storage_offset() + count))


_CALLS: Mapping[str, Callable[[Shape, Problem, Product], Callable[..., Any]]] = {
    "a16w16": _a16w16,
    "a8w8": _scaled,
    "a8w8_bpreshuffle": _scaled,
    "a8w8_blockscale": _blocks,
    "batched_bf16": _batched,
    "batched_a8w8": _scaled,
}
