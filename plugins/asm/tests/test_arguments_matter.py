"""Change one argument of a launch at a time; the fake must refuse it or give wrong
numbers.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import PluginError, Shape
from tunedgemm.tools.launching import Launch, LaunchPlan, launch_of
from tunedgemm_asm import launch, limits

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


every = pytest.mark.parametrize("abi", list(CASES))


@every
def test_unchanged_layouts_are_right(backends: dict[str, Any], over: ModuleType, fake: ModuleType, abi: str) -> None:
    """Unchanged layouts give right products."""
    assert faults(backends["gfx950"], over, fake, abi) == []


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
