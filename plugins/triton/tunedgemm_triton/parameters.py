"""Parameters: what a JSON file says of a kernel, in AITER's names, and the kernel that it means here.

A plain entry (``BLOCK_SIZE_M`` ... ``kpack``) is a `Gemm`, of the ops of mxfp4 an `Mx`, of fmoe a `Moe`. The other families, and what
AITER's kernels do not have, are said by names of ours: ``kernel``, ``SWAP``, ``UNROLL``, ``WARP_SPECIALIZE``, ``DECODE``, ``ALONE``, and
``_2`` behind the names of fmoe's second stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution, UserError

from tunedgemm_triton import fit, moe, names, solutions
from tunedgemm_triton.fit import ceil_div, packs, step_of
from tunedgemm_triton.limits import ARCHITECTURES, OPS
from tunedgemm_triton.moe import Moe, Tile
from tunedgemm_triton.mx import Mx, decodes
from tunedgemm_triton.names import Gemm
from tunedgemm_triton.planned import PLANNED

Entry = Mapping[str, Any]

KERNEL, SPLIT = "kernel", "NUM_KSPLIT"

#: Field of a kernel -> the parameter's name, in the order of AITER's files.
NAMES = {
    "block_m": "BLOCK_SIZE_M", "rows": "BLOCK_SIZE_M", "block_n": "BLOCK_SIZE_N", "block_k": "BLOCK_SIZE_K", "group_m": "GROUP_SIZE_M",
    "unroll": "UNROLL", "warps": "num_warps", "stages": "num_stages", "waves": "waves_per_eu", "nonkdim": "matrix_instr_nonkdim",
    "stream": "cache_modifier", "kpack": "kpack", "swap": "SWAP", "specialize": "WARP_SPECIALIZE", "decode": "DECODE", "alone": "ALONE",
}  # fmt: skip
#: What an entry that does not say so means.
DEFAULTS: dict[str, Any] = {
    "GROUP_SIZE_M": 1, "UNROLL": 1, "num_warps": 4, "num_stages": 2, SPLIT: 1, "waves_per_eu": 0, "matrix_instr_nonkdim": 0,
    "cache_modifier": None, "kpack": 1, "SWAP": False, "WARP_SPECIALIZE": False, "DECODE": False, "ALONE": False,
}  # fmt: skip
#: Options of AMD's compiler; a plain entry for an AMD device has them all, as AITER's kernels want.
AMDS = ("waves_per_eu", "matrix_instr_nonkdim", "cache_modifier", "kpack")
#: What AITER's files say and no kernel here has to be told, and why.
FOLLOWS = {
    "SPLITK_BLOCK_SIZE": "it follows from K and NUM_KSPLIT",
    "GROUP_K": "the op says how many elements of K share a scale, 128",
    "GROUP_N": "the op says how many rows of the weight share a scale, 128",
}
_CACHE = (None, "", ".cg")

KINDS: dict[str, Any] = {**{word: family.kind for word, family in names.FAMILIES.items()}, "mx": Mx, "moe": Moe}


@attrs.frozen
class Parsed:
    """An entry as a kernel.

    Attributes:
        kernel: its parameters.
        split_k: parts of K, 1 for none.
        unused: what of the entry has no effect, each with the reason.
    """

    kernel: Any
    split_k: int
    unused: tuple[str, ...] = ()


def families_of(op: str) -> tuple[str, ...]:
    """The families that serve an op."""
    return OPS[op].families if op in OPS else ("moe",) if op == moe.OP else ("mx",)


def family_of(op: str) -> str:
    """The family of an entry that names none."""
    return "gemm" if op in OPS else families_of(op)[0]


def fields_of(kind: Any) -> dict[str, tuple[str, ...]]:
    """The parameters of a kind of kernel: name -> where it lies."""
    found: dict[str, tuple[str, ...]] = {}
    for field in attrs.fields(kind):
        if kind is Moe and field.name in ("first", "second"):
            found |= {NAMES[part.name] + "_2" * (field.name == "second"): (field.name, part.name) for part in attrs.fields(Tile)}
        else:
            found[NAMES[field.name]] = (field.name,)
    return found


def entry_of(solution: Solution, shape: Shape, gfx: str) -> dict[str, Any]:
    """The entry that means a solution.

    Raises:
        PluginError: no kernel of this revision has its name.
    """
    kernel = kernel_of(solution.kernel_name, shape.op)
    plain, found = kernel.family == family_of(shape.op), {}
    for name, path in fields_of(type(kernel)).items():
        value: Any = kernel
        for part in path:
            value = getattr(value, part)
        found[name] = (".cg" if value else None) if name == "cache_modifier" else value
    found[SPLIT] = max(solution.split_k, 1)
    order = [name for name in dict.fromkeys([*_ORDER, *found]) if name in found]
    said = set(_ALWAYS)
    if isinstance(kernel, Gemm) and gfx.startswith("gfx"):
        said |= {*AMDS}
    elif isinstance(kernel, Mx):
        said.add("DECODE")
    entry = {name: found[name] for name in order if name in said or found[name] != _default(name)}
    return entry if plain else {KERNEL: kernel.family, **entry}


_ALWAYS = {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", SPLIT}
_ORDER = [name for name in dict.fromkeys(NAMES.values()) if name != "kpack"]
_ORDER = [*_ORDER[: _ORDER.index("cache_modifier") + 1], SPLIT, "kpack", *_ORDER[_ORDER.index("cache_modifier") + 1 :]]


def _default(name: str) -> Any:
    return DEFAULTS.get(name.removesuffix("_2"))


def kernel_of(name: str, op: str) -> Any:
    """The parameters behind a kernel's name.

    Raises:
        PluginError: no kernel of this revision has that name.
    """
    return PLANNED[op].kernel_of(name) if op in PLANNED else names.kernel_of(name)


def parsed(entry: Entry, op: str) -> Parsed:
    """The kernel that an entry of a file for an op means.

    Raises:
        UserError: it lacks a parameter, has one that the kernel does not know, or a value that it does not take.
    """
    if not isinstance(entry, Mapping):
        raise UserError(f"must be an object of parameters (got {str(entry)[:60]!r})")
    family = entry.get(KERNEL, family_of(op))
    if family not in families_of(op):
        raise UserError(f"{KERNEL} must be one of {', '.join(families_of(op))} for {op} (got {family!r})")
    kind = KINDS[family]
    fields, unused = fields_of(kind), []
    for name in entry:
        if name in FOLLOWS:
            unused.append(_follows(name, entry[name]))
        elif name in AMDS and name not in fields:
            unused.append(f"{name} has no effect: kernels of the family {family} have no such option")
        elif name not in fields and name not in (KERNEL, SPLIT):
            raise UserError(f"no kernel of the family {family} has a parameter {name!r}; known: {', '.join([*fields, SPLIT])}")
    values: dict[tuple[str, ...], Any] = {}
    for name, path in fields.items():
        value, note = _value(name, entry, kind)
        values[path] = value
        unused += [note] if note else []
    split_k = _whole(SPLIT, entry.get(SPLIT, 1))
    if split_k < 1:
        raise UserError(f"{SPLIT} must be at least 1 (got {split_k})")
    return Parsed(_built(kind, values), split_k, tuple(unused))


def _follows(name: str, value: Any) -> str:
    if name.startswith("GROUP_") and value != 128:
        raise UserError(f"{name} must be 128 here, as in every op with scales of blocks (got {value!r})")
    return f"{name} has no effect: {FOLLOWS[name]}"


def _value(name: str, entry: Entry, kind: Any) -> tuple[Any, str]:
    """A field's value, and what is to be said of it."""
    value = entry.get(name, _default(name))
    if name not in entry and _default(name) is None and name != "cache_modifier":
        raise UserError(f"lacks {name}")
    if name == "cache_modifier":
        if value not in _CACHE:
            raise UserError(f"cache_modifier must be null, '' or '.cg' (got {value!r})")
        return value == ".cg", ""
    if isinstance(DEFAULTS.get(name), bool):
        if not isinstance(value, bool):
            raise UserError(f"{name} must be true or false (got {value!r})")
        return value, ""
    number = _whole(name, value)
    if kind is Gemm and name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N") and number in (1, 2, 4, 8):
        return 16, f"{name}={number} runs as 16, the least that a matrix instruction has here"
    return number, ""


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} must be a whole number (got {value!r})")
    return value


