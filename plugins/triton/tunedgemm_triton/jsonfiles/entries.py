"""Map parameters of a JSON file, in AITER's names, to kernels and back.

A plain entry (``BLOCK_SIZE_M`` ... ``kpack``) is a `Gemm`, for the ops of mxfp4 an `Mx`, for fmoe a
`Moe`. Names of our own select the other families and what AITER's kernels do not have: ``kernel``,
``SWAP``, ``UNROLL``, ``WARP_SPECIALIZE``, ``DECODE``, ``ALONE``, and the suffix ``_2`` for fmoe's
second stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution, UserError
from tunedgemm.tools.launching import ARCHITECTURES

from tunedgemm_triton import names
from tunedgemm_triton.families import family_of
from tunedgemm_triton.limits import OPS
from tunedgemm_triton.moe.names import OP as MOE_OP
from tunedgemm_triton.moe.names import Moe, Tile
from tunedgemm_triton.names import Gemm
from tunedgemm_triton.packed.names import Mx
from tunedgemm_triton.packed.resources import decodes
from tunedgemm_triton.resources import ceil_div, has_idle_part, packs, step_of

Entry = Mapping[str, Any]

KERNEL, SPLIT = "kernel", "NUM_KSPLIT"

#: Field of a kernel -> the parameter's name, in the order of AITER's files.
NAMES = {
    "block_m": "BLOCK_SIZE_M", "rows": "BLOCK_SIZE_M", "block_n": "BLOCK_SIZE_N", "block_k": "BLOCK_SIZE_K", "group_m": "GROUP_SIZE_M",
    "unroll": "UNROLL", "warps": "num_warps", "stages": "num_stages", "waves": "waves_per_eu", "nonkdim": "matrix_instr_nonkdim",
    "stream": "cache_modifier", "kpack": "kpack", "swap": "SWAP", "specialize": "WARP_SPECIALIZE", "decode": "DECODE", "alone": "ALONE",
}  # fmt: skip
#: Values of parameters that an entry leaves out.
DEFAULTS: dict[str, Any] = {
    "GROUP_SIZE_M": 1, "UNROLL": 1, "num_warps": 4, "num_stages": 2, SPLIT: 1, "waves_per_eu": 0, "matrix_instr_nonkdim": 0,
    "cache_modifier": None, "kpack": 1, "SWAP": False, "WARP_SPECIALIZE": False, "DECODE": False, "ALONE": False,
}  # fmt: skip
#: Options of AMD's compiler; a plain entry for an AMD device has them all, as AITER's kernels want.
AMD_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "cache_modifier", "kpack")
#: Parameters of AITER's files that have no effect here -> the reason.
DERIVED = {
    "SPLITK_BLOCK_SIZE": "K and NUM_KSPLIT determine it",
    "GROUP_K": "the op determines how many elements of K share a scale, 128",
    "GROUP_N": "the op determines how many rows of the weight share a scale, 128",
}
_CACHE = (None, "", ".cg")

KINDS: dict[str, Any] = {kind.family: kind for kind in (*names.KINDS, Mx, Moe)}


@attrs.frozen
class ParsedEntry:
    """Kernel of an entry.

    Attributes:
        kernel: the kernel's parameters.
        split_k: parts of K, 1 for none.
        unused: parameters without effect, each with the reason.
    """

    kernel: Any
    split_k: int
    unused: tuple[str, ...] = ()


def families_of(op: str) -> tuple[str, ...]:
    """Return the kernel families that serve an op."""
    return OPS[op].families if op in OPS else ("moe",) if op == MOE_OP else ("mx",)


def default_family(op: str) -> str:
    """Return the kernel family of an entry that names none."""
    return "gemm" if op in OPS else families_of(op)[0]


def fields_of(kind: Any) -> dict[str, tuple[str, ...]]:
    """Return the parameters of a class of kernels: name -> path of the attribute."""
    paths: dict[str, tuple[str, ...]] = {}
    for field in attrs.fields(kind):
        if kind is Moe and field.name in ("first", "second"):
            paths |= {NAMES[part.name] + "_2" * (field.name == "second"): (field.name, part.name) for part in attrs.fields(Tile)}
        else:
            paths[NAMES[field.name]] = (field.name,)
    return paths


def entry_of(solution: Solution, shape: Shape, gfx: str) -> dict[str, Any]:
    """Return the entry of a solution.

    Raises:
        PluginError: no kernel of this revision has the solution's name.
    """
    kernel = family_of(shape.op).parse_name(solution.kernel_name)
    plain, values = kernel.family == default_family(shape.op), {}
    for name, path in fields_of(type(kernel)).items():
        value: Any = kernel
        for part in path:
            value = getattr(value, part)
        values[name] = (".cg" if value else None) if name == "cache_modifier" else value
    values[SPLIT] = max(solution.split_k, 1)
    order = [name for name in dict.fromkeys([*_ORDER, *values]) if name in values]
    stated = set(_ALWAYS)
    if isinstance(kernel, Gemm) and gfx.startswith("gfx"):
        stated |= {*AMD_OPTIONS}
    elif isinstance(kernel, Mx):
        stated.add("DECODE")
    entry = {name: values[name] for name in order if name in stated or values[name] != _default(name)}
    return entry if plain else {KERNEL: kernel.family, **entry}


_ALWAYS = {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", SPLIT}
_ORDER = [name for name in dict.fromkeys(NAMES.values()) if name != "kpack"]
_ORDER = [*_ORDER[: _ORDER.index("cache_modifier") + 1], SPLIT, "kpack", *_ORDER[_ORDER.index("cache_modifier") + 1 :]]


def _default(name: str) -> Any:
    return DEFAULTS.get(name.removesuffix("_2"))


def parse_entry(entry: Entry, op: str) -> ParsedEntry:
    """Return the kernel of an entry of a file for an op.

    Raises:
        UserError: a parameter is missing, unknown, or has a value that the kernel does not take.
    """
    if not isinstance(entry, Mapping):
        raise UserError(f"an entry must be an object of parameters (got {str(entry)[:60]!r})")
    family = entry.get(KERNEL, default_family(op))
    if family not in families_of(op):
        raise UserError(f"{KERNEL} must be one of {', '.join(families_of(op))} for {op} (got {_shown(family)})")
    kind = KINDS[family]
    fields, unused = fields_of(kind), []
    for name in entry:
        if name in DERIVED:
            unused.append(_check_derived(name, entry[name]))
        elif name in AMD_OPTIONS and name not in fields:
            unused.append(f"{name} has no effect: {family} kernels have no such option")
        elif name not in fields and name not in (KERNEL, SPLIT):
            raise UserError(f"{family} kernels have no parameter {_shown(name)}; known: {', '.join([*fields, SPLIT])}")
    values: dict[tuple[str, ...], Any] = {}
    for name, path in fields.items():
        value, note = _value(name, entry, kind)
        values[path] = value
        unused += [note] if note else []
    split_k = _whole(SPLIT, entry.get(SPLIT, 1))
    if split_k < 1:
        raise UserError(f"{SPLIT} must be at least 1 (got {split_k})")
    return ParsedEntry(_build_kernel(kind, values), split_k, tuple(unused))


def _check_derived(name: str, value: Any) -> str:
    if name.startswith("GROUP_") and value != 128:
        raise UserError(f"{name} must be 128, as in every op with block scales (got {_shown(value)})")
    return f"{name} has no effect: {DERIVED[name]}"


def _value(name: str, entry: Entry, kind: Any) -> tuple[Any, str]:
    """Return a field's value, and a note on it or an empty text."""
    value = entry.get(name, _default(name))
    if name not in entry and _default(name) is None and name != "cache_modifier":
        raise UserError(f"{name} is missing")
    if name == "cache_modifier":
        if value not in _CACHE:
            raise UserError(f"cache_modifier must be null, '' or '.cg' (got {_shown(value)})")
        return value == ".cg", ""
    if isinstance(DEFAULTS.get(name), bool):
        if not isinstance(value, bool):
            raise UserError(f"{name} must be true or false (got {_shown(value)})")
        return value, ""
    number = _whole(name, value)
    if kind is Gemm and name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N") and number in (1, 2, 4, 8):
        return 16, f"{name}={number} runs as 16, the smallest side of a matrix instruction here"
    return number, ""


