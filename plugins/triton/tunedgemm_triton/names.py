"""Map solution names to kernel parameters and back.

A name alone determines the program, in any process.

``gemv_r1_m1n2k1024u4_w4s1``: family, revision of the source, tile (m, n, k, unrolled chunks), warps
and stages. ``gemm_r1_m64n128k64_g8_w4s3_t``: tile, tiles of M in a group (g), and flags: ``t``
transposed product, AMD's ``i16`` instruction side, ``p2`` k-pack, ``e2`` waves a SIMD, ``c`` weight
past the caches. ``tma_r1_..._t_ws``: transposed, warps specialised.

A name has neither op nor dtype nor scales: the shape decides which program it becomes
(`plan.plan_of`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
from tunedgemm.plugin import PluginError, Solution
from tunedgemm.tools.tables import KernelName

LIBTYPE = "triton"
#: Raise a family's number whenever its source changes what a name means or its speed.
REVISIONS = {"gemv": 1, "gemm": 1, "tma": 1, "tma_halves": 2, "streamk": 1, "mx": 1, "moe": 1, "wn": 1, "wnv": 1}
TILE = "_r{revision}_m{block_m}n{block_n}k{block_k}_g{group_m}_w{warps}s{stages}"


def power(low: int, high: int) -> Any:
    """Return a field that must be a power of two in a range; it raises PluginError for another
    value.
    """

    def check(instance: Any, attribute: attrs.Attribute[int], value: int) -> None:
        if not low <= value <= high or value & (value - 1):
            raise PluginError(f"triton {instance.family}: {attribute.name} must be a power of two in {low}..{high} (got {value})")

    return attrs.field(validator=check)


def within(low: int, high: int, default: Any = attrs.NOTHING) -> Any:
    """Return a field that must be in a range; it raises PluginError for another value."""

    def check(instance: Any, attribute: attrs.Attribute[int], value: int) -> None:
        if not low <= value <= high:
            raise PluginError(f"triton {instance.family}: {attribute.name} must be in {low}..{high} (got {value})")

    return attrs.field(validator=check, default=default)


def _among(*values: int) -> Any:
    """Return a field that must be one of some numbers; the first is the default."""

    def check(instance: Any, attribute: attrs.Attribute[int], value: int) -> None:
        if value not in values:
            raise PluginError(f"triton {instance.family}: {attribute.name} must be one of {', '.join(map(str, values))} (got {value})")

    return attrs.field(validator=check, default=values[0])


class Kernel:
    """Parameters of a kernel, which its name states.

    Attributes:
        family: the first word of the name.
        form: the form of the name.
    """

    __slots__ = ()
    family: ClassVar[str]
    form: ClassVar[KernelName]

    @property
    def name(self) -> str:
        """Return the text of ``kernelName``."""
        return self.form.write(self, revision=REVISIONS[function_of(self)])

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Any:
        """Return the parameters of the fields of a name."""
        return cls(**fields)


def function_of(kernel: Any) -> str:
    """Return the name of a kernel's function: its family's, or that of two groups of specialised
    warps that share a tile, half its rows each.
    """
    return "tma_halves" if getattr(kernel, "specialize", False) and kernel.block_m > 64 else kernel.family


@attrs.frozen(cache_hash=True)
class Gemv(Kernel):
    """Multiply and sum on the vector units: *rows* rows of activations by *block_n* of the weight a
    program.
    """

    family: ClassVar[str] = "gemv"
    form: ClassVar[KernelName] = KernelName("gemv_r{revision}_m{rows}n{block_n}k{block_k}u{unroll}_w{warps}s{stages}", "revision")
    rows: int = within(1, 4)
    block_n: int = power(1, 64)
    block_k: int = power(64, 16384)
    unroll: int = within(1, 16)
    warps: int = power(1, 32)
    stages: int = within(1, 8, 1)


@attrs.frozen(cache_hash=True)
class Gemm(Kernel):
    """A tile product on the matrix units; the last four are AMD's (0, 1 and False leave them to the
    compiler).
    """

    family: ClassVar[str] = "gemm"
    form: ClassVar[KernelName] = KernelName(f"gemm{TILE}[_t?swap][_i{{nonkdim}}][_p{{kpack=1}}][_e{{waves}}][_c?stream]", "revision")
    block_m: int = power(16, 256)
    block_n: int = power(16, 256)
    block_k: int = power(16, 512)
    group_m: int = within(1, 64)
    warps: int = power(1, 16)
    stages: int = within(1, 12)
    swap: bool = False
    nonkdim: int = _among(0, 16, 32)
    kpack: int = within(1, 2, 1)
    waves: int = within(0, 8, 0)
    stream: bool = False


@attrs.frozen(cache_hash=True)
class _Tiled(Kernel):
    block_m: int = power(16, 256)
    block_n: int = power(16, 256)
    block_k: int = power(16, 256)
    group_m: int = within(1, 64)
    warps: int = power(1, 8)
    stages: int = within(1, 8)


@attrs.frozen(cache_hash=True)
class Tma(_Tiled):
    """Persistent kernel fed by tensor descriptors."""

    family: ClassVar[str] = "tma"
    form: ClassVar[KernelName] = KernelName(f"tma{TILE}[_t?swap][_ws?specialize]", "revision")
    swap: bool = False
    specialize: bool = False


@attrs.frozen(cache_hash=True)
class Streamk(_Tiled):
    """Tile product whose last tiles all programs share, in equal numbers of steps along K."""

    family: ClassVar[str] = "streamk"
    form: ClassVar[KernelName] = KernelName(f"streamk{TILE}", "revision")


#: The parameters that a solution name stands for.
KernelConfig = Gemv | Gemm | Tma | Streamk

KINDS: tuple[type[Kernel], ...] = (Gemv, Gemm, Tma, Streamk)


def parser_of(what: str, examples: str, *kinds: type[Kernel]) -> Callable[[str], Any]:
    """Return the function from a kernel name to the parameters behind it.

    It raises PluginError where no kernel of this revision has that name.

    Args:
        what: the kernels, for messages, and *examples* of their names.
    """
    by_family = {kind.family: kind for kind in kinds}

    @functools.lru_cache(maxsize=65536)
    def parse_name(name: str) -> Any:
        kind = by_family.get(name.partition("_")[0])
        fields = kind.form.parse(name) if kind else None
        if kind is None or fields is None:
            raise PluginError(f"unknown triton {what} {name!r}; names look like {examples}")
        revision, kernel = fields.pop("revision"), kind.of(fields)
        if revision != (current := REVISIONS[function_of(kernel)]):
            raise PluginError(f"triton kernel {name!r}: revision must be {current} (got {revision}); tune again")
        return kernel

    return parse_name


def solution_of(kernel: Any, split_k: int, order: str = "") -> Solution:
    """Return the solution of a kernel with its parts of K, 1 for none, and the name of its order of
    sums.
    """
    # Where streamk cuts a tile depends on the number of tiles, hence on M, as do the blocks of moe.
    invariant = kernel.family not in ("streamk", "moe")
    return Solution(LIBTYPE, kernel.name, split_k if split_k > 1 else 0, batch_invariant=invariant, sum_order=order)


_EXAMPLES = ", ".join(k.name for k in (Gemv(1, 2, 1024, 4, 4), Gemm(64, 128, 64, 8, 4, 3), Tma(128, 256, 64, 8, 8, 3)))
parse_name = parser_of("kernel", _EXAMPLES, *KINDS)
