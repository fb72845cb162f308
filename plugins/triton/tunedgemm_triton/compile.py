"""Compile: one kernel for one class of shapes, into Triton's cache inside our artifact folder, without a device.

A build does not depend on M or on the sizes themselves, only on what they divide by, so one compile serves many shapes.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import Device, LaunchError, PluginError, Shape
from tunedgemm.tools import cache_folder

from tunedgemm_triton.fit import described, promotes
from tunedgemm_triton.limits import ARCHITECTURES, batches_of
from tunedgemm_triton.names import FAMILIES, Gemm, Gemv, Kernel, Streamk, Tma

#: Triton's texts of our dtypes.
TYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "int8": "i8", "fp8_e4m3fn": "fp8e4nv", "fp8_e4m3fnuz": "fp8e4b8"}
_lock = threading.Lock()


@attrs.frozen(cache_hash=True)
class Build:
    """Everything that a compile depends on.

    Attributes:
        kernel: the parameters.
        split_k: programs that share one tile's K.
        gfx: the architecture.
        dtype, outdtype, bias_dtype: short texts; bias_dtype is "" without a bias.
        scale: ``none``, ``tensor``, ``row`` or ``block``, and ``column`` for blocks whose scales of x lie transposed.
        layout: of the weight.
        batched: whether there are several products.
        n_multiple, k_multiple: the largest of 1, 2, 4, 8 and 16 that divides N or K, which says how wide loads and stores can be.
        even_k: whether K needs no mask.
        one_trip: whether a gemv program makes a single trip along K.
        described: whether tensor descriptors of x and the weight are passed.
        promote: elements of K after which sums of fp8 products go from the matrix unit to float32; 0 for none.
    """

    kernel: Kernel
    split_k: int
    gfx: str
    dtype: str
    outdtype: str
    bias_dtype: str
    scale: str
    layout: str
    batched: bool
    n_multiple: int
    k_multiple: int
    even_k: bool
    one_trip: bool
    described: bool
    promote: int


def build_of(kernel: Kernel, split_k: int, shape: Shape, device: Device) -> Build:
    """The build that serves the shape."""
    step = kernel.block_k * kernel.unroll * split_k if isinstance(kernel, Gemv) else kernel.block_k
    return Build(
        kernel=kernel,
        split_k=split_k,
        gfx=device.gfx,
        dtype=shape.dtype,
        outdtype=shape.outdtype,
        bias_dtype=shape.bias_dtype,
        scale="column" if shape.op == "a8w8_blockscale_bpreshuffle" else shape.scale,
        layout=shape.layout,
        batched=batches_of(shape) > 1,
        n_multiple=math.gcd(shape.n, 16),
        k_multiple=math.gcd(shape.k, 16),
        even_k=isinstance(kernel, Tma) or shape.k % step == 0,
        described=described(kernel, shape, device.gfx),
        one_trip=isinstance(kernel, Gemv) and shape.k <= step,
        promote=promotes(kernel, shape, device.gfx),
    )


def function_of(kernel: Kernel) -> Any:
    """The kernel's Triton function."""
    return getattr(importlib.import_module(f"tunedgemm_triton.kernels.{FAMILIES[kernel.family].module}"), kernel.family)


def constants(build: Build, *, upcast: bool = False) -> dict[str, int | bool | str]:
    """The values of the function's constexpr parameters."""
    kernel = build.kernel
    common: dict[str, int | bool | str] = {"BLOCK_N": kernel.block_n, "BLOCK_K": kernel.block_k, "HAS_BIAS": bool(build.bias_dtype)}
    if isinstance(kernel, Streamk):
        tile = {"BLOCK_M": kernel.block_m, "GROUP_M": kernel.group_m}
        return {**common, **tile, "DESCRIBED": build.described, "EVEN_K": build.even_k, "UPCAST": upcast}
    common |= {"SPLIT_K": build.split_k, "SCALE": build.scale, "BATCHED": build.batched}
    if isinstance(kernel, Gemv):
        loop = {"EVEN_K": build.even_k, "ONE_TRIP": build.one_trip, "UNROLL": kernel.unroll, "STAGES": kernel.stages}
        return {**common, **loop, "ROWS": kernel.rows}
    common |= {"BLOCK_M": kernel.block_m, "GROUP_M": kernel.group_m, "SWAP": kernel.swap, "PROMOTE": build.promote, "UPCAST": upcast}
    if isinstance(kernel, Tma):
        return {**common, "SPECIALIZE": kernel.specialize}
    return {**common, "EVEN_K": build.even_k, "SHUFFLED": shuffled_rows(build.layout), "CACHE": ".cg" if kernel.stream else ""}


def shuffled_rows(layout: str) -> int:
    """Rows of the weight whose packs of 16 bytes lie side by side in a shuffled layout (``aiter16x16``: 16); 0 for a plain one."""
    return 0 if layout == "row" else int(layout.removeprefix("aiter").partition("x")[0])


