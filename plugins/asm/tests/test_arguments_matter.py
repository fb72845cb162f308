"""Change one argument or field of a launch at a time; the fake must refuse it or give wrong
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import PluginError, Shape
from tunedgemm.tools.launching import Launch, LaunchPlan, launch_of
from tunedgemm_asm import launch, limits
from tunedgemm_asm.abi import ABIS, Abi, Field

#: Product, family and index of its kernel in `fake.ROWS`, splitK; all fields of each layout are in
#: use in one of them.
CASES: dict[str, list[tuple[Shape, str, int]]] = {
    "aiter-bf16gemm": [
        (Shape("a16w16", 40, 128, 256, epilogue="bias"), "bf16gemm", 3),
        (Shape("a16w16", 40, 192, 256, epilogue="bias", outdtype="fp32", layout="aiter16x16"), "bf16gemm", 2),
    ],
    "aiter-i8gemm": [
        (Shape("a8w8_bpreshuffle", 40, 256, 512, dtype="int8", outdtype="bf16", scale="row", layout="aiter16x16"), "i8gemm", 4)
    ],
    "aiter-fp8gemm-blockscale": [
        (
            Shape("a8w8_blockscale_bpreshuffle", 40, 256, 384, dtype="fp8_e4m3fn", outdtype="bf16", scale="block", layout="aiter16x16"),
            "fp8gemm_blockscale",
            3,
        )
    ],
    "aiter-f4gemm": [
        (Shape("a4w4_blockscale", 40, 144, 768, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16"), "f4gemm", 1),
        (Shape("a4w4_blockscale", 40, 528, 1280, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16"), "f4gemm", 1),
    ],
    "tunedgemm-bf16": [
        (Shape("a16w16", 40, 100, 320, epilogue="bias"), "", 2),
        (Shape("a16w16", 70, 100, 320, outdtype="fp32", epilogue="bias", bias_dtype="fp32"), "", 3),
    ],
}
#: Fields that AITER's launchers leave at zero.
IDLE = {
    "aiter-bf16gemm": {"c", "beta", "stride_out1", "stride_c1", "stride_a1", "stride_b1"},
    "aiter-f4gemm": {
        *("c", "beta", "stride_out0", "stride_out1", "stride_c1", "stride_a1", "stride_b1", "stride_a_scale1", "stride_b_scale1"),
    },
}


@pytest.fixture(autouse=True)
def gfx950(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the architecture that has kernels of all layouts."""
    monkeypatch.setenv("FAKE_GFX", "gfx950")


def name_of(fake: ModuleType, case: tuple[Shape, str, int]) -> str:
    """Return the kernel that a case launches."""
    shape, family, splits = case
    if not family:
        return "tunedgemm_bf16_32x32_pf2_splitk"
    if family == "bf16gemm":
        return str(fake.bf16(32, shuffled=shape.layout != "row", splits=splits > 1)["knl_name"])
    return str(fake.ROWS[family][1 if family == "f4gemm" else 0]["knl_name"])


def faults(asm: Any, over: ModuleType, fake: ModuleType, abi: str) -> list[str]:
    """Return the faults of a layout's products, errors included."""
    found = []
    for case in CASES[abi]:
        with over.fenced(asm, fake, over.case(case[0]).plain):
            try:
                found.append(over.fault(asm, fake, case[0], name_of(fake, case), case[2]))
            except PluginError as error:
                found.append(str(error))
    return [text for text in found if text]


def with_abi(asm: Any, abi: Any) -> Any:
    """Return the backend with another layout in place of that of its name."""
    found = asm.hooks.catalog("gfx950")
    kernels = {name: Other(loaded, abi) if loaded.abi.name == abi.name else loaded for name, loaded in found.kernels.items()}
    other = attrs.evolve(found, kernels=kernels)
    return attrs.evolve(asm, hooks=attrs.evolve(asm.hooks, catalog=lambda _: other))


class Other:
    """A wrapper with another *abi*."""

    def __init__(self, plain: Any, abi: Any) -> None:
        self.plain, self.abi = plain, abi

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


class Moved:
    """A layout with one field moved over another; addresses swap places."""

    def __init__(self, plain: Abi, name: str, by: int, used: tuple[str, ...]) -> None:
        self.plain, self.moved, self.by = plain, plain.field(name), by
        target = self.moved.offset + by
        met = [field for field in plain.fields if field.name in used and field.offset <= target < field.offset + field.bytes]
        self.places = {field.name: field.offset for field in plain.fields} | {name: target}
        if self.moved.kind == "pointer" and met and met[0].kind == "pointer":
            self.places[met[0].name] = self.moved.offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def field(self, name: str) -> Field:
        """Return the field at its new place."""
        return attrs.evolve(self.plain.field(name), offset=self.places[name])

    def pack(self, values: Any) -> bytes:
        """Pack the values, the moved field last unless it is an address."""
        buffer, field = bytearray(self.plain.pack(values)) + bytes(16), self.moved
        if field.name in values:
            value = bytes(buffer[field.offset : field.offset + field.bytes])
            buffer[field.offset : field.offset + field.bytes] = bytes(field.bytes)
            target = self.places[field.name]
            buffer[target : target + field.bytes] = value
        end = max(self.places[each.name] + each.bytes for each in self.plain.fields)
        return bytes(buffer[: max(self.plain.size, end)])


