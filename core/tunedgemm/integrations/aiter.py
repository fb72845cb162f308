"""AITER's modules by AITER's names, where AITER is not installed: call sites that import from ``aiter`` run unchanged.

`install` puts modules into `sys.modules`; what their names stand for is looked up in the menu of
`tunedgemm` at the first use. What AITER has and this project has not is an AttributeError, or an
ImportError of the import statement, that names what is missing.
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


def _of(home: str, *names: str, **others: str) -> Mapping[str, tuple[str, str]]:
    """Name here -> (module, name there); *others* are names of another spelling there."""
    return {**{name: (home, name) for name in names}, **{name: (home, there) for name, there in others.items()}}


_A8W8 = {
    **_of("tunedgemm", "gemm_a8w8", "gemm_a8w8_CK", "gemm_a8w8_blockscale"),
    **_of(_HERE, "gemm_a8w8_bpreshuffle", "gemm_a8w8_blockscale_bpreshuffle", gemm_a8w8_ASM="gemm_a8w8_bpreshuffle"),
}
_BATCHED = {bits: _of("tunedgemm", f"batched_gemm_{bits}_CK") for bits in ("bf16", "a8w8")}
_TUNED = _of("tunedgemm", "TunedGemm", "gemm_a16w16", "tgemm")
_A4W4 = _of("tunedgemm", "gemm_a4w4")
_ENUMS = _of("tunedgemm", "ActivationType", "QuantType")
_SHUFFLE = _of("tunedgemm", "shuffle_scale", "shuffle_weight")
_QUANT = {
    **_of("tunedgemm", "per_1x32_f4_quant", "per_tensor_quant", "pertoken_quant"),
    **_of(_HERE, "get_torch_quant", get_hip_quant="get_quant", get_triton_quant="get_quant"),
}
_DTYPES = {
    **_of("torch", bf16="bfloat16", fp16="float16", fp32="float32", fp4x2="float4_e2m1fn_x2", fp8_e8m0="float8_e8m0fnu"),
    **_of("torch", **{f"{sign}{bits}": f"{word}{bits}" for sign, word in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)}),
}
#: What is served: module -> name -> (module, name there).
SERVED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "aiter": {**_TUNED, **_A8W8, **_A4W4, **_BATCHED["bf16"], **_BATCHED["a8w8"], **_ENUMS, **_SHUFFLE, **_QUANT},
    "aiter.tuned_gemm": _TUNED,
    "aiter.fused_moe": _of("tunedgemm", "fused_moe"),
    "aiter.ops": {},
    "aiter.ops.batched_gemm_op_a8w8": _BATCHED["a8w8"],
    "aiter.ops.batched_gemm_op_bf16": _BATCHED["bf16"],
    "aiter.ops.enum": _ENUMS,
    "aiter.ops.gemm_op_a4w4": _A4W4,
    "aiter.ops.gemm_op_a8w8": _A8W8,
    "aiter.ops.quant": _QUANT,
    "aiter.ops.shuffle": _SHUFFLE,
    "aiter.ops.triton": {},
    "aiter.ops.triton.gemm_a16w16": _of(_HERE, gemm_a16w16="triton_gemm_a16w16"),
    "aiter.utility": {},
    "aiter.utility.dtypes": {**_DTYPES, **_of(_HERE, "fp8")},
    "aiter.utility.fp4_utils": _of("tunedgemm", "shuffle_scale", e8m0_shuffle="shuffle_scale"),
}
#: Modules that AITER's own namespace has under a name that is not theirs.
_ALIASES = {"dtypes": "aiter.utility.dtypes"}


class _Served(types.ModuleType):
    """A module whose names are those of `SERVED`."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"AITER's names that tunedgemm serves: {', '.join(sorted(SERVED[name])) or 'those of its modules'}.")
        self.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=True)
        self.__file__ = __file__  # an import statement that fails shows it
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        where = SERVED[self.__name__].get(name)
        if where is None:
            raise AttributeError(f"tunedgemm serves {self.__name__!r} here, and has nothing for AITER's {name!r}")
        value = getattr(importlib.import_module(where[0]), where[1])
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *SERVED[self.__name__]})


#: What `install` put aside, by module; None while nothing is installed.
_before: dict[str, types.ModuleType] | None = None


def install(*, force: bool = False) -> None:
    """Serve ``import aiter`` and its GEMM modules from here on, in this process; a second call changes nothing.

    Args:
        force: also where AITER itself is installed, which other code of the process may need.
            `uninstall` gives it back.

    Raises:
        UserError: AITER is installed, and *force* is not given.
    """
    global _before
    if _before is not None:
        return
    if not force and (NAME in sys.modules or importlib.util.find_spec(NAME) is not None):
        raise UserError(
            "AITER is installed here, and its own functions would be hidden; import from tunedgemm instead, or install(force=True)"
        )
    _before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == NAME}
    modules = {name: _Served(name) for name in SERVED}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    for alias, name in _ALIASES.items():
        setattr(modules[NAME], alias, modules[name])
    sys.modules.update(modules)


def uninstall() -> None:
    """Undo `install`; names that were imported meanwhile go on working."""
    global _before
    if _before is None:
        return
    for name in list(sys.modules):
        if name.partition(".")[0] == NAME:
            del sys.modules[name]
    sys.modules.update(_before)
    _before = None


