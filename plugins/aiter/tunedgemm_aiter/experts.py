"""Run a row of AITER's table of fused MoE by AITER's implementation, with a table of that row alone.

AITER's fused_moe looks up its tables itself. Its implementation takes another table for one call,
which has a row for exactly one shape. A row that it does not find raises an error.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from tunedgemm.plugin import Device, Launcher, PluginError, Shape, Solution
from tunedgemm.tools.files import private_folder, replace_file
from tunedgemm.tools.launching import on_device, torch_dtype

from tunedgemm_aiter.installed import attribute, function, lacking
from tunedgemm_aiter.launch import compiling_eagerly
from tunedgemm_aiter.limits import is_aiters_choice
from tunedgemm_aiter.names import AUTO, cells, parse

if TYPE_CHECKING:
    from pathlib import Path

    import torch

#: Numbers of AITER's enums, which it compiles; csrc/include/aiter_enum.h.
_ACTIVATIONS = {"silu": "Silu", "gelu": "Gelu", "swiglu": "Swiglu", "situv2": "Situv2", "no": "No"}
#: Columns of a row that AITER's look-up reads, with AITER's defaults; the first is required.
_VALUES = {"block_m": "", "ksplit": "0", "run_1stage": "0"}


def lacks(family: str, solution: Solution, shape: Shape, device: Device) -> str:
    """Return why a solution does not serve a shape, as far as AITER's sources tell; "" where it does."""
    del device
    kernel = parse(family, shape.op, solution.kernel_name or AUTO)
    if kernel.name == AUTO:
        return lacking(kernel.need) if is_aiters_choice(shape) else "AITER's fused_moe chooses another dtype of the activations"
    if not cells(solution.extra).get("block_m"):
        return f"the row of {kernel.name!r} needs AITER's column block_m"
    return lacking(kernel.need, "flydsl_" in kernel.name)


def bind(family: str, solution: Solution, shape: Shape, device: Device) -> Launcher:
    """Return the launcher of a solution; its first call outside of graphs compiles, where AITER has not.

    A call here would need memory for the weights of all experts.

    Raises:
        PluginError: AITER lacks the function or refuses.
    """
    del family
    call = _by_choice(shape) if solution.kernel_name in (AUTO, "") else _by_row(solution, shape, device)
    return Launcher(compiling_eagerly(on_device(call, device.index), shape, device))


def _by_choice(shape: Shape) -> Any:
    """Return a call of AITER's fused_moe, which looks up AITER's tables."""
    fields = dict(shape.extra)
    run, enums = function("aiter.fused_moe", "fused_moe"), _enums(shape)
    weighted, dtype = bool(fields["doweight_stage1"]), torch_dtype(shape.dtype)

    def call(hidden: Any, w1: Any, w2: Any, weight: Any, ids: Any, *scales: Any) -> Any:
        named = dict(zip(_SCALES, scales, strict=False))
        w1, w2 = _shuffled(w1), _shuffled(w2)
        return run(hidden, w1, w2, weight, ids, activation=enums[0], quant_type=enums[1], doweight_stage1=weighted, dtype=dtype, **named)

    return call


_SCALES = ("w1_scale", "w2_scale", "a1_scale", "a2_scale")


def _by_row(solution: Solution, shape: Shape, device: Device) -> Any:
    """Return a call of AITER's implementation with a table of one row."""
    fields = dict(shape.extra)
    run, (activation, kind) = function("aiter.fused_moe", "_fused_moe_impl"), _enums(shape)
    file = str(on_device(lambda: _write_table(solution, shape), device.index)())
    fixed = {
        "activation": int(activation.value),
        "quant_type": int(kind.value),
        "doweight_stage1": bool(fields["doweight_stage1"]),
        "dtype": torch_dtype(shape.dtype),
        "_q_dtype_a": torch_dtype(str(fields["q_dtype_a"])),
        "_metadata_config_file": file,
    }

    def call(hidden: Any, w1: Any, w2: Any, weight: Any, ids: Any, *scales: Any) -> Any:
        return run(hidden, _shuffled(w1), _shuffled(w2), weight, ids, **dict(zip(_SCALES, scales, strict=False)), **fixed)

    return call


def _shuffled(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight with AITER's mark of shuffled bytes, without changing the caller's tensor."""
    marked = weight.detach()
    marked.is_shuffled = True  # type: ignore[attr-defined]
    return marked


def _enums(shape: Shape) -> tuple[Any, Any]:
    """Return AITER's members for a shape's activation and kind of quantisation.

    Raises:
        PluginError: the installed AITER has none.
    """
    fields = dict(shape.extra)
    words = ("ActivationType", _ACTIVATIONS[str(fields["act"])]), ("QuantType", str(fields["q_type"]))
    try:
        activation, kind = (getattr(attribute("aiter.fused_moe", enum), word) for enum, word in words)
    except AttributeError as error:
        raise PluginError(f"the installed AITER does not know {words[0][1]} and {words[1][1]}: {error}") from error
    return activation, kind


def _write_table(solution: Solution, shape: Shape) -> Path:
    """Write the row under the key that AITER looks up, and return the file."""
    fields, (activation, kind), given = dict(shape.extra), _enums(shape), cells(solution.extra)
    first, _, second = solution.kernel_name.partition("+")
    row = {
        "gfx": function("aiter.jit.utils.chip_info", "get_gfx_runtime")(),
        "cu_num": function("aiter.jit.utils.chip_info", "get_cu_num")(),
        "token": function("aiter.fused_moe", "get_padded_M")(shape.m),
        "model_dim": shape.n,
        "inter_dim": shape.k,
        "expert": fields["expert"],
        "topk": fields["topk"],
        "act_type": activation,
        "dtype": torch_dtype(shape.dtype),
        "q_dtype_a": torch_dtype(str(fields["q_dtype_a"])),
        "q_dtype_w": torch_dtype(str(fields["q_dtype_w"])),
        "q_type": kind,
        "use_g1u1": int(bool(fields["g1u1"])),
        "doweight_stage1": int(bool(fields["doweight_stage1"])),
        # AITER's key of a table for one call; no experts are shared here.
        "shared_expert_id": int(str(fields["expert"])) - 1,
        "hidden_pad": 0,
        "intermediate_pad": 0,
        "gate_mode": attribute("aiter.fused_moe", "GateMode")("separated"),
        "kernelName1": first,
        "kernelName2": second or given.get("kernelName2", "") or "Null",
        **{name: given.get(name) or default for name, default in _VALUES.items()},
        **{name: given[name] for name in ("xbf16", "flat") if given.get(name)},
    }
    content = f"{','.join(row)}\n{','.join(map(str, row.values()))}\n"
    path = private_folder("aiter") / f"{hashlib.sha256(content.encode()).hexdigest()[:24]}.csv"
    if not path.exists():
        replace_file(path, content.encode())
    return path
