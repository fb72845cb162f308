"""Turn an instance and a shape into a launcher with everything but addresses fixed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tunedgemm.plugin import Device, Launcher, LaunchError, PluginError, Shape, Solution, Unsupported
from tunedgemm.tools.launching import ForkSafeLock, Launch, on_device, switched_on, torch_dtype, workspace

from tunedgemm_ck.build import COMPILE, REBUILD, CompiledObject, Target, build_object, find_object, is_built, targets_of
from tunedgemm_ck.family import Family
from tunedgemm_ck.names import resolve
from tunedgemm_ck.native import MOE_POINTERS, POINTERS, UNSUPPORTED, load_object
from tunedgemm_ck.problem import batches_of, problem_of
from tunedgemm_ck.stages import sizes_of
from tunedgemm_ck.toolchain import Finder

#: Objects compiled anew in this process; each is rebuilt once.
_rebuilt: set[str] = set()
_rebuilding = ForkSafeLock()


def prepare(family: Family, finder: Finder, solution: Solution, shape: Shape, device: Device) -> None:
    """Compile into the artifact cache; needs no device.

    Raises:
        LaunchError: compilation failed.
        PluginError: no toolchain was found, or the cache cannot be written.
    """
    try:
        instance, _ = resolve(family, solution, shape, device)
    except PluginError:  # bind says why
        return
    for target in targets_of(family, instance, problem_of(shape, device.gfx), finder):
        build_object(target)


def bind(family: Family, finder: Finder, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
    """Return the launcher of a solution for exactly this shape.

    Args:
        device: the device whose limits apply; its index is -1 where host memory emulates it.

    Raises:
        PluginError: the solution does not serve the shape, or its object is not stored.
        LaunchError: the object does not compile or load, or the runtime reports an error.
    """
    instance, split = resolve(family, solution, shape, device)
    objects = [_find_or_build(target) for target in targets_of(family, instance, problem_of(shape, device.gfx), finder)]
    loaded_objects, routed = [load_object(compiled.code) for compiled in objects], shape.op == "fmoe"
    sizes = sizes_of(shape, split) if routed else (shape.m, shape.n, shape.k, batches_of(shape), split)
    pointers = MOE_POINTERS if routed else POINTERS
    failed = functools.partial(_raise_failure, f"{family.libtype} {instance.name}", device.kind)
    workspaces = on_device(lambda: [loaded.workspace_bytes(sizes, pointers) for loaded in loaded_objects], device.index)()
    if min(workspaces) < 0:
        # CUTLASS queries the device for its multiprocessors; CK queries nothing.
        for loaded in loaded_objects if device.kind == "nvidia" else ():
            if error := on_device(loaded.runtime_error, device.index)(len(sizes), pointers):
                failed(error)
        return Unsupported(f"{family.libtype} {instance.name} does not support {shape}")
    # The stages of fmoe share one workspace, of the larger of their sizes.
    launches = [loaded.launcher(sizes, pointers) for loaded in loaded_objects]
    call = (_routed if routed else _single)(launches, failed, shape, device, max(workspaces))
    return Launcher(on_device(call, device.index), workspace_bytes=max(workspaces))


def check_objects(targets: Iterable[Target]) -> None:
    """Check that objects are stored, unless `bind` compiles them.

    Raises:
        PluginError: one is missing.
    """
    for target in targets:
        if not (switched_on(REBUILD) or switched_on(COMPILE) or is_built(target)):
            find_object(target)


def _find_or_build(target: Target) -> CompiledObject:
    """Return the target's object: from the cache, or compiled where the user has allowed that.

    Raises:
        PluginError: the object is not stored.
        LaunchError: compilation failed.
    """
    if switched_on(REBUILD):
        with _rebuilding:
            fresh = str(target) not in _rebuilt
            compiled = build_object(target, fresh=fresh)
            _rebuilt.add(str(target))
        return compiled
    return build_object(target) if switched_on(COMPILE) else find_object(target)


def _raise_failure(name: str, kind: str, status: int) -> None:
    runtime = {"nvidia": "CUDA", "amd": "HIP"}[kind]
    reason = "unsupported sizes" if status == UNSUPPORTED else f"{runtime} error {status}"
    raise LaunchError(f"{name}: {reason}")


def _stream(index: int) -> Callable[[int], int]:
    import torch

    return torch._C._cuda_getCurrentRawStream if index >= 0 else lambda _: 0


def _single(launches: Sequence[Launch], failed: Callable[[int], None], shape: Shape, device: Device, nbytes: int) -> Callable[..., Any]:
    """Return the launcher of one product, of operands with scales or without."""
    import torch

    (launch,), index, where = launches, device.index, device.torch_device
    empty, stream, dtype, n, plain = torch.empty, _stream(index), torch_dtype(shape.outdtype), shape.n, (shape.m, shape.n)

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        out = empty(plain if x.dim() == 2 else (*x.shape[:-1], n), dtype=dtype, device=where)
        # In a graph only this name holds the workspace. Released early, another call's output could
        # reuse its memory.
        scratch = workspace(nbytes, where) if nbytes else None
        added, address = 0 if bias is None else bias.data_ptr(), 0 if scratch is None else scratch.data_ptr()
        if status := launch(stream(index), x.data_ptr(), weight.data_ptr(), 0, 0, added, out.data_ptr(), address):
            failed(status)
        return out

    def scaled(x: Any, weight: Any, x_scale: Any, w_scale: Any, bias: Any = None) -> Any:
        out = empty(plain if x.dim() == 2 else (*x.shape[:-1], n), dtype=dtype, device=where)
        scratch = workspace(nbytes, where) if nbytes else None  # held as above
        added, address = 0 if bias is None else bias.data_ptr(), 0 if scratch is None else scratch.data_ptr()
        scales = x_scale.data_ptr(), w_scale.data_ptr()
        if status := launch(stream(index), x.data_ptr(), weight.data_ptr(), *scales, added, out.data_ptr(), address):
            failed(status)
        return out

    return call if shape.scale == "none" else scaled


def _routed(launches: Sequence[Launch], failed: Callable[[int], None], shape: Shape, device: Device, nbytes: int) -> Callable[..., Any]:
    """Return the launcher of fmoe's stages, which run in order on the stream.

    The second stage reads in the workspace what the first one wrote.
    """
    import torch

    (first, second), index, where = launches, device.index, device.torch_device
    empty, stream, dtype, plain = torch.empty, _stream(index), torch_dtype(shape.outdtype), (shape.m, shape.n)

    def call(  # noqa: PLR0913, PLR0917 - the op's operands
        hidden: Any,
        w1: Any,
        w2: Any,
        weight: Any,
        ids: Any,
        w1_scale: Any = None,
        w2_scale: Any = None,
        a1_scale: Any = None,
        a2_scale: Any = None,
    ) -> Any:
        out = empty(plain, dtype=dtype, device=where)
        scratch = workspace(nbytes, where)  # held as above
        scales = [0 if scale is None else scale.data_ptr() for scale in (w1_scale, w2_scale, a1_scale, a2_scale)]
        operands = hidden.data_ptr(), w1.data_ptr(), w2.data_ptr(), weight.data_ptr(), ids.data_ptr()
        addresses = stream(index), *operands, *scales, out.data_ptr(), scratch.data_ptr()
        if status := first(*addresses) or second(*addresses):
            failed(status)
        return out

    return call