def moved(abi: Abi, asm: Any, fake: ModuleType) -> Iterator[tuple[str, Moved]]:
    """Yield the layout with each used field moved by its slot, up and down."""
    for case in CASES[abi.name]:
        told = launch.arguments_of(asm.hooks.catalog("gfx950").kernels[name_of(fake, case)].kernel, case[2], case[0])
        used = (*told.addresses, *told.values)
        for name in used:
            by = 16 if abi.name.startswith("aiter") else abi.field(name).bytes
            for direction in (by, -by):
                if name != "beta" and abi.field(name).offset + direction >= 0:
                    yield f"{name} {direction:+}", Moved(abi, name, direction, told.addresses)


every = pytest.mark.parametrize("abi", list(CASES))


@every
def test_unchanged_layouts_are_right(backends: dict[str, Any], over: ModuleType, fake: ModuleType, abi: str) -> None:
    """Unchanged layouts give right products."""
    assert faults(backends["gfx950"], over, fake, abi) == []
    assert faults(with_abi(backends["gfx950"], ABIS[abi]), over, fake, abi) == []


@every
def test_every_field_has_one_place(backends: dict[str, Any], over: ModuleType, fake: ModuleType, abi: str) -> None:
    """Moving any field breaks a product."""
    asm, unseen, tried = backends["gfx950"], [], set()
    for change, other in moved(ABIS[abi], asm, fake):
        tried.add(change.split()[0])
        if not faults(with_abi(asm, other), over, fake, abi):
            unseen.append(change)
    assert not unseen
    assert tried == {field.name for field in ABIS[abi].fields} - IDLE.get(abi, set())


@every
def test_every_value_matters(
    backends: dict[str, Any], over: ModuleType, fake: ModuleType, abi: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing any value, grid axis or address breaks a product."""
    asm, unseen, plain = backends["gfx950"], [], launch.arguments_of

    def seen_with(label: str, name: str, other: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(launch, name, other)
            if not faults(asm, over, fake, abi):
                unseen.append(label)

    def seen(label: str, change: Any) -> None:
        seen_with(label, "arguments_of", lambda *told: change(plain(*told)))

    kernel = asm.hooks.catalog("gfx950").kernels[name_of(fake, CASES[abi][0])].kernel
    first = plain(kernel, 2, CASES[abi][0][0])
    for name in first.values:
        if name == "beta":
            continue  # it would scale C, which these products do not have
        for label, amend in (("+1", lambda value: value + 1), ("half", lambda value: type(value)(value / 2)), ("0", lambda _: 0)):
            values = [
                plain(asm.hooks.catalog("gfx950").kernels[name_of(fake, case)].kernel, case[2], case[0]).values[name] for case in CASES[abi]
            ]
            if any(amend(value) != value for value in values):
                seen(
                    f"{name} {label}",
                    lambda told, name=name, amend=amend: attrs.evolve(told, values={**told.values, name: amend(told.values[name])}),
                )
    for axis in range(3):
        for more in (1, -1):
            seen(
                f"grid {axis} {more:+}",
                lambda told, axis=axis, more=more: attrs.evolve(
                    told, grid=tuple(size + more * (place == axis) for place, size in enumerate(told.grid))
                ),
            )
    for place, name in enumerate(first.addresses):
        seen_with(f"{name} left out", "launch_of", lambda *told, place=place: without(launch_of(*told), place))
    for place, name in enumerate(first.addresses[:-1]):
        after = (name, first.addresses[place + 1])
        seen(f"{after} exchanged", lambda told, after=after: attrs.evolve(told, addresses=exchanged(told.addresses, *after)))
    assert not unseen


def without(plain: Launch, place: int) -> Launch:
    """Return the launch with one address zero."""
    return lambda stream, *addresses: plain(stream, *(0 if at == place else address for at, address in enumerate(addresses)))


def exchanged(names: tuple[str, ...], one: str, other: str) -> tuple[str, ...]:
    """Return the names with two swapped."""
    return tuple({one: other, other: one}.get(name, name) for name in names)


@pytest.mark.parametrize("abi", ["aiter-i8gemm", "aiter-fp8gemm-blockscale", "aiter-f4gemm"])
def test_zeros_are_needed(backends: dict[str, Any], over: ModuleType, fake: ModuleType, abi: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without zeroing, added splits are wrong."""
    plain = launch.arguments_of
    monkeypatch.setattr(launch, "arguments_of", lambda *told: attrs.evolve(plain(*told), zeroed=False))
    assert "numbers are wrong" in faults(backends["gfx950"], over, fake, abi)[0]


def test_the_units_of_the_launch_matter(
    backends: dict[str, Any], over: ModuleType, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing threads, argument bytes, LDS or how arguments are passed breaks a product."""
    asm, plain = backends["gfx950"], LaunchPlan
    for change in (
        lambda grid, threads, arguments, slots, buffer: plain(grid, 128, arguments, slots, buffer=buffer),
        lambda grid, threads, arguments, slots, buffer: plain(grid, threads, arguments[:344], slots, buffer=buffer),
        lambda grid, threads, arguments, slots, buffer: plain(grid, threads, arguments + bytes(8), slots, buffer=buffer),
        lambda grid, threads, arguments, slots, buffer: plain(grid, threads, arguments, slots, 16, buffer=buffer),
        lambda grid, threads, arguments, slots, buffer: plain(grid, threads, arguments, slots),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(launch, "LaunchPlan", change)
            assert faults(asm, over, fake, "aiter-bf16gemm") != []
    assert limits.COUNTERS == 1024
