"""Architectures: hardware properties of GPUs, as a table with the source of each line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.text.printable import warn_once

#: Families of matrix instructions; "" for none.
MATRIX = ("mma", "wgmma", "tcgen05", "mfma", "wmma", "")
#: fp8 dtypes of matrix instructions; "" for none.
FP8 = ("fp8_e4m3fn", "fp8_e4m3fnuz", "")
_FILE = Path(__file__).with_name("architectures.csv")
_NAME = re.compile(r"sm_\d+|gfx[0-9a-f]+")


def read_facts(path: Path) -> list[dict[str, str]]:
    """Read a CSV file of facts."""
    import csv

    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def flag(text: str) -> bool:
    """Parse a flag: 1 is true, 0 is false."""
    return bool(int(text))


@attrs.frozen
class Architecture:
    """Facts of one architecture.

    Attributes:
        gfx: its name, such as ``sm_90`` or ``gfx942``.
        family: its name with x for the last digit. An unknown member of a family gets the least
            that all known ones have. "" if new members may lack anything.
        matrix: the matrix instruction of ordinary tiles, one of `MATRIX`.
        fp8: the fp8 dtype that it multiplies, one of `FP8`.
        fp4: whether it multiplies block-scaled fp4 (mxfp4).
        shared_kib: most shared memory (LDS) per block in KiB.
        warp_size: threads per warp or wavefront.
        registers: most 32-bit registers per thread; on CDNA VGPRs and AGPRs together.
        file_ki: register file of a multiprocessor or compute unit, in 1024 registers.
        warps: most resident warps per multiprocessor or compute unit.
        tma: whether it has TMA and ``setmaxnreg``.
        cluster: most blocks of a portable cluster; 0 without clusters.
        tensor_columns: columns of tensor memory per multiprocessor, 128 x 32 bits each; 0 without.
        units: compute units per multiprocessor of torch: 2 on RDNA, where that is a WGP.
        cache_mib: last-level cache that torch does not report, in MiB, the largest of any product.
        source: the source of these facts.
    """

    gfx: str = attrs.field(validator=attrs.validators.matches_re(_NAME))
    family: str
    matrix: str = attrs.field(validator=attrs.validators.in_(MATRIX))
    fp8: str = attrs.field(validator=attrs.validators.in_(FP8))
    fp4: bool = attrs.field(converter=flag)
    shared_kib: int = attrs.field(converter=int)
    warp_size: int = attrs.field(converter=int)
    registers: int = attrs.field(converter=int)
    file_ki: int = attrs.field(converter=int)
    warps: int = attrs.field(converter=int)
    tma: bool = attrs.field(converter=flag)
    cluster: int = attrs.field(converter=int)
    tensor_columns: int = attrs.field(converter=int)
    units: int = attrs.field(converter=int)
    cache_mib: int = attrs.field(converter=int)
    source: str = attrs.field(validator=attrs.validators.min_len(1))

    @property
    def shared_bytes(self) -> int:
        """Return the most shared memory (LDS) per block in bytes."""
        return self.shared_kib << 10


class Architectures(Mapping[str, Architecture]):
    """Known architectures by name; an unknown member of a family has the least of its members.

    Iteration yields only known names.
    """

    def __init__(self, known: Iterable[Architecture] = ()) -> None:
        """
        Args:
            known: the architectures; those of the file if absent, which is read on first use.
        """
        self._given = {architecture.gfx: architecture for architecture in known}
        self._unknown: dict[str, Architecture] = {}

    def __getitem__(self, gfx: str) -> Architecture:
        """Return an architecture; warn once about an unknown one of a known family.

        Raises:
            KeyError: neither it nor its family is known.
        """
        found = self._known.get(gfx) or self._unknown.get(gfx)
        if found is None:
            found = self._unknown[gfx] = self._of_family(gfx)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def having(self, **facts: Any) -> tuple[str, ...]:
        """Return the known names with all of these facts; a tuple lists several valid values."""
        wanted = {name: values if isinstance(values, tuple) else (values,) for name, values in facts.items()}
        return tuple(gfx for gfx, each in self._known.items() if all(getattr(each, name) in values for name, values in wanted.items()))

    def stand_ins(self, gfx: str) -> tuple[str, ...]:
        """Return the known names that represent an architecture: its own, else its family's."""
        if gfx in self._known:
            return (gfx,)
        return self._families.get(f"{gfx[:-1]}x", ()) if _NAME.fullmatch(gfx) else ()

    @property
    def _known(self) -> dict[str, Architecture]:
        if not self._given:
            self._given = {line["gfx"]: Architecture(**line) for line in read_facts(_FILE)}
        return self._given

    @property
    def _families(self) -> dict[str, tuple[str, ...]]:
        return {each.family: self.having(family=each.family) for each in self._known.values() if each.family}

    def _of_family(self, gfx: str) -> Architecture:
        members = [self._known[name] for name in self.stand_ins(gfx)]
        if not members:
            raise KeyError(gfx)
        names = ", ".join(each.gfx for each in members)
        warn_once(f"{gfx}: unknown architecture; it has the limits that {names} share; a newer tunedgemm may know more")
        facts = {field.name: _least([getattr(each, field.name) for each in members]) for field in attrs.fields(Architecture)}
        return Architecture(**facts | {"gfx": gfx, "source": f"what {names} share"})


def _least(values: list[Any]) -> Any:
    """Return the common fact of members: the least number, or the word that all share."""
    return min(values) if not isinstance(values[0], str) else values[0] if len(set(values)) == 1 else ""


#: The table.
ARCHITECTURES = Architectures()