def signature(build: Build, names: list[str]) -> dict[str, str]:
    """The type text of every parameter of the function, in its order."""
    kernel, values, dtype = build.kernel, constants(build), TYPES[build.dtype]
    types = {**dict.fromkeys("MNKB", "i32"), "x_scale": "*fp32", "w_scale": "*fp32", "counters": "*i32"}
    types |= {"x": f"*{dtype}", "weight": f"*{dtype}", "out": f"*{TYPES[build.outdtype]}"}
    types |= {"partial": "*i32" if sums_integers(build) else "*fp32", "bias": f"*{TYPES[build.bias_dtype or build.outdtype]}"}
    if build.described and not isinstance(kernel, Gemv):
        box = "1, " * build.batched
        types["x"] = f"tensordesc<{dtype}[{box}{kernel.block_m}, {kernel.block_k}]>"
        types["weight"] = f"tensordesc<{dtype}[{box}{kernel.block_n}, {kernel.block_k}]>"
    return {name: "constexpr" if name in values else types[name] for name in names}


def sums_integers(build: Build) -> bool:
    """Whether partial sums are int32, not float32."""
    return build.dtype == "int8" and not isinstance(build.kernel, Gemv)


def options(build: Build) -> dict[str, int]:
    """Compiler options; those that are the compiler's defaults on AMD are left out."""
    kernel = build.kernel
    chosen = {"num_warps": kernel.warps, "num_stages": 1 if isinstance(kernel, Gemv) else kernel.stages}
    if isinstance(kernel, Gemm):
        chosen |= {"matrix_instr_nonkdim": kernel.nonkdim} if kernel.nonkdim else {}
        chosen |= {"kpack": kernel.kpack} if kernel.kpack > 1 else {}
        chosen |= {"waves_per_eu": kernel.waves} if kernel.waves else {}
    return chosen


def checked_options(chosen: dict[str, int], target: Any) -> dict[str, int]:
    """The options, after a look at their names: Triton ignores those that it does not know.

    Raises:
        PluginError: the target's compiler has no such option.
    """
    if target.backend == "hip":
        from triton.backends.amd.compiler import HIPOptions as Known
    else:
        from triton.backends.nvidia.compiler import CUDAOptions as Known
    known = {field.name for field in dataclasses.fields(Known)}
    if unknown := sorted(set(chosen) - known):
        raise PluginError(f"triton for {target.backend}:{target.arch} has no option {', '.join(unknown)}")
    return chosen


def target_of(gfx: str) -> Any:
    """Triton's target of an architecture."""
    from triton.backends.compiler import GPUTarget

    warp_size = ARCHITECTURES[gfx].warp_size
    return GPUTarget("cuda", int(gfx[3:]), warp_size) if gfx.startswith("sm_") else GPUTarget("hip", gfx, warp_size)


@contextlib.contextmanager
def our_cache() -> Iterator[None]:
    """Triton's cache in our artifact folder, for compiles in here only; one thread at a time."""
    from triton import knobs

    with _lock, knobs.cache.scope():
        knobs.cache.dir = _cache_at(str(cache_folder() / "triton"))
        yield


@functools.cache
def _cache_at(wanted: str) -> str:
    """The folder itself, or a temporary one of this process where it cannot be written."""
    try:
        Path(wanted).mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(wanted, os.W_OK):
            return wanted
    except OSError:
        pass
    temporary = tempfile.mkdtemp(prefix="tunedgemm-triton-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def compiled(build: Build) -> Any:
    """Triton's CompiledKernel of a build, from the cache where it is there; raises what `compile_function` does."""
    function = function_of(build.kernel)
    types = signature(build, list(function.arg_names))
    multiples = {"N": build.n_multiple, "K": build.k_multiple}
    return compile_function(function, types, constants(build), multiples, options(build), (build.gfx, build.kernel.name))


def compile_function(
    function: Any, types: dict[str, str], values: dict[str, Any], multiples: dict[str, int], chosen: dict[str, int], of: tuple[str, str]
) -> Any:
    """Triton's CompiledKernel of a function, from the cache where it is there.

    Args:
        types: the type text of every parameter, in their order.
        values: of those that are constant.
        multiples: powers of two that divide integers; of pointers 16 is taken to.
        chosen: options of the compiler.
        of: the architecture, and the name that an error gives.

    Raises:
        LaunchError: it did not compile; the message ends with the compiler's.
        PluginError: an option that the compiler does not know.
    """
    import triton
    from triton.compiler import ASTSource

    gfx, name = of
    target = target_of(gfx)
    known = [16 if kind.startswith("*") else multiples.get(parameter, 1) for parameter, kind in types.items()]
    attributes = {(place,): [["tt.divisibility", multiple]] for place, multiple in enumerate(known) if multiple > 1}
    checked = checked_options(chosen, target)
    try:
        with our_cache():
            return triton.compile(ASTSource(function, types, values, attributes), target=target, options=checked)
    except Exception as error:  # the compiler's passes raise plain RuntimeErrors beside its own
        raise LaunchError(f"triton {name} for {gfx} did not compile: {type(error).__name__}: {error}") from error
