"""Call kernels of other projects as launchers, which `speed.py --arms` times with ours.

deepgemm
    DeepGEMM: bf16, and fp8 with scales by block. From `deep_gemm`, or from the copy in an installed
    vLLM. It compiles a kernel for each shape at its first call, with nvcc. For `fmoe` its two
    grouped products alone, over rows that are sorted and quantised already: a floor.
linear
    F.linear in the dtype of the activations, by the decoded weight: what `a16wn` competes with.
marlin
    vLLM's Marlin for `a16wn` in gptq_int4, awq_int4, mxfp8, mxfp4 and nvfp4, by the weight as
    vLLM 0.33 repacks it when it loads a layer.
persistent
    The product that vLLM's batch-invariant mode runs for bf16, with its tables.
vllm
    The CUTLASS products of vLLM: fp8 and int8 with scales by tensor or row, fp8 with scales by
    block. From the library of an installed vLLM. For `fmoe` its experts by the plugin `vllm`, with
    scales by row: the same bytes of weights, other results. With ``VLLM_BATCH_INVARIANT=1`` in the
    environment they are those of that mode.

vLLM itself is imported for `marlin` and `persistent` only, which takes seconds. Each product is
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
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import current_device
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
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


def _rotated(weight: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cycle through copies of a repacked weight that no cache holds: each call takes the next one."""
    size = sum(each.nbytes for each in weight)
    cache = torch.cuda.get_device_properties(weight[0].device).L2_cache_size
    copies = max(2, -(-COLD * cache // size))
    return itertools.cycle([tuple(each.clone() for each in weight) for _ in range(copies)])


def _stored(shape: Shape) -> tuple[torch.Tensor, Weight]:
    """Return x and the weight of a shape's seeded operands."""
    x, *operands = op_named(shape.op).make_inputs(shape, current_device().torch_device, 0)
    return x, Weight(*operands[:5])


def _marlin(shape: Shape) -> Callable[..., torch.Tensor]:
    """Return Marlin's product by a weight that is repacked once, as vLLM's layers do.

    Raises:
        KeyError: a format that vLLM has no Marlin for, or that this benchmark does not repack.
    """
    if shape.op != "a16wn":
        raise KeyError(shape.op)
    from vllm.model_executor.layers.quantization.utils import marlin_utils as utils
    from vllm.scalar_type import scalar_types

    library = vllm_ops()
    (x, weight), n, k, group = _stored(shape), shape.n, shape.k, int(shape["w_group"])
    workspace = utils.marlin_make_workspace_new(x.device)
    if shape["w_format"] in _LAYERS:
        return _marlin_layer(shape, weight, workspace)
    kinds = {"gptq_int4": scalar_types.uint4b8, "awq_int4": scalar_types.uint4}
    kind, scale = kinds[str(shape["w_format"])], utils.marlin_permute_scales(weight.w_scale, k, n, group or -1)
    if weight.w_zeros is None:
        codes = library.gptq_marlin_repack(weight.weight, k, n, 4, False)
        zeros = utils.marlin_make_empty(x.device)
    else:
        codes = library.awq_marlin_repack(weight.weight, k, n, 4, False)
        zeros = utils.awq_to_marlin_zero_points(weight.w_zeros, k // (group or k), n, 4)
    weights = _rotated((codes, scale, zeros))
    return lambda x, *_: utils.apply_gptq_marlin_linear(x, *next(weights), workspace, kind, n, k)


#: Formats that vLLM repacks by functions of a layer: module, and the end of the functions' names.
_LAYERS = {"mxfp8": ("marlin_utils_fp8", "mxfp8"), "mxfp4": ("marlin_utils_fp4", "fp4"), "nvfp4": ("marlin_utils_fp4", "fp4")}


def _marlin_layer(shape: Shape, weight: Weight, workspace: torch.Tensor) -> Callable[..., torch.Tensor]:
    module, name = _LAYERS[str(shape["w_format"])]
    library = importlib.import_module(f"vllm.model_executor.layers.quantization.utils.{module}")
    layer, dtype = torch.nn.Module(), torch_dtype(shape.dtype)
    layer.output_size_per_partition, layer.input_size_per_partition, layer.params_dtype = shape.n, shape.k, dtype
    scale = weight.w_scale.view(torch.uint8) if name == "mxfp8" else weight.w_scale
    stored = {"weight": weight.weight if name == "mxfp8" else weight.weight.view(torch.uint8), "weight_scale": scale}
    stored |= {} if weight.w_global_scale is None else {"weight_global_scale": weight.w_global_scale.reshape(())}
    for key, value in stored.items():
        setattr(layer, key, torch.nn.Parameter(value, requires_grad=False))
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        getattr(library, f"prepare_{name}_layer_for_marlin")(layer)
    finally:
        torch.set_default_dtype(default)
    apply, factor = getattr(library, f"apply_{name}_marlin_linear"), getattr(layer, "weight_global_scale", None)
    weights, last = _rotated((layer.weight.data, layer.weight_scale.data)), (factor,) if name == "fp4" else ()
    return lambda x, *_: apply(x, *next(weights), *last, workspace, shape.n, shape.k)


PEERS = {"deepgemm": _deepgemm, "linear": _linear, "marlin": _marlin, "persistent": _persistent, "vllm": _vllm}


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
