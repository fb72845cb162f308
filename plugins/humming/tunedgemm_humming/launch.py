"""Compile, load and launch one configuration of Humming's kernel for one shape."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunedgemm.plugin import Device, Launcher, LaunchError, PluginError, Shape, Solution
from tunedgemm.tools.files import artifact
from tunedgemm.tools.launching import format_of, semaphores, switched_on, torch_dtype

from tunedgemm_humming.library import Library
from tunedgemm_humming.names import Config, parse_name
from tunedgemm_humming.space import kernel_of

#: Variable that lets `bind` compile a kernel that was not prepared.
COMPILE = "TUNEDGEMM_HUMMING_COMPILE"
#: Most rows of a launch.
_ROWS = 1 << 30


def resolve(solution: Solution) -> Config:
    """Return the configuration of a solution.

    Raises:
        PluginError: no kernel has that name.
    """
    if solution.split_k:
        raise PluginError(f"humming: splitK must be 0, since names end in _streamk instead (got {solution.split_k})")
    return parse_name(solution.kernel_name)


def uncompiled(solution: Solution, shape: Shape, version: str) -> str:
    """Return why `bind` refuses a valid solution that was not prepared here; "" where it does not."""
    if switched_on(COMPILE) or _binary(resolve(solution), shape, version):
        return ""
    remedy = f"tune the shape on this machine, or set {COMPILE}=1 to compile here"
    return f"humming {solution.kernel_name}: not compiled for {version}; {remedy}"


def _record(config: Config, shape: Shape, version: str) -> str:
    """Return the key of the note of a kernel's binary; kernels do not depend on M."""
    return f"{version} {json.dumps(kernel_of(config, shape), sort_keys=True)}"


def _binary(config: Config, shape: Shape, version: str) -> str:
    """Return the path of a binary that was compiled before; "" if there is none, or it was deleted."""

    def missing() -> bytes:
        raise LookupError

    try:
        path = artifact(_record(config, shape, version), missing).decode()
    except LookupError:
        return ""
    return path if Path(path).is_file() else ""


def prepare(load: Callable[[], Library], solution: Solution, shape: Shape, version: str) -> None:
    """Compile into Humming's cache, without a device, and note the binary's path in ours.

    Raises:
        LaunchError: the kernel does not compile.
        PluginError: Humming does not load, or the note cannot be written.
    """
    try:
        config = resolve(solution)
    except PluginError:  # bind reports it
        return
    if not _binary(config, shape, version):
        _compiled(load(), config, shape, version)


def _compiled(library: Library, config: Config, shape: Shape, version: str) -> str:
    """Compile a kernel and return the path of its binary."""
    kernel = kernel_of(config, shape)
    try:
        library.check(kernel)
        path = library.build(kernel)
    except Exception as error:  # Humming asserts its limits, and raises others
        text = " ".join(str(error).split()) or "a limit of the kernel"
        raise LaunchError(f"humming {config.name}: does not compile for {shape}: {text}") from error
    artifact(_record(config, shape, version), path.encode, fresh=True, on_disk=True)
    return path


def bind(load: Callable[[], Library], solution: Solution, shape: Shape, device: Device, version: str) -> Launcher:
    """Return the launcher of a solution, after one launch, which loads the kernel before any capture.

    Raises:
        LaunchError: the kernel does not compile or run.
        PluginError: Humming does not load, or has no such kernel.
    """
    config, library = resolve(solution), load()
    path = _binary(config, shape, version) or _compiled(library, config, shape, version)
    try:
        call = _launcher(library.launch, library.register(path), config, shape, device)
        call(*_operands(shape, device))
    except Exception as error:
        raise LaunchError(f"humming {config.name}: fails for {shape}: {' '.join(str(error).split())}") from error
    copies = shape.m * shape.k * torch_dtype(shape.dtype).itemsize if format_of(shape).has_index else 0
    return Launcher(call, workspace_bytes=copies + 4 * _locks(config, device))


def _locks(config: Config, device: Device) -> int:
    """Return the locks of shared tiles, of which there are fewer than twice the blocks."""
    return 2 * config.ctas * device.cu_num * config.locks if config.stream_k else 0


def _operands(shape: Shape, device: Device) -> list[Any]:
    """Return operands of any values, with one row of x."""
    import torch

    form, n, k = format_of(shape), shape.n, shape.k
    groups, empty = k // (int(shape["w_group"]) or k), functools.partial(torch.empty, device=device.torch_device)
    return [
        empty(1, k, dtype=torch_dtype(shape.dtype)),
        empty(n * k * form.bits // 8, dtype=torch.uint8),
        empty(groups, n, dtype=_scale_dtype(shape)),
        None if form.zeros is None else empty(groups, n // 8, dtype=torch.int32),
        torch.arange(k, dtype=torch.int32, device=device.torch_device) if form.has_index else None,
        empty((), dtype=torch.float32) if form.has_global else None,
    ]


def _scale_dtype(shape: Shape) -> Any:
    """Return the dtype of scales, for which bytes may stand."""
    import torch

    form = format_of(shape)
    if form.has_global:
        return torch.float8_e4m3fn
    return torch.float8_e8m0fnu if "e8m0" in form.scale else torch_dtype(shape.dtype)


def _launcher(launch: Callable[..., Any], number: int, config: Config, shape: Shape, device: Device) -> Callable[..., Any]:
    """Make the call; it takes any number of rows, as the kernel does."""
    import torch

    form, n, k, int32, empty = format_of(shape), shape.n, shape.k, torch.int32, torch.empty
    dtype, sizes, locks = torch_dtype(shape.dtype), (k // 16, n * form.bits // 2), _locks(config, device)
    configs = torch.tensor([0, _ROWS, number, config.sms], dtype=torch.int64)
    scale_dtype = _scale_dtype(shape)

    def call(x: Any, weight: Any, w_scale: Any, w_zeros: Any = None, w_index: Any = None, w_global_scale: Any = None) -> Any:
        rows = x.view(-1, k) if w_index is None else x.view(-1, k).index_select(1, w_index)
        out = empty((len(rows), n), dtype=dtype, device=x.device)
        launch(
            configs=configs,
            inputs=rows,
            weight=weight.view(-1).view(int32).view(sizes),
            weight_scale=w_scale.view(scale_dtype),
            weight_scale_2=None if w_global_scale is None else w_global_scale.view(1),
            zero_point=w_zeros,
            outputs=out,
            locks=semaphores(locks, x.device) if locks else None,
        )
        return out if x.dim() == 2 else out.view(*x.shape[:-1], n)

    return call
