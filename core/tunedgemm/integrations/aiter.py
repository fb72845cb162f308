"""Modules with AITER's names, for code that imports from ``aiter`` where AITER is not installed.

`install` puts modules into `sys.modules`; their names are looked up in `tunedgemm` at the first
use. A name of AITER's that this project lacks raises AttributeError, or ImportError in an import
statement, with the missing name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from tunedgemm.errors import UserError

if TYPE_CHECKING:
    import torch

    Quantised = tuple[torch.Tensor, torch.Tensor | None]

NAME = "aiter"
_HERE = "tunedgemm.integrations.aiter"


def _alias(home: str, *names: str, **others: str) -> Mapping[str, tuple[str, str]]:
    """Map a name here to (module, name there); *others* have another spelling there."""
    return {**{name: (home, name) for name in names}, **{name: (home, there) for name, there in others.items()}}


_A8W8 = {
    **_alias("tunedgemm", "gemm_a8w8", "gemm_a8w8_CK", "gemm_a8w8_blockscale"),
    **_alias(_HERE, "gemm_a8w8_bpreshuffle", "gemm_a8w8_blockscale_bpreshuffle", gemm_a8w8_ASM="gemm_a8w8_bpreshuffle"),
}
_BATCHED = {bits: _alias("tunedgemm", f"batched_gemm_{bits}_CK") for bits in ("bf16", "a8w8")}
_TUNED = _alias("tunedgemm", "TunedGemm", "gemm_a16w16", "tgemm")
_A4W4 = _alias("tunedgemm", "gemm_a4w4")
_ENUMS = _alias("tunedgemm", "ActivationType", "QuantType")
_SHUFFLE = _alias("tunedgemm", "shuffle_scale", "shuffle_weight")
_QUANT = {
    **_alias("tunedgemm", "per_1x32_f4_quant", "per_tensor_quant", "pertoken_quant"),
    **_alias(_HERE, "get_torch_quant", get_hip_quant="get_quant", get_triton_quant="get_quant"),
}
_DTYPES = {
    **_alias("torch", bf16="bfloat16", fp16="float16", fp32="float32", fp4x2="float4_e2m1fn_x2", fp8_e8m0="float8_e8m0fnu"),
    **_alias("torch", **{f"{sign}{bits}": f"{word}{bits}" for sign, word in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)}),
}
#: Served names: module -> name -> (module, name there).
SERVED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "aiter": {**_TUNED, **_A8W8, **_A4W4, **_BATCHED["bf16"], **_BATCHED["a8w8"], **_ENUMS, **_SHUFFLE, **_QUANT},
    "aiter.tuned_gemm": _TUNED,
    "aiter.fused_moe": _alias("tunedgemm", "fused_moe"),
    "aiter.ops": {},
    "aiter.ops.batched_gemm_op_a8w8": _BATCHED["a8w8"],
    "aiter.ops.batched_gemm_op_bf16": _BATCHED["bf16"],
    "aiter.ops.enum": _ENUMS,
    "aiter.ops.gemm_op_a4w4": _A4W4,
    "aiter.ops.gemm_op_a8w8": _A8W8,
    "aiter.ops.quant": _QUANT,
    "aiter.ops.shuffle": _SHUFFLE,
    "aiter.ops.triton": {},
    "aiter.ops.triton.gemm_a16w16": _alias(_HERE, gemm_a16w16="triton_gemm_a16w16"),
    "aiter.utility": {},
    "aiter.utility.dtypes": {**_DTYPES, **_alias(_HERE, "fp8")},
    "aiter.utility.fp4_utils": _alias("tunedgemm", "shuffle_scale", e8m0_shuffle="shuffle_scale"),
}
#: Modules with another name in AITER's top-level namespace.
_ALIASES = {"dtypes": "aiter.utility.dtypes"}


class _ServedModule(types.ModuleType):
    """A module with the names of `SERVED`."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"AITER's names that tunedgemm serves: {', '.join(sorted(SERVED[name])) or 'those of its modules'}.")
        self.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=True)
        self.__file__ = __file__  # the error of a failed import shows it
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        target = SERVED[self.__name__].get(name)
        if target is None:
            raise AttributeError(f"{self.__name__}.{name}: tunedgemm, which serves {self.__name__!r} here, has no counterpart")
        value = getattr(importlib.import_module(target[0]), target[1])
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *SERVED[self.__name__]})


#: Modules that `install` replaced; None before `install`.
_before: dict[str, types.ModuleType] | None = None


def install(*, force: bool = False) -> None:
    """Serve ``import aiter`` and its GEMM modules in this process; a second call changes nothing.

    Args:
        force: hide an installed AITER, which other code of the process may need; `uninstall`
            restores it.

    Raises:
        UserError: AITER is installed, and *force* is not given.
    """
    global _before
    if _before is not None:
        return
    if not force and (NAME in sys.modules or importlib.util.find_spec(NAME) is not None):
        raise UserError("AITER is installed, and would be hidden; import from tunedgemm instead, or call install(force=True)")
    _before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == NAME}
    modules = {name: _ServedModule(name) for name in SERVED}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    for alias, name in _ALIASES.items():
        setattr(modules[NAME], alias, modules[name])
    sys.modules.update(modules)


def uninstall() -> None:
    """Undo `install`; names that were imported in between keep working."""
    global _before
    if _before is None:
        return
    for name in list(sys.modules):
        if name.partition(".")[0] == NAME:
            del sys.modules[name]
    sys.modules.update(_before)
    _before = None