def _declared(weight: torch.Tensor) -> torch.Tensor:
    """A weight that AITER's functions for shuffled weights were given: they take plain tensors, whose bytes are of (16, 16)."""
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
    """`tunedgemm.gemm_a8w8_bpreshuffle`; a plain WQ holds shuffled bytes already, which is all that AITER's function can mean."""
    import tunedgemm

    return tunedgemm.gemm_a8w8_bpreshuffle(XQ, _declared(WQ), x_scale, w_scale, *rest, **named)  # type: ignore[no-any-return]


def gemm_a8w8_blockscale_bpreshuffle(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """`tunedgemm.gemm_a8w8_blockscale_bpreshuffle`; a plain WQ holds shuffled bytes already, as above."""
    import tunedgemm

    return tunedgemm.gemm_a8w8_blockscale_bpreshuffle(XQ, _declared(WQ), x_scale, w_scale, *rest, **named)  # type: ignore[no-any-return]


def triton_gemm_a16w16(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
    config: Mapping[str, Any] | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """``gemm_a16w16`` of ``aiter.ops.triton``: ``x[..., K] @ w[N, K].T (+ bias)``.

    Args:
        dtype: of the output; None for bf16, AITER's default.
        config: accepted, the table decides.
        y, activation: only None.

    Raises:
        OperandError: the operands do not fit each other, or y or an activation is given.
    """
    import torch

    import tunedgemm
    from tunedgemm.errors import OperandError

    del config
    for argument, value in (("y", y), ("activation", activation)):
        if value is not None:
            raise OperandError(f"gemm_a16w16: {argument} is not taken; the output is a new tensor, without an activation")
    return tunedgemm.gemm_a16w16(x, w, bias, dtype or torch.bfloat16)  # type: ignore[no-any-return]


def get_torch_quant(qType: Any) -> Callable[..., Quantised]:
    """AITER's function of torch for a kind, with the arguments of that function; the answer is `get_quant`'s for the others."""
    import tunedgemm

    functions = {"per_Tensor": tunedgemm.per_tensor_quant, "per_Token": tunedgemm.pertoken_quant}
    found: Callable[..., Quantised] = functions.get(_kind(qType)) or get_quant(qType)
    return found


def get_quant(qType: Any) -> Callable[..., Quantised]:
    """The quantising function of a kind, with the arguments of AITER's ``get_hip_quant`` and ``get_triton_quant``.

    Args:
        qType: a member of `tunedgemm.QuantType`, or of an enum with the same names.

    Returns:
        ``f(x, scale=None, quant_dtype=int8, ...) -> (q, scale)``; for ``No`` x as it is and None.

    Raises:
        UserError: no such kind here.
    """
    try:
        return _FUNCTIONS[_kind(qType)]
    except KeyError:
        raise UserError(f"nothing quantises {qType!r} here; known: {', '.join(_FUNCTIONS)}") from None


def _kind(kind: Any) -> str:
    """The name of a member of QuantType or of another library's enum of the same names."""
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
    """One scale a row or one in all; AITER's numbers of valid rows are not needed, all rows are quantised."""
    import torch

    import tunedgemm

    found: Quantised = getattr(tunedgemm, function)(x, scale, quant_dtype=quant_dtype or torch.int8)
    return found


def _per_1x128(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    quant_dtype: torch.dtype | None = None,
    group_size: int = 128,
    transpose_scale: bool = False,
    **_rows: Any,
) -> Quantised:
    """One scale for 128 elements of a row; *transpose_scale* as `tunedgemm.transposed_scale` gives it."""
    import torch

    import tunedgemm
    from tunedgemm.errors import OperandError

    if scale is not None or group_size != 128:
        raise OperandError(f"per_1x128 takes its scales from the values, one for 128 of them (got group_size {group_size})")
    q, scales = tunedgemm.per_1x128_quant(x, quant_dtype or torch.int8)
    return q, tunedgemm.transposed_scale(scales) if transpose_scale else scales


def _per_1x32(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    quant_dtype: torch.dtype | None = None,
    shuffle: bool = False,
    **_rows: Any,
) -> Quantised:
    """mxfp4; raises OperandError for another dtype, as `tunedgemm.per_1x32_f4_quant` does."""
    import tunedgemm
    from tunedgemm.ops.formats.quant import FP4

    found: Quantised = tunedgemm.per_1x32_f4_quant(x, scale, FP4 if quant_dtype is None else quant_dtype, shuffle)
    return found


_FUNCTIONS: Mapping[str, Callable[..., Quantised]] = {
    "No": _unchanged,
    "per_Tensor": functools.partial(_per_row, function="per_tensor_quant"),
    "per_Token": functools.partial(_per_row, function="pertoken_quant"),
    "per_1x128": _per_1x128,
    "per_1x32": _per_1x32,
}


def __getattr__(name: str) -> Any:
    """``fp8``: that of this device's matrix cores, e4m3fnuz on MI300 (gfx940 to gfx942), e4m3fn elsewhere."""
    if name != "fp8":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    from tunedgemm.device import current_device

    return torch.float8_e4m3fnuz if current_device().gfx.startswith("gfx94") else torch.float8_e4m3fn
