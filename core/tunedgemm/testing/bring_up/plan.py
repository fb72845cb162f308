"""Plan of the bring-up kit: the items of each check on this device, in the order of their value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from tunedgemm.analysis.doctor import installed, machine
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, drivers
from tunedgemm.dtype import fp8_of
from tunedgemm.ops import op_named, ops
from tunedgemm.shape import Shape
from tunedgemm.testing.bring_up.checks import CHECKS, Check
from tunedgemm.testing.shapes import shapes_of

#: Weights of Llama 3 70B over 8 GPUs, as N and K, and M of decoding to prefill: 20 tuned shapes.
_WEIGHTS, _ROWS = ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)), (1, 16, 64, 256, 1024)
_TUNED_OPS = ("a8w8_blockscale", "a16w16", "a8w8_bpreshuffle", "a8w8")
#: The same on a CPU.
_SMALL_WEIGHTS, _SMALL_ROWS = ((320, 512), (512, 256), (448, 512), (512, 224)), (1, 16)
#: Shuffled weights of a16w16, which the conformance suite's shapes leave to plugins.
_SHUFFLED = (Shape("a16w16", 70, 128, 256, layout="aiter16x16"), Shape("a16w16", 33, 64, 512, layout="aiter16x16", epilogue="bias"))
#: Shapes of an op that one backend is asked for, and seconds in which a plugin loads.
_TURNS, LOAD_S = 12, 90.0


def plan(registry: Registry, device: Device, libtypes: str, announce: Callable[[str, str, float], None]) -> dict[str, Any]:
    """Return the device, its versions and backends, and the items in the order of their value."""
    for libtype in registry.libtypes:  # importing a plugin may hang
        announce("load", libtype, LOAD_S)
        registry.get(libtype)
    backends = registry.select(libtypes)
    tuner = "" if backends == registry.select("all") else f"by {','.join(backend.libtype for backend in backends)}"
    turns = [
        (turn, item) for check in CHECKS if device.kind != "cpu" or not check.needs_gpu for turn, item in _items(check, backends, device)
    ]
    order = [item for _, item in sorted(turns, key=lambda each: each[0])]
    asked = {fact.name: fact for fact in installed.backends(registry, device).facts}
    versions = {fact.name: str(fact.value) for fact in machine.versions().facts if fact.name != "system"}
    return {
        "device": {"gfx": device.gfx, "cu_num": device.cu_num, "name": device.name},
        "versions": versions | {f"driver of {maker}": version for maker, version in drivers().items()},
        "libraries": {name: str(fact.more.get("library", "")) for name, fact in asked.items() if fact.more.get("library")},
        "backends": {name: str(fact.value) for name, fact in asked.items()},
        "items": [{"id": _name(item, tuner), **item} for item in order],
    }


def _name(item: dict[str, Any], tuner: str) -> str:
    """Return the name of an item, which is the key of its result: what other libtypes tune is another."""
    shape = str(Shape.from_dict(item["shape"])) if item["shape"] else ""
    return " ".join(filter(None, (item["check"], item["libtype"], shape, "" if item["libtype"] or not shape else tuner)))


def _items(check: Check, backends: Sequence[Backend], device: Device) -> Iterator[tuple[tuple[float, ...], dict[str, Any]]]:
    """Yield the items of a check, each with its place: turn, known hardware last, check, op, backend."""
    place = CHECKS.index(check)

    def item(libtype: str = "", shape: Shape | None = None) -> dict[str, Any]:
        return {"check": check.name, "libtype": libtype, "shape": shape.to_dict() if shape else None}

    if check.per == "device":
        yield (check.turn, 0, place), item()
    elif check.per == "tuned":
        served = [shape for shape in tuned_shapes(device) if any(backend.refusal(shape, device) is None for backend in backends)]
        for number, shape in enumerate(served):
            yield (check.turn + number / 4, 1, place, number), item(shape=shape)
    else:
        for rank, backend in enumerate(backends):
            for number, name in enumerate(name for name in backend.ops if name in ops()):
                shapes = served_shapes(backend, name, device)
                regular = {_format(shape): shape for shape in shapes}
                shapes = [*regular.values()] if check.per == "list" else shapes[: len(regular)] if check.per == "format" else shapes
                limiting = device.limiting(backend.host)
                known = not backend.platforms or any(platform.ran and platform.serves(name, limiting) for platform in backend.platforms)
                for turn, shape in enumerate(shapes[:_TURNS]):
                    yield (check.turn + turn, int(known), place, number, rank), item(backend.libtype, shape)


def _format(shape: Shape) -> tuple[Any, ...]:
    kinds = tuple(value for name, value in shape.extra if name.startswith(("q_", "scale_order")))
    return shape.dtype, shape.scale, shape.layout, kinds


def served_shapes(backend: Backend, op_name: str, device: Device) -> list[Shape]:
    """Return the conformance shapes of an op that a backend serves here.

    The first have different formats. Of one format, the most awkward sizes come first. Shapes in
    OCP's fp8 are also asked for in the device's.
    """
    limiting = device.limiting(backend.host)
    shapes = [*shapes_of(op_name, large=device.kind != "cpu"), *(shape for shape in _SHUFFLED if shape.op == op_name)]
    asked = dict.fromkeys(variant for shape in shapes if shape.m for variant in (_of_device(shape, limiting), shape))
    served = [shape for shape in asked if backend.refusal(shape, device) is None]
    served.sort(key=lambda shape: -sum(size % 64 != 0 for size in (shape.m, shape.n, shape.k)))
    firsts: dict[tuple[Any, ...], Shape] = {}
    for shape in served:
        firsts.setdefault(_format(shape), shape)
    return list(dict.fromkeys([*firsts.values(), *served]))


def _of_device(shape: Shape, device: Device) -> Shape:
    """Return a shape with the device's fp8 in place of OCP's."""
    ocp, own = "fp8_e4m3fn", fp8_of(device.gfx)
    extra = tuple((name, own if value == ocp else value) for name, value in shape.extra)
    return attrs.evolve(shape, dtype=own if shape.dtype == ocp else shape.dtype, extra=extra)


def tuned_shapes(device: Device) -> list[Shape]:
    """Return the shapes to tune: the weights of a model, each with other rows and ops in turn."""
    weights, rows = (_SMALL_WEIGHTS, _SMALL_ROWS) if device.kind == "cpu" else (_WEIGHTS, _ROWS)
    shapes = []
    for turn, m in enumerate(rows):
        for index, (n, k) in enumerate(weights):
            op = op_named(_TUNED_OPS[(turn + index) % len(_TUNED_OPS)])
            cells = {"M": str(m), "N": str(n), "K": str(k), "gfx": device.gfx}
            fp8 = {"q_dtype_w": "fp8"} if "q_dtype_w" in op.columns.key else {}
            shapes.append(op.columns.parse(cells | fp8))
    return shapes