def _declare_shuffled(weight: torch.Tensor) -> torch.Tensor:
    """Declare a plain weight as shuffled by (16, 16), as AITER's functions for shuffled weights read it."""
    from tunedgemm.ops.formats.shuffle import ShuffledWeight, as_shuffled

    return weight if isinstance(weight, ShuffledWeight) else as_shuffled(weight, (16, 16))


def gemm_a8w8_bpreshuffle(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """Call `tunedgemm.gemm_a8w8_bpreshuffle`; a plain WQ holds shuffled bytes, as in AITER."""
    import tunedgemm

    return tunedgemm.gemm_a8w8_bpreshuffle(XQ, _declare_shuffled(WQ), x_scale, w_scale, *rest, **named)  # type: ignore[no-any-return]


def gemm_a8w8_blockscale_bpreshuffle(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """Call `tunedgemm.gemm_a8w8_blockscale_bpreshuffle`; a plain WQ holds shuffled bytes, as in AITER."""
    import tunedgemm

    return tunedgemm.gemm_a8w8_blockscale_bpreshuffle(XQ, _declare_shuffled(WQ), x_scale, w_scale, *rest, **named)  # type: ignore[no-any-return]


def triton_gemm_a16w16(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Mapping[str, Any] | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Compute ``gemm_a16w16`` of ``aiter.ops.triton``: ``x[..., K] @ w[N, K].T (+ bias)``.

    Args:
        dtype: dtype of the output; None for bf16, AITER's default.
        config: accepted and ignored, because the table decides.
        y, activation: must be None.

    Raises:
        OperandError: the operands do not fit each other, or y or an activation is given.
    """
    import torch

    import tunedgemm
    from tunedgemm.errors import OperandError

    del config
    for argument, value in (("y", y), ("activation", activation)):
        if value is not None:
            raise OperandError(f"gemm_a16w16: {argument} is not supported; the output is a new tensor, without an activation")
    return tunedgemm.gemm_a16w16(x, w, bias, dtype or torch.bfloat16)  # type: ignore[no-any-return]


def get_torch_quant(qType: Any) -> Callable[..., Quantised]:
    """Return the torch function of a kind, with AITER's arguments; otherwise `get_quant`'s."""
    import tunedgemm

    functions: dict[str, Callable[..., Quantised]] = {"per_Tensor": tunedgemm.per_tensor_quant, "per_Token": tunedgemm.pertoken_quant}
    function: Callable[..., Quantised] = functions.get(_kind(qType)) or get_quant(qType)
    return function


def get_quant(qType: Any) -> Callable[..., Quantised]:
    """Return a kind's quantising function, with the arguments of AITER's ``get_hip_quant``.

    Args:
        qType: a member of `tunedgemm.QuantType`, or of an enum with the same names.

    Returns:
        ``f(x, scale=None, quant_dtype=int8, ...) -> (q, scale)``; for ``No`` x itself and None.

    Raises:
        UserError: the kind is unknown.
    """
    try:
        return _FUNCTIONS[_kind(qType)]
    except KeyError:
        raise UserError(f"QuantType: unknown kind (got {qType!r}); known: {', '.join(_FUNCTIONS)}") from None


def _kind(kind: Any) -> str:
    """Return the name of a member of QuantType, or of another library's enum of the same names."""
    return str(getattr(kind, "name", kind))


def _unchanged(x: torch.Tensor, *_rest: Any, **_named: Any) -> Quantised:
    return x, None


def _per_row(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    quant_dtype: torch.dtype | None = None,
    *,
    function: str,
    **_rows: Any,
) -> Quantised:
    """Quantise all rows, with one scale a row or one in all; AITER's numbers of valid rows are ignored."""
    import torch

    import tunedgemm

    quantised: Quantised = getattr(tunedgemm, function)(x, scale, quant_dtype=quant_dtype or torch.int8)
    return quantised


def _per_1x128(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    quant_dtype: torch.dtype | None = None,
    group_size: int = 128,
    transpose_scale: bool = False,
    **_rows: Any,
) -> Quantised:
    """Quantise with one scale for 128 elements of a row, which *transpose_scale* transposes."""
    import torch

    import tunedgemm
    from tunedgemm.errors import OperandError

    if scale is not None or group_size != 128:
        raise OperandError(f"per_1x128: computes one scale for 128 values (got group_size {group_size} and scale {scale}); omit both")
    q, scales = tunedgemm.per_1x128_quant(x, quant_dtype or torch.int8, "m_major" if transpose_scale else "row")
    return q, tunedgemm.transposed_scale(scales) if transpose_scale else scales


def _per_1x32(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    quant_dtype: torch.dtype | None = None,
    shuffle: bool = False,
    **_rows: Any,
) -> Quantised:
    """Quantise to mxfp4; raises OperandError for another dtype, as `tunedgemm.per_1x32_f4_quant` does."""
    import tunedgemm
    from tunedgemm.ops.formats.mxfp4 import FP4

    quantised: Quantised = tunedgemm.per_1x32_f4_quant(x, scale, FP4 if quant_dtype is None else quant_dtype, shuffle)
    return quantised


_FUNCTIONS: Mapping[str, Callable[..., Quantised]] = {
    "No": _unchanged,
    "per_Tensor": functools.partial(_per_row, function="per_tensor_quant"),
    "per_Token": functools.partial(_per_row, function="pertoken_quant"),
    "per_1x128": _per_1x128,
    "per_1x32": _per_1x32,
}


def __getattr__(name: str) -> Any:
    """Return ``fp8`` of this device's matrix cores: e4m3fnuz on MI300 (gfx940 to gfx942), else e4m3fn."""
    if name != "fp8":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    from tunedgemm.device import current_device

    return torch.float8_e4m3fnuz if current_device().gfx.startswith("gfx94") else torch.float8_e4m3fn
