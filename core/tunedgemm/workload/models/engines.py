"""What serving engines call: the M, and the order of scales by block. Torch-free.

The M are graph batch sizes, and powers of two for prefill. Between two sizes an engine pads a batch
to the larger one. Sources: vLLM 0.20 to 0.33, ``VllmConfig._set_cudagraph_sizes`` and
``_POSSIBLE_FP8_BLOCK_KERNELS``; SGLang, ``ServerArgs._generate_cuda_graph_batch_sizes`` and
``_dispatch_auto_backend`` of ``fp8_utils``.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Callable, Mapping

import attrs

from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.ops.scale_order import M_MAJOR, M_MAJOR_PADDED, ROW, canonical_order, with_order
from tunedgemm.process.variables import OFF
from tunedgemm.shape import Shape
from tunedgemm.table.untuned import Untuned
from tunedgemm.workload.models.layer import Layer
from tunedgemm.workload.models.scheme import SCHEMES, WEIGHTS_ALONE

#: Defaults of the engines' HTTP servers: sequences at once, and tokens of one prefill.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 8192
#: The largest batch that vLLM captures a graph for, whatever the settings.
_VLLM_GRAPH = 512


@attrs.frozen
class _BlockKernel:
    """A kernel of engines for fp8 by block that reads x's scales in another order than row-major.

    Attributes:
        name: its library.
        switches: engine -> the variable that turns it off there, or "".
        gfx: architectures on which the engines choose it.
        order: the order of x's scales.
        multiples: what N and K must be multiples of.
        outdtypes: dtypes of its outputs.
    """

    name: str
    switches: Mapping[str, str]
    gfx: tuple[str, ...]
    order: str
    multiples: tuple[int, int] = (1, 1)
    outdtypes: tuple[str, ...] = ("bf16", "fp16")

    def serves(self, engine: str, shape: Shape, device: Device) -> bool:
        """Check whether an engine may run a shape on this kernel; the first that it may run serves it."""
        if engine not in self.switches or device.gfx not in self.gfx or shape.outdtype not in self.outdtypes:
            return False
        is_on = os.environ.get(self.switches[engine], "1").strip().lower() not in OFF
        return is_on and shape.n % self.multiples[0] == shape.k % self.multiples[1] == 0


#: In the engines' order. On sm_100 they pack e8m0 scales for DeepGEMM, which no op has.
_BLOCK_KERNELS = (
    _BlockKernel(
        "DeepGEMM", {"vllm": "VLLM_USE_DEEP_GEMM", "sglang": "SGLANG_ENABLE_JIT_DEEPGEMM"}, ("sm_90",), M_MAJOR_PADDED, (64, 128), ("bf16",)
    ),
    _BlockKernel("CUTLASS", {"vllm": ""}, ("sm_90", "sm_120"), M_MAJOR),
)
_BY_BLOCK, _MXFP4 = "a8w8_blockscale", "a16w4_blockscale"


def as_called(
    engine: str, by_op: Mapping[str, tuple[Untuned, ...]], device_of: Callable[[], Device]
) -> tuple[Mapping[str, tuple[Untuned, ...]], tuple[str, ...]]:
    """Return shapes as an engine calls them, and notes on the order of scales by block.

    Our plugin of vLLM calls mxfp4 weights alone as a format of a16wn.

    Args:
        engine: ``vllm`` or ``sglang``.
        by_op: the shapes by the name of their op.
        device_of: returns the device that is tuned for; called if a shape has scales by block.
    """
    if engine == "vllm" and _MXFP4 in by_op:
        moved = tuple(attrs.evolve(row, shape=_of_any_format(row.shape)) for row in by_op[_MXFP4])
        by_op = {**{name: rows for name, rows in by_op.items() if name != _MXFP4}, "a16wn": (*by_op.get("a16wn", ()), *moved)}
    if _BY_BLOCK not in by_op:
        return by_op, ()
    device, rows, sizes = device_of(), [], dict[str, dict[str, None]]()
    for row in by_op[_BY_BLOCK]:
        kernel = next((each for each in _BLOCK_KERNELS if each.serves(engine, row.shape, device)), None)
        order, why = (kernel.order, f"which {kernel.name} reads") if kernel else (ROW, "as no other is known")
        rows.append(attrs.evolve(row, shape=canonical_order(with_order(row.shape, order))))
        sizes.setdefault(f"{order} for {engine} on {device.gfx}, {why}", {})[f"{row.shape.n} x {row.shape.k}"] = None
    notes = (f"{_BY_BLOCK}: x's scales are listed as {note}: N x K = {', '.join(products)}" for note, products in sizes.items())
    return {**by_op, _BY_BLOCK: tuple(rows)}, tuple(notes)


def _of_any_format(shape: Shape) -> Shape:
    """Return the shape of a16wn with the operands of one of a16w4_blockscale."""
    fields = (shape.dtype, shape.outdtype, shape.epilogue, shape.bias_dtype, "block")
    return Shape("a16wn", shape.m, shape.n, shape.k, *fields, extra={"w_format": "mxfp4", "w_group": 32})


def as_run(engine: str, device_of: Callable[[], Device], layers: tuple[Layer, ...]) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """Return layers in the formats that an engine multiplies, and notes on changed ones.

    vLLM runs nvfp4, mxfp8 and mxfp4 by Marlin, on the weights alone, where NVIDIA's GPUs lack them.
    """
    changed = [layer for layer in layers if layer.scheme in WEIGHTS_ALONE and layer.kind != "experts"]
    if engine != "vllm" or not changed or not (number := re.match(r"sm_(\d+)", gfx := device_of().gfx)) or int(number[1]) >= 100:
        return layers, ()
    names = ", ".join(dict.fromkeys(layer.name for layer in changed))
    schemes = ", ".join(dict.fromkeys(SCHEMES[layer.scheme] for layer in changed))
    note = f"listed with activations of 16 bits, as vllm on {gfx} runs {schemes}: {names}"
    return tuple(attrs.evolve(layer, scheme=WEIGHTS_ALONE[layer.scheme]) if layer in changed else layer for layer in layers), (note,)


def rows_of_engine(engine: str, max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """List the M that an engine runs, ascending.

    Args:
        engine: ``vllm`` or ``sglang``.
        max_num_seqs: most sequences decoded at once.
        max_num_batched_tokens: most tokens of one step.

    Raises:
        UserError: an unknown engine, or a limit below 1.
    """
    if engine not in _GRAPHS:
        raise UserError(f"--nsets: unknown engine (got {engine!r}); use whole numbers as 1,16,256, or one of {', '.join(_GRAPHS)}")
    for flag, value in (("--max-num-seqs", max_num_seqs), ("--max-num-batched-tokens", max_num_batched_tokens)):
        if value < 1:
            raise UserError(f"{flag}: must be at least 1 (got {value})")
    graphs = {size for size in _GRAPHS[engine](max_num_seqs) if size <= max_num_batched_tokens}
    powers = itertools.takewhile(lambda power: power <= max_num_batched_tokens, (1 << bit for bit in itertools.count()))
    return tuple(sorted(graphs | {power for power in powers if power > max(graphs, default=0)} | {max_num_batched_tokens}))


def _of_vllm(sequences: int) -> set[int]:
    most = min(2 * sequences, _VLLM_GRAPH)
    return {size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)) if size <= most}


def _of_sglang(sequences: int) -> set[int]:
    sizes = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, sequences + 1, 32))
    return {size for size in sizes if size <= sequences}


_GRAPHS = {"vllm": _of_vllm, "sglang": _of_sglang}


def command_of(engine: str, model: str, tp: int, max_num_seqs: int, max_num_batched_tokens: int) -> str:
    """Write the command line that serves a model with the M of `rows_of_engine`."""
    model = shlex.quote(model)
    if engine == "vllm":
        limits = f"--max-num-seqs {max_num_seqs} --max-num-batched-tokens {max_num_batched_tokens}"
        return f"TUNEDGEMM_VLLM=1 vllm serve {model} --tensor-parallel-size {tp} {limits}"
    limits = f"--cuda-graph-max-bs {max_num_seqs} --chunked-prefill-size {max_num_batched_tokens}"
    return f"python -m sglang.launch_server --model-path {model} --tp {tp} {limits}"
