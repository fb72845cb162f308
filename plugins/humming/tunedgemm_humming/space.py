"""List the configurations of Humming's kernel for a shape: its own choice first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution
from tunedgemm.tools.launching import format_of, kind_of

from tunedgemm_humming.library import Library
from tunedgemm_humming.names import Config, config_of

#: Why the list of an absent device is empty.
ABSENT = "device: Humming chooses its configurations by a present device (got one that is described)"
#: Rows of x for which Humming is asked, too: its choices change between them.
_ROWS = (1, 16, 32, 64, 96, 128, 256, 512, 1024, 4096)
#: Most solutions of a shape, and the choices for other rows among them.
_MOST, _MOST_CHOICES = 32, 4
#: What is varied of a choice: stages, blocks of a multiprocessor.
_STAGES, _CTAS = (3, 4, 5, 6, 8), (1, 2)


def layer_of(shape: Shape) -> dict[str, object]:
    """Return Humming's ``layer_config`` of a shape's weight; one scale a row is its group 0."""
    form, group = format_of(shape), int(shape["w_group"])
    kind = kind_of(form)
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[shape.dtype]
    layer: dict[str, object] = {
        "sm_version": 90,
        "shape_n": shape.n,
        "shape_k": shape.k,
        "b_dtype": {"float8_e4m3fn": "float8e4m3", "float4_e2m1f": "float4e2m1", "uint8b128": "uint8"}.get(kind, "uint4"),
        "a_dtype": dtype,
        "c_dtype": dtype,
        "weight_scale_group_size": 0 if group == shape.k else group,
        "has_zero_point": form.zeros is not None,
    }
    if form.has_global:
        return layer | {"bs_dtype": "float8e4m3", "weight_scale_2_type": "tensor"}
    return layer | ({"bs_dtype": "float8e8m0"} if "e8m0" in form.scale else {})


def kernel_of(config: Config, shape: Shape) -> dict[str, object]:
    """Return the arguments of Humming's kernel: of the layer, of what it computes and of its tuning."""
    computes = {"gemm_type": "dense", "use_f16_accum": False, "use_batch_invariant": False}
    return layer_of(shape) | computes | config.tuning()


def enumerate_solutions(libtype: str, load: Callable[[], Library], shape: Shape, device: Device) -> Iterator[Solution]:
    """Yield the solutions of a supported shape; none for an absent device."""
    if not device.is_present:
        return
    library = load()
    own = next(_choices(library, shape, device, (shape.m,)), None)
    usable = (config for config in dict.fromkeys(_candidates(library, shape, device)) if _is_possible(library, config, shape))
    for config in itertools.islice(usable, _MOST):
        named = attrs.evolve(config, is_default=config == own)
        yield Solution(libtype, named.name, deterministic=not config.stream_k)


def _candidates(library: Library, shape: Shape, device: Device) -> Iterator[Config]:
    """Yield Humming's choices, those for near numbers of rows first, then their neighbours in turns."""
    near = sorted(_ROWS, key=lambda rows: abs(rows - shape.m) / max(rows, shape.m))
    choices = list(itertools.islice(dict.fromkeys(_choices(library, shape, device, (shape.m, *near))), _MOST_CHOICES))
    yield from choices
    for group in itertools.zip_longest(*map(_neighbours, choices)):
        yield from filter(None, group)


def _choices(library: Library, shape: Shape, device: Device, rows: Iterable[int]) -> Iterator[Config]:
    """Yield what Humming chooses for numbers of rows."""
    for m in rows:
        try:
            yield config_of(library.choose(layer_of(shape), m, max(device.index, 0)))
        except (PluginError, AssertionError, ValueError):  # no name states it, or Humming has none
            continue


def _neighbours(config: Config) -> Iterator[Config]:
    """Yield configurations that differ in how K is shared, in stages, or in blocks of a multiprocessor."""
    yield attrs.evolve(config, stream_k=not config.stream_k)
    for ctas in _CTAS:
        yield attrs.evolve(config, ctas=ctas)
    for stages in _STAGES:
        yield attrs.evolve(config, stages=stages)
        yield attrs.evolve(config, stages=stages, stream_k=not config.stream_k)


def _is_possible(library: Library, config: Config, shape: Shape) -> bool:
    try:
        library.check(kernel_of(config, shape))
    except Exception:  # Humming asserts its limits, and raises others
        return False
    return True
