"""Launch: a solution bound to a shape becomes one call of the library with everything but addresses fixed before."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from tunedgemm.plugin import Device, Launcher, LaunchError, PluginError, Shape, Solution, Unsupported
from tunedgemm.tools import on_device, torch_dtype, workspace

from tunedgemm_hipblaslt.descriptors import Described, Found, asking
from tunedgemm_hipblaslt.library import Library, build, device_context
from tunedgemm_hipblaslt.names import Algorithm, Name, Numbered, parse
from tunedgemm_hipblaslt.native import Launch, launch_of
from tunedgemm_hipblaslt.problem import BLOCK, Problem, problem_of, quantised

#: Answers to ask for when one is looked for by number: those that the library likes, then all that it has.
LIKED, ALL = 32, 1 << 16
#: The rows of a weight's scales by 128x128 are whole fours long (cuBLAS manual, scaling factors of 128x128 blocks).
_FOURS = 4


def bind(library: Library, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
    """The launcher of a solution for exactly this shape, or why the library has none."""
    try:
        name = parse(solution.kernel_name, solution.split_k)
    except PluginError as error:
        return Unsupported(str(error))
    problem = problem_of(shape, after=name.after, fast=name.fast)
    with device_context(device.index):
        described = Described(library, problem, device.index)
        found = algorithm_of(described, name, device.index)
        if isinstance(found, Found):
            product = _product(library, problem, launch_of(described, found), found.workspace, device)
            return Launcher(on_device(_CALLS[shape.op](shape, problem, product), device.index), workspace_bytes=found.workspace)
    if name.chosen is None and problem.bias_dtype and not name.after:  # it adds no bias of this dtype
        return bind(library, attrs.evolve(solution, kernel_name=str(attrs.evolve(name, after=True))), shape, device)
    return found


def algorithm_of(described: Described, name: Name, index: int) -> Found | Unsupported:
    """The algorithm of a name, as the library has it for the problem, or why it has not; the device is the current one.

    Nothing is launched that this library did not just accept: a configuration is checked, a number must be among its answers.
    """
    library, chosen = described.library, name.chosen
    limit = library.abi.workspace
    if chosen is None:
        answers = described.answers(1, limit)
        return answers[0] if answers else Unsupported("the library knows no algorithm for it")
    if isinstance(chosen, Algorithm):
        if not library.abi.config:
            return Unsupported(f"{name} is a configuration of cuBLASLt; {library.abi.libtype} numbers its algorithms")
        found = described.check(chosen)
        if isinstance(found, str):
            return Unsupported(found)
        return found if found.workspace <= limit else Unsupported(f"wants {found.workspace} bytes of workspace, more than {limit}")
    return _numbered(library, chosen, described.problem, index)


def _numbered(library: Library, chosen: Numbered, problem: Problem, index: int) -> Found | Unsupported:
    if library.abi.config:
        return Unsupported(f"{chosen} is a number of hipBLASLt; {library.abi.libtype} configures its algorithms")
    present = build(library, index)
    if (chosen.version, chosen.revision) != present:
        return Unsupported(
            f"algorithm {chosen.index} is of hipBLASLt {chosen.version} ({chosen.revision}), this is {present[0]} ({present[1]}), whose "
            f"numbers are others: tune again with --stale"
        )
    for count in (LIKED, ALL):
        if found := answers_by_number(library, problem, index, count).get(chosen.index):
            return found
    return Unsupported(f"the library does not list algorithm {chosen.index} for it")


@functools.lru_cache(maxsize=16)
def answers_by_number(library: Library, problem: Problem, index: int, count: int) -> Mapping[int, Found]:
    """The first *count* answers of hipBLASLt, best guesses first, by the number that each holds in its first four bytes."""
    with asking(library, problem, index) as described:
        return {struct.unpack_from("i", found.algo)[0]: found for found in described.answers(count, library.abi.workspace)}


#: (x, weight, bias, scales of x, scales of the weight, sizes of the output) -> the output
Product = Callable[[Any, Any, Any, Any, Any, tuple[int, ...]], Any]


def _product(library: Library, problem: Problem, launch: Launch, nbytes: int, device: Device) -> Product:
    """The library's product as a function of tensors, with the bias within it or after it."""
    import torch

    empty, where, index, dtype = torch.empty, device.torch_device, device.index, torch_dtype(problem.d.dtype)
    stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if index >= 0 else lambda _: 0
    after = problem.remainder == "bias"

    def product(x: Any, weight: Any, bias: Any, x_scale: Any, w_scale: Any, sizes: tuple[int, ...]) -> Any:
        out = empty(sizes, dtype=dtype, device=where)
        scratch = workspace(nbytes, where) if nbytes else None
        status = launch(
            stream(index), out.data_ptr(), weight.data_ptr(), x.data_ptr(),
            0 if scratch is None else scratch.data_ptr(),
            0 if bias is None or after else bias.data_ptr(),
            0 if w_scale is None else w_scale.data_ptr(),
            0 if x_scale is None else x_scale.data_ptr(),
        )  # fmt: skip
        if status:
            raise LaunchError(f"{library.abi.libtype}: {library.abi.prefix}Matmul: {library.abi.status(status)}")
        return out.add_(bias) if after else out

    return product


