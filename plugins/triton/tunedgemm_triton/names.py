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
from typing import Any, ClassVar

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.tables import KernelName

#: Raise a family's number whenever its source changes what a name means or its speed.
REVISIONS = {"gemv": 1, "gemm": 1, "tma": 1, "tma_halves": 2, "streamk": 1}


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


@attrs.frozen(cache_hash=True)
class Gemv:
    """Multiply and sum on the vector units: *rows* rows of activations by *block_n* of the weight a
    program.
    """

    family: ClassVar[str] = "gemv"
    rows: int = within(1, 4)
    block_n: int = power(1, 64)
    block_k: int = power(64, 16384)
    unroll: int = within(1, 16)
    warps: int = power(1, 32)
    stages: int = within(1, 8, 1)

    @property
    def name(self) -> str:
        """Return the text of ``kernelName``."""
        return name_of(self)


def name_of(kernel: Any) -> str:
    """Return the text of ``kernelName``."""
    return FAMILIES[kernel.family].form.write(kernel, revision=REVISIONS[function_of(kernel)])


def function_of(kernel: Any) -> str:
    """Return the name of a kernel's function: its family's, or that of two groups of specialised
    warps that share a tile, half its rows each.
    """
    return "tma_halves" if getattr(kernel, "specialize", False) and kernel.block_m > 64 else kernel.family


@attrs.frozen(cache_hash=True)
class Gemm:
    """A tile product on the matrix units; the last four are AMD's (0, 1 and False leave them to the
    compiler).
    """

    family: ClassVar[str] = "gemm"
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

    @property
    def name(self) -> str:
        """Return the text of ``kernelName``."""
        return name_of(self)


@attrs.frozen(cache_hash=True)
class Tma:
    """Persistent kernel fed by tensor descriptors."""

    family: ClassVar[str] = "tma"
    block_m: int = power(16, 256)
    block_n: int = power(16, 256)
    block_k: int = power(16, 256)
    group_m: int = within(1, 64)
    warps: int = power(1, 8)
    stages: int = within(1, 8)
    swap: bool = False
    specialize: bool = False

    @property
    def name(self) -> str:
        """Return the text of ``kernelName``."""
        return name_of(self)


@attrs.frozen(cache_hash=True)
class Streamk:
    """Tile product whose last tiles all programs share, in equal numbers of steps along K."""

    family: ClassVar[str] = "streamk"
    block_m: int = power(16, 256)
    block_n: int = power(16, 256)
    block_k: int = power(16, 256)
    group_m: int = within(1, 64)
    warps: int = power(1, 8)
    stages: int = within(1, 8)

    @property
    def name(self) -> str:
        """Return the text of ``kernelName``."""
        return name_of(self)


#: The parameters that a solution name stands for.
KernelConfig = Gemv | Gemm | Tma | Streamk

_TILE = "_r{revision}_m{block_m}n{block_n}k{block_k}_g{group_m}_w{warps}s{stages}"


@attrs.frozen
class NamePattern:
    """How one family is named.

    Attributes:
        kind: class of the parameters.
        form: of its names.
        module: file in ``kernels`` whose function has the family's name.
    """

    kind: type[KernelConfig]
    form: KernelName
    module: str


FAMILIES: dict[str, NamePattern] = {
    "gemv": NamePattern(Gemv, KernelName("gemv_r{revision}_m{rows}n{block_n}k{block_k}u{unroll}_w{warps}s{stages}", "revision"), "gemv"),
    "gemm": NamePattern(
        Gemm, KernelName(f"gemm{_TILE}[_t?swap][_i{{nonkdim}}][_p{{kpack=1}}][_e{{waves}}][_c?stream]", "revision"), "gemm"
    ),
    "tma": NamePattern(Tma, KernelName(f"tma{_TILE}[_t?swap][_ws?specialize]", "revision"), "persistent"),
    "streamk": NamePattern(Streamk, KernelName(f"streamk{_TILE}", "revision"), "streamk"),
}


@functools.lru_cache(maxsize=65536)
def parse_name(name: str) -> KernelConfig:
    """Return the parameters behind a kernel name.

    Raises:
        PluginError: no kernel of this revision has that name.
    """
    family = FAMILIES.get(name.partition("_")[0])
    fields = family.form.parse(name) if family else None
    if family is None or fields is None:
        raise PluginError(f"unknown triton kernel {name!r}; names look like {EXAMPLES}")
    revision = fields.pop("revision")
    kernel = family.kind(**fields)
    check_revision(name, revision, REVISIONS[function_of(kernel)])
    return kernel


def check_revision(name: str, revision: int, current: int) -> None:
    """Raise PluginError for a name of another revision of the source."""
    if revision != current:
        raise PluginError(f"triton kernel {name!r}: revision must be {current} (got {revision}); tune again")


EXAMPLES = ", ".join(k.name for k in (Gemv(1, 2, 1024, 4, 4), Gemm(64, 128, 64, 8, 4, 3), Tma(128, 256, 64, 8, 8, 3)))
