"""Call kernels of other projects as launchers, which `speed.py --arms` times with ours.

deepgemm
    DeepGEMM: bf16, and fp8 with scales by block. From `deep_gemm`, or from the copy in an installed
    vLLM. It compiles a kernel for each shape at its first call, with nvcc. For `fmoe` its two
    grouped products alone, over rows that are sorted and quantised already: a floor.
humming
    Humming's product for `a16wn` by the plugin `humming`: its own choice for the shape, compiled
    first. The weight is in Marlin's layout where that serves both, else in Humming's.
linear
    F.linear in the dtype of the activations, by the decoded weight: what `a16wn` competes with.
marlin, machete
    vLLM's product for `a16wn` by the plugin `vllm`, by the weight as vLLM 0.33 repacks it when it
    loads a layer. The operator chooses the kernel, as in vLLM.
persistent
    The product that vLLM's batch-invariant mode runs for bf16, with its tables.
vllm
    The CUTLASS products of vLLM: fp8 and int8 with scales by tensor or row, fp8 with scales by
    block. From the library of an installed vLLM. For `fmoe` its experts by the plugin `vllm`, with
    scales by row: the same bytes of weights, other results. With ``VLLM_BATCH_INVARIANT=1`` in the
    environment they are those of that mode.

vLLM itself is imported for `persistent` only, which takes seconds. Each product is
compared with the reference, and a wrong one is not timed: vLLM takes the scales of x for M-major,
whatever their strides.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import current_device
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.repacked import repack_weight
from tunedgemm.ops.formats.shuffle import plain_weight
from tunedgemm.ops.formats.weight_only import Weight, decode
from tunedgemm.ops.weight_formats import format_of
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.rounds import COLD

#: Relative error by norm from which a product counts as wrong: two roundings to bf16, and sums of
#: fp8 products in the tensor cores' precision.
WRONG = 0.01


def vllm_folder() -> Path | None:
    """Return the folder of an installed vLLM, or None."""
    found = importlib.util.find_spec("vllm")
    return Path(found.origin).parent if found is not None and found.origin else None


@functools.cache
def deep_gemm() -> Any:
    """Import DeepGEMM.

    Raises:
        UserError: it is not installed.
    """
    folder = vllm_folder()
    if folder is not None:
        sys.path.append(str(folder / "third_party"))
    try:
        return importlib.import_module("deep_gemm")
    except (ImportError, RuntimeError) as error:
        raise UserError(f"deepgemm: cannot be imported ({error}); install deep_gemm, or a vLLM that has it") from error


@functools.cache
def vllm_ops() -> Any:
    """Load vLLM's library of operators.

    Raises:
        UserError: it is not installed, or built for another torch.
    """
    folder = vllm_folder()
    libraries = sorted(folder.glob("_C*.abi3.so")) if folder is not None else []
    try:
        for library in libraries:
            torch.ops.load_library(str(library))
    except OSError as error:
        raise UserError(f"vllm: {libraries} cannot be loaded: {error}") from error
    if not hasattr(torch.ops._C, "cutlass_scaled_mm"):
        raise UserError("vllm: not installed, or without cutlass_scaled_mm; install the wheel of vLLM for this torch")
    return torch.ops._C


def _deepgemm(shape: Shape) -> Callable[..., torch.Tensor]:
    library, out_dtype = deep_gemm(), torch_dtype(shape.outdtype)

    def blocks(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        out = torch.empty(shape.m, shape.n, dtype=out_dtype, device=x.device)
        library.fp8_gemm_nt((x, x_scale), (weight, w_scale), out)
        return out

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(shape.m, shape.n, dtype=out_dtype, device=x.device)
        library.bf16_gemm_nt(x, weight, out)
        return out

    if shape.op == "fmoe":
        return _grouped_products(library, shape)
    return {"a8w8_blockscale": blocks, "a16w16": plain}[shape.op]


def _grouped_products(library: Any, shape: Shape) -> Callable[..., torch.Tensor]:
    """Return DeepGEMM's two products of experts, each expert's rows padded to the library's block."""
    device, fp8, block = current_device().torch_device, torch.float8_e4m3fn, 128
    ids = op_named(shape.op).make_inputs(shape, device, 0)[4]
    counts = torch.bincount(ids.flatten(), minlength=int(shape["expert"]))
    owners = torch.arange(len(counts), device=device, dtype=torch.int32).repeat_interleave((counts + block - 1) // block * block)
    rows = len(owners)

    def inputs(wide: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = torch.ones(-(-wide // block), rows, device=device).t()
        return torch.randn(rows, wide, device=device, dtype=torch.bfloat16).to(fp8), scales

    operands = inputs(shape.n), inputs(shape.k)

    def call(*given: Any) -> torch.Tensor:
        _, w1, w2, _, _, w1_scale, w2_scale, *_ = given
        out = torch.empty(rows, shape.n, dtype=torch.bfloat16, device=device)
        for x, w, scale, target in (
            (operands[0], w1, w1_scale, torch.empty(rows, 2 * shape.k, dtype=torch.bfloat16, device=device)),
            (operands[1], w2, w2_scale, out),
        ):
            library.m_grouped_fp8_gemm_nt_contiguous(x, (w, scale), target, owners)
        return out[: shape.m]

    return call


def _vllm_experts(shape: Shape) -> Callable[..., torch.Tensor]:
    """Return vLLM's experts for scales by row, which are ones.

    Raises:
        KeyError: it has no such experts.
    """
    from tunedgemm_vllm import vllm

    by_row = attrs.evolve(shape, extra={**dict(shape.extra), "q_type": "per_Token"})  # type: ignore[arg-type]
    bound = vllm.bind(Solution("vllm", "cutlass_moe_mm"), by_row, current_device())
    if not isinstance(bound, Launcher):
        raise KeyError(str(bound))
    experts, device = int(shape["expert"]), current_device().torch_device
    scales = [torch.ones(experts, rows, 1, device=device) for rows in (2 * shape.k, shape.n)]
    return lambda hidden, w1, w2, weight, ids, *_: bound.call(hidden, w1, w2, weight, ids, *scales)


def _vllm(shape: Shape) -> Callable[..., torch.Tensor]:
    if shape.op == "fmoe":
        return _vllm_experts(shape)
    product, out_dtype = vllm_ops().cutlass_scaled_mm, torch_dtype(shape.outdtype)

    def scaled(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: Any = None) -> torch.Tensor:
        out = torch.empty(shape.m, shape.n, dtype=out_dtype, device=x.device)
        by_weight = w_scale.t() if shape.scale == "block" else w_scale
        product(out, x, weight.t(), x_scale, by_weight, bias)
        return out

    return {"a8w8": scaled, "a8w8_blockscale": scaled}[shape.op]


#: Modules of vLLM's batch-invariant mode, the newer one first.
_MODES = ("vllm.model_executor.determinism.batch_invariant", "vllm.model_executor.layers.batch_invariant")


@functools.cache
def batch_invariant_mode() -> Any:
    """Import vLLM's batch-invariant mode, which changes nothing of torch before it is switched on.

    Raises:
        UserError: it is not installed.
    """
    faults = []
    for name in _MODES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            faults.append(str(error))
    raise UserError(f"persistent: vLLM's batch-invariant mode cannot be imported ({'; '.join(faults)}); install vLLM")


def _persistent(shape: Shape) -> Callable[..., torch.Tensor]:
    if shape.op != "a16w16":
        raise KeyError(shape.op)
    library = batch_invariant_mode()
    return library.linear_batch_invariant


def _linear(shape: Shape) -> Callable[..., torch.Tensor]:
    if shape.op != "a16wn":
        raise KeyError(shape.op)
    weight = _stored(shape)[1]
    plain = decode(format_of(shape), weight, torch_dtype(shape.dtype))
    plain = plain if weight.w_global_scale is None else (plain * weight.w_global_scale).to(plain.dtype)
    weights = _rotated((plain,))
    return lambda x, *_: torch.nn.functional.linear(x, *next(weights))


def _rotated(weight: tuple[torch.Tensor | None, ...]) -> Iterator[tuple[torch.Tensor | None, ...]]:
    """Cycle through copies of a repacked weight that no cache holds: each call takes the next one."""
    given = [each for each in weight if each is not None]
    size, cache = sum(each.nbytes for each in given), torch.cuda.get_device_properties(given[0].device).L2_cache_size
    copies = max(2, -(-COLD * cache // size))
    return itertools.cycle([tuple(each if each is None else each.clone() for each in weight) for _ in range(copies)])


def _stored(shape: Shape) -> tuple[torch.Tensor, Weight]:
    """Return x and the weight of a shape's seeded operands."""
    x, *operands = op_named(shape.op).make_inputs(shape, current_device().torch_device, 0)
    return x, Weight(*operands[:5])


def _humming(shape: Shape) -> Callable[..., torch.Tensor]:
    """Return the product of Humming's own choice, in the layout that it reads.

    Raises:
        KeyError: it does not serve the format, group or sizes.
    """
    from tunedgemm_humming import humming

    own = shape.op == "a16wn" and op_named(shape.op).problem(attrs.evolve(shape, layout="humming"))
    return _repacked("marlin" if own else "humming", shape, humming)


def _repacked(layout: str, shape: Shape, backend: Backend | None = None) -> Callable[..., torch.Tensor]:
    """Return the product of a backend's first solution, by a weight that is repacked once.

    The backend is `vllm` by default, where the operator chooses the kernel.

    Raises:
        KeyError: the backend does not serve the format, group or sizes.
    """
    if shape.op != "a16wn":
        raise KeyError(shape.op)
    if backend is None:
        from tunedgemm_vllm import vllm as backend

    moved, device = attrs.evolve(shape, layout=layout), current_device()
    if reason := op_named(shape.op).problem(moved) or str(backend.refusal(moved, device) or ""):
        raise KeyError(reason)
    first = backend.solutions(moved, device)[0]
    if "prepare" in backend.functions:
        backend.prepare(first, moved, device)
    bound = backend.bind(first, moved, device)
    if not isinstance(bound, Launcher):
        raise KeyError(str(bound))
    stored = repack_weight(_stored(shape)[1], str(shape["w_format"]), layout, torch_dtype(shape.dtype))
    operands = plain_weight(stored.weight), *attrs.astuple(stored, recurse=False)[1:]
    while operands[-1] is None:
        operands = operands[:-1]
    weights = _rotated(operands)
    return lambda x, *_: bound.call(x, *next(weights))


PEERS: dict[str, Callable[[Shape], Callable[..., torch.Tensor]]] = {
    "deepgemm": _deepgemm,
    "linear": _linear,
    "humming": _humming,
    **{layout: functools.partial(_repacked, layout) for layout in ("marlin", "machete")},
    "persistent": _persistent,
    "vllm": _vllm,
}


def peer(name: str, shape: Shape) -> Launcher | str:
    """Return a peer's launcher for a shape, called once and found right; or why it does not serve it.

    Raises:
        UserError: the peer is not installed.
    """
    try:
        call = PEERS[name](shape)
    except KeyError as error:
        return f"{name} has no {shape.op}: {error.args[0]}"
    operands = op_named(shape.op).make_inputs(shape, current_device().torch_device, 0)
    try:
        out = call(*operands).float()
    except (RuntimeError, NotImplementedError) as error:
        return f"{name} refuses {shape}: {str(error).splitlines()[0]}"
    if shape.op == "fmoe":  # parts of it, or other scales
        return Launcher(call)
    wanted = op_named(shape.op).reference(shape, operands).float()
    far = float((out - wanted).norm() / wanted.norm())
    if not far < WRONG:
        return f"{name}: the product of {shape} is wrong (relative difference {far:.2g})"
    return Launcher(call)