def _plain(shape: Shape, problem: Problem, product: Product) -> Callable[..., Any]:
    """x [..., K] and weight [N, K], or both with their batches first; bias [N] or absent."""
    del problem
    n = shape.n

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        return product(x, weight, bias, None, None, (*x.shape[:-1], n))

    return call


def _batched(shape: Shape, problem: Problem, product: Product) -> Callable[..., Any]:
    """As `_plain`, with a bias [B, N] or [B, 1, N], which comes after."""
    assert problem.remainder == ("bias" if shape.bias else "")
    n = shape.n

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        return product(x, weight, None if bias is None else bias.view(-1, 1, n), None, None, (*x.shape[:-1], n))

    return call


def _a16w16(shape: Shape, problem: Problem, product: Product) -> Callable[..., Any]:
    """As `_plain`; fp8 operands also with one scale each, and one of the output."""
    if not quantised(shape.dtype):
        return _plain(shape, problem, product)
    scaled = _scaled(shape, problem, product)

    def call(x: Any, weight: Any, bias: Any = None, scale_a: Any = None, scale_b: Any = None, scale_c: Any = None) -> Any:
        out = scaled(x, weight, _float(scale_a), _float(scale_b), bias)
        return out if scale_c is None else out.mul_(scale_c)

    return call


def _float(scale: Any) -> Any:
    return None if scale is None else scale.float()


def _scaled(shape: Shape, problem: Problem, product: Product) -> Callable[..., Any]:
    """x, weight, their scales, and bias [N] or absent; scales that the library does not multiply in are multiplied in float32 after."""
    if problem.remainder == "scales":
        return _scaled_after(shape, product)
    n = shape.n

    def call(x: Any, weight: Any, x_scale: Any, w_scale: Any, bias: Any = None) -> Any:
        return product(x, weight, bias, x_scale, w_scale, (*x.shape[:-1], n))

    return call


def _scaled_after(shape: Shape, product: Product) -> Callable[..., Any]:
    """The values' product, which does not round, then scales and bias in float32, then one rounding."""
    n, dtype = shape.n, torch_dtype(shape.outdtype)
    lead = (int(shape["B"]),) if shape.op.startswith("batched_") else ()

    def call(x: Any, weight: Any, x_scale: Any, w_scale: Any, bias: Any = None) -> Any:
        out = product(x, weight, None, None, None, (*x.shape[:-1], n)).view(*lead, -1, n)
        out = out.float().mul_(x_scale.reshape(*lead, -1, 1)).mul_(w_scale.reshape(*lead, 1, -1))
        out = out if bias is None else out.add_(bias.reshape(*lead, 1, n))
        return out.to(dtype).view(*x.shape[:-1], n)

    return call


def _blocks(shape: Shape, problem: Problem, product: Product) -> Callable[..., Any]:
    """x [..., K], weight [N, K], scales [..., ceil(K/128)] and [ceil(N/128), ceil(K/128)].

    cuBLASLt wants the scales of x with M innermost, and whole fours of rows and of the weight's blocks of K.
    """
    import torch

    pad, (m, n, k), rows = torch.nn.functional.pad, (shape.m, shape.n, shape.k), problem.b.columns
    blocks = -(-k // BLOCK)
    more, missing = rows - m, -blocks % _FOURS

    def call(x: Any, weight: Any, x_scale: Any, w_scale: Any) -> Any:
        by_row, by_block = x_scale.reshape(m, blocks).t(), w_scale
        if missing:
            by_block = pad(w_scale, (0, missing))
        if more:
            x_bytes, by_row = pad(x.view(torch.uint8).reshape(m, k), (0, 0, 0, more)), pad(by_row, (0, more))
            out = product(x_bytes, weight, None, by_row, by_block, (rows, n))[:m]
        else:
            out = product(x, weight, None, by_row.contiguous(), by_block, (rows, n))
        return out.view(*x.shape[:-1], n)

    return call


_CALLS: Mapping[str, Callable[[Shape, Problem, Product], Callable[..., Any]]] = {
    "a16w16": _a16w16,
    "a8w8": _scaled,
    "a8w8_bpreshuffle": _scaled,
    "a8w8_blockscale": _blocks,
    "batched_bf16": _batched,
    "batched_a8w8": _scaled,
}