def _shown(value: Any) -> str:
    """Return the beginning of a value of a file, which may have any length."""
    return repr(value)[:60]


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} must be a whole number (got {_shown(value)})")
    return value


def _build_kernel(kind: Any, values: dict[tuple[str, ...], Any]) -> Any:
    try:
        if kind is Moe:
            tiles = {stage: Tile(**{path[1]: value for path, value in values.items() if path[0] == stage}) for stage in ("first", "second")}
            return Moe(**{path[0]: value for path, value in values.items() if len(path) == 1}, **tiles)
        return kind(**{path[0]: value for path, value in values.items()})
    except PluginError as error:
        message = str(error)
        for field, name in NAMES.items():
            message = message.replace(f": {field} ", f": {name} ")
        raise UserError(message) from None


def solution_of(entry: Entry, shape: Shape, device: Device) -> tuple[Solution | None, tuple[str, ...]]:
    """Return the solution of an entry for a shape on a device, and notes on parameters without
    effect.

    The solution is None where the entry cannot serve; the last note then says why. Options of AMD's
    compiler are dropped where the architecture does not have them. A split with an idle part
    becomes the one that AITER makes of it; an impossible split is dropped.

    Raises:
        UserError: see `parse_entry`.
    """
    parsed = parse_entry(entry, shape.op)
    if device.gfx not in ARCHITECTURES:
        return None, (*parsed.unused, f"unknown architecture {device.gfx}")
    family = family_of(shape.op)
    kernel, notes = _without_foreign_options(parsed.kernel, entry, shape, device)
    split_k, note = _adjust_split(kernel, parsed.split_k, shape)
    reason = family.unfit(kernel, split_k, shape, device)
    if reason and split_k > 1:
        note = f"NUM_KSPLIT={parsed.split_k} is dropped: {reason}"
        split_k, reason = 1, family.unfit(kernel, 1, shape, device)
    notes = [*parsed.unused, *notes, *([note] if note else [])]
    if reason:
        return None, (*notes, reason)
    return family.solution_of(kernel, split_k, shape, device), tuple(notes)