def _built(kind: Any, values: dict[tuple[str, ...], Any]) -> Any:
    try:
        if kind is Moe:
            tiles = {stage: Tile(**{path[1]: value for path, value in values.items() if path[0] == stage}) for stage in ("first", "second")}
            return Moe(**{path[0]: value for path, value in values.items() if len(path) == 1}, **tiles)
        return kind(**{path[0]: value for path, value in values.items()})
    except PluginError as error:
        told = str(error)
        for field, name in NAMES.items():
            told = told.replace(f": {field} ", f": {name} ")
        raise UserError(told) from None


def solution_of(entry: Entry, shape: Shape, device: Device) -> tuple[Solution | None, tuple[str, ...]]:
    """The solution that an entry means for a shape on a device, None where it cannot serve; and what of it has no effect, or why not.

    Options of AMD's compiler are left out where the architecture does not have them. A split that would leave a program without work
    becomes the one that AITER makes of it; one that is not possible at all is left out.

    Raises:
        UserError: see `parsed`.
    """
    found = parsed(entry, shape.op)
    if device.gfx not in ARCHITECTURES:
        return None, (*found.unused, f"no limits are known for {device.gfx}")
    kernel, notes = _on_device(found.kernel, entry, shape, device)
    refusal = PLANNED[shape.op].refusal if shape.op in PLANNED else fit.refusal
    split_k, told = _split(kernel, found.split_k, shape)
    reason = refusal(kernel, split_k, shape, device)
    if reason and split_k > 1:
        told = f"NUM_KSPLIT={found.split_k} is left out: {reason}"
        split_k, reason = 1, refusal(kernel, 1, shape, device)
    said = (*found.unused, *notes, *([told] if told else []))
    if reason:
        return None, (*said, reason)
    invariant = kernel.family not in ("streamk", "moe")
    return Solution(solutions.LIBTYPE, kernel.name, split_k if split_k > 1 else 0, batch_invariant=invariant), said


