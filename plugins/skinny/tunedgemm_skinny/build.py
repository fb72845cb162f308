"""Compile one kernel for one class of shapes, without a device, into the artifact cache.

A build depends on M and on the divisors of K, not on N. It depends on the number of splits only
where they meet in a cluster.
"""

from __future__ import annotations

import functools
from pathlib import Path

import attrs
from tunedgemm.plugin import LaunchError, Shape
from tunedgemm.tools.files import artifact
from tunedgemm.tools.launching import ARCHITECTURES, format_of, scale_order

from tunedgemm_skinny.limits import FORMATTED, INPUTS, OUTPUTS, SCALES, batches_of, code_order, group_of, shuffled_rows, weight_of, x_pieces
from tunedgemm_skinny.names import KernelConfig
from tunedgemm_skinny.resources import compiled_rows, vec_of
from tunedgemm_skinny.rtc import Compiler, RefusedError

#: Name of the kernel function in every program.
ENTRY = "skinny"

_KERNELS = Path(__file__).with_name("kernels")
#: Lines of a compiler's log in an error.
_LINES = 8


#: Order of x's block scales -> `Build.x_column`.
_X_COLUMNS = {"m_major": 1, "m_major_padded": 4}


@attrs.frozen(cache_hash=True)
class Build:
    """Inputs of one compilation.

    Attributes:
        kernel: kernel parameters.
        gfx: architecture.
        dtype, outdtype, bias_dtype: of the weight, the output and the bias; "" without a bias.
        rows: rows of x that the program serves.
        vec: elements of one load.
        scale: kind of the scales.
        batched: whether the grid's third axis counts the products of a batch.
        cluster: blocks of a cluster; 0 for none.
        shuffled: weight rows whose pieces are adjacent; 0 for a plain weight.
        wide: whether x is bf16 and the weight mxfp4.
        x_column: floats to whose multiple M-major block scales of x are padded; 0 for row-major
            ones, and for the transposed ones of a shuffled weight.
        packed: macros of a packed weight's format, and their values.
    """

    kernel: KernelConfig
    gfx: str = attrs.field(validator=attrs.validators.in_(ARCHITECTURES))
    dtype: str = attrs.field(validator=attrs.validators.in_(INPUTS))
    outdtype: str = attrs.field(validator=attrs.validators.in_(OUTPUTS))
    bias_dtype: str = attrs.field(validator=attrs.validators.in_(("", *OUTPUTS)))
    rows: int
    vec: int
    scale: str = attrs.field(default="none", validator=attrs.validators.in_(SCALES))
    batched: bool = False
    cluster: int = 0
    shuffled: int = 0
    wide: bool = False
    x_column: int = 0
    packed: tuple[tuple[str, int], ...] = ()


def build_of(kernel: KernelConfig, splits: int, shape: Shape, gfx: str) -> Build:
    """Return the build that serves the shape with this number of splits of K."""
    return Build(
        kernel,
        gfx,
        weight_of(shape),
        shape.outdtype,
        shape.bias_dtype,
        compiled_rows(kernel, shape.m, gfx),
        vec_of(shape),
        shape.scale,
        batched=batches_of(shape) > 1,
        cluster=splits if kernel.cluster else 0,
        shuffled=shuffled_rows(shape.layout),
        wide=x_pieces(shape) > 1,
        x_column=_X_COLUMNS.get(scale_order(shape), 0),
        packed=packed_of(shape) if shape.op == FORMATTED else (),
    )


def packed_of(shape: Shape) -> tuple[tuple[str, int], ...]:
    """Return the macros of a packed weight's format, which ``kernels/packed.h`` describes."""
    form = format_of(shape)
    e2m1 = 0 if not form.scale else 1 if form.has_global else 2
    return ("ORDER", code_order(shape)), ("ZEROS", 0 if form.zeros is None else 1 + form.zeros), ("E2M1", e2m1), ("GROUP", group_of(shape))


@functools.cache
def source(family: str) -> str:
    """Return the program of a family: one text without includes."""
    return "\n".join((_KERNELS / f"{part}.h").read_text() for part in ("portable", "finish", family))


def defines(build: Build) -> dict[str, int]:
    """Return the macros that specialise a family's source."""
    kernel = build.kernel
    of_x = {"X_ORDER": build.x_column} if build.x_column else {}
    return {
        f"FAMILY_{kernel.family}": 1,
        "DTYPE": INPUTS.index(build.dtype),
        "OUT": OUTPUTS.index(build.outdtype),
        "BIAS": ("", *OUTPUTS).index(build.bias_dtype),
        "M": build.rows,
        "N_EACH": kernel.n_each,
        "WARPS_N": kernel.warps_n,
        "WARPS_K": kernel.warps_k,
        "UNROLL": kernel.unroll,
        "VEC": build.vec,
        "WAVE": ARCHITECTURES[build.gfx].warp_size,
        "X_SHARED": int(kernel.x_shared),
        "STAGES": kernel.stages,
        "SCALE": SCALES.index(build.scale),
        "BATCHED": int(build.batched),
        "CLUSTER": build.cluster,
        "SHUFFLED": build.shuffled,
        "X_WIDE": int(build.wide),
        **of_x,
        **dict(build.packed),
    }


def options(build: Build) -> list[str]:
    """Return the compiler's options."""
    if build.gfx.startswith("sm_"):
        specific = "a" * (build.kernel.family == "wgmma")  # wgmma exists in sm_90a alone
        target = [f"--gpu-architecture={build.gfx}{specific}", "--std=c++17", "-default-device"]
    else:
        target = [f"--offload-arch={build.gfx}", "-std=c++17", "-O3"]
    return target + [f"-D{name}={value}" for name, value in defines(build).items()]


def code(build: Build, compiler: Compiler) -> bytes:
    """Return the code object of a build, from the artifact cache if stored there.

    Raises:
        LaunchError: it does not compile; the message ends with the first lines of the log.
    """
    text, flags = source(build.kernel.family), options(build)

    def compile_source() -> bytes:
        try:
            return compiler.compile(text, f"{build.kernel.name}.cpp", flags)
        except RefusedError as error:
            lines = [line for line in error.log.splitlines() if line.strip()][:_LINES]
            log = "\n".join([str(error), *lines])
            raise LaunchError(f"skinny {build.kernel.name}: {compiler.version} cannot compile it for {build.gfx}: {log}") from error

    return artifact("\n".join(("skinny", compiler.version, *flags, text)), compile_source)