def _without_foreign_options(kernel: Any, entry: Entry, shape: Shape, device: Device) -> tuple[Any, list[str]]:
    """Return the kernel without options that the architecture does not have, and a note on each."""
    if isinstance(kernel, Mx) and "DECODE" not in entry:
        return attrs.evolve(kernel, decode=decodes(device.gfx, shape.dtype)[0]), []
    if not isinstance(kernel, Gemm):
        return kernel, []
    amd = device.kind == "amd"
    options = {
        "nonkdim": 0 if ARCHITECTURES[device.gfx].matrix != "mfma" else kernel.nonkdim,
        "kpack": kernel.kpack if packs(device.gfx) else 1,
        "waves": kernel.waves if amd else 0,
        "stream": kernel.stream and amd,
    }
    dropped = [NAMES[field] for field, value in options.items() if value != getattr(kernel, field)]
    return attrs.evolve(kernel, **options), [f"{name} has no effect on {device.gfx}" for name in dropped]


def _adjust_split(kernel: Any, split_k: int, shape: Shape) -> tuple[int, str]:
    """Return parts of K of which none is idle, as AITER's ``compute_splitk_params``, and a note
    where they differ.
    """
    step = kernel.first.block_k if isinstance(kernel, Moe) else step_of(kernel)
    depth = shape.n if isinstance(kernel, Moe) else shape.k
    steps = ceil_div(depth, step)
    if split_k == 1 or not has_idle_part(split_k, steps):
        return split_k, ""
    parts = split_k
    while parts > 1 and step > ceil_div(depth, parts):
        parts //= 2
    parts = ceil_div(steps, ceil_div(steps, parts))
    return parts, f"NUM_KSPLIT={split_k} becomes {parts}: K={depth} has {steps} steps of {step}"