def _on_device(kernel: Any, entry: Entry, shape: Shape, device: Device) -> tuple[Any, list[str]]:
    """The kernel without options that the architecture does not have, and what was left out."""
    if isinstance(kernel, Mx | Moe) and "DECODE" not in entry and shape.op != moe.OP:
        return attrs.evolve(kernel, decode=decodes(device.gfx, shape.dtype)[0]), []
    if not isinstance(kernel, Gemm):
        return kernel, []
    amd = device.kind == "amd"
    without = {
        "nonkdim": 0 if ARCHITECTURES[device.gfx].matrix != "mfma" else kernel.nonkdim,
        "kpack": kernel.kpack if packs(device.gfx) else 1,
        "waves": kernel.waves if amd else 0,
        "stream": kernel.stream and amd,
    }
    left = [NAMES[field] for field, value in without.items() if value != getattr(kernel, field)]
    return attrs.evolve(kernel, **without), [f"{name} has no effect on {device.gfx}" for name in left]


def _split(kernel: Any, split_k: int, shape: Shape) -> tuple[int, str]:
    """Parts of K of which none is empty (AITER, ``compute_splitk_params``), and a note where they are others than asked for."""
    step = kernel.first.block_k if isinstance(kernel, Moe) else step_of(kernel)
    depth = shape.n if isinstance(kernel, Moe) else shape.k
    steps = ceil_div(depth, step)
    if split_k == 1 or (split_k - 1) * ceil_div(steps, split_k) < steps:
        return split_k, ""
    parts = split_k
    while parts > 1 and step > ceil_div(depth, parts):
        parts //= 2
    parts = ceil_div(steps, ceil_div(steps, parts))
    return parts, f"NUM_KSPLIT={split_k} becomes {parts}: K={depth} has {steps} steps of {step}"
