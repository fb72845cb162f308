"""List AITER's kernels for a shape, by AITER's own lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
from tunedgemm.plugin import Device, Option, PluginError, Shape, Solution

from tunedgemm_aiter import opus_kernels
from tunedgemm_aiter.installed import find, function, has_flydsl
from tunedgemm_aiter.limits import is_aiters_choice
from tunedgemm_aiter.names import AUTO, parse, unfit

SPACE = Option("--aiter-space", "TUNEDGEMM_AITER_SPACE", "list the kernels that promise most for a shape, or all", ("default", "full"))
#: Kernels of a shape in the default space; each is a compilation of seconds.
_MOST = 48
#: Counters of FlyDSL's splits of K that AITER's tuner allows.
_COUNTERS = 128
#: Splits of K of opus's kernels in the default space; 0 is the kernel's own choice.
_SPLITS = (0, 2, 4, 8)
_TYPES = {"bf16": "bf16", "fp16": "f16"}
_TUNE = "aiter.ops.flydsl.gemm_tune.flydsl_gemm_a8w8_bpreshuffle"


def enumerate_solutions(libtype: str, family: str, shape: Shape, device: Device) -> Iterable[Solution]:
    """Return the solutions of a shape, best guesses first; none where AITER cannot list any."""
    if find() is None or (family == "flydsl" and not has_flydsl()):
        return []
    if family in ("gluon", "aiter"):
        own = shape.op != "fmoe" or is_aiters_choice(shape)
        return [Solution(libtype, AUTO, deterministic=False, batch_invariant=False)] if own else []
    lister = _LISTERS.get((family, shape.op))
    if lister is None or not (device.is_present or family == "opus"):
        return []
    try:
        listed = list(lister(shape, device))
    except PluginError:  # AITER cannot be imported: `lacks` and `bind` give the reason
        return []
    ranked = sorted(listed, key=lambda candidate: candidate.cost(shape, device))
    most = len(ranked) if SPACE.value() == "full" else _MOST
    return [candidate.solution(libtype) for candidate in ranked[:most]]


@attrs.frozen
class Candidate:
    """A kernel that AITER lists.

    Attributes:
        name, number, split: kernelName, solidx and splitK of a row.
        tile: along M and N.
        splits: in how many parts K is cut.
        repeats: whether the output repeats its bits.
    """

    name: str
    number: int
    split: int
    tile: tuple[int, int]
    splits: int = 1
    repeats: bool = True

    def cost(self, shape: Shape, device: Device) -> tuple[float, int]:
        """Return a rough cost: rounds of tiles over all compute units times the operands of a tile."""
        tiles = -(-shape.m // self.tile[0]) * -(-shape.n // self.tile[1]) * self.splits
        rounds = -(-tiles // max(device.cu_num, 1))
        return rounds * sum(self.tile) * shape.k / self.splits + self.splits * shape.m, self.number

    def solution(self, libtype: str) -> Solution:
        """Return the solution of a row."""
        return Solution(libtype, self.name, self.split, self.number, deterministic=self.repeats, batch_invariant=False)


def _hgemm(shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield FlyDSL's bf16 and fp16 kernels, by the conditions of AITER's tuner.

    Float32 outputs have none: the kernels round to the operands' dtype.
    """
    if shape.outdtype != shape.dtype:
        return
    lister = function("aiter.ops.flydsl.gemm_kernels", "get_flydsl_splitk_hgemm_kernels")
    word = _TYPES[shape.dtype]
    listed = lister(word, word, m=shape.m, n=shape.n, k=shape.k)
    least = min((config["tile_m"] for config in listed.values()), default=0)
    for number, (name, config) in enumerate(listed.items()):
        m, n, split = config["tile_m"], config["tile_n"], config["split_k"]
        if m > max(shape.m, least) or (split > 1 and -(-shape.m // m) * (shape.n // n) > _COUNTERS):
            continue
        if not unfit(parse("flydsl", shape.op, name), split, shape, device):
            yield Candidate(name, number, split, (m, n), split, repeats=split == 1)


def _preshuffled(shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield FlyDSL's 8-bit kernels that fit by AITER's own condition."""
    for kernels, fits in _pipelines(shape, device):
        for number, kernel in kernels.items():
            if fits(kernel, shape.m, shape.n, shape.k) and not unfit(parse("flydsl", shape.op, kernel.name), 0, shape, device):
                tile = getattr(kernel, "tile_m", 0) or kernel.block_m, getattr(kernel, "tile_n", 0) or kernel.block_n
                yield Candidate(kernel.name, number, 0, tile, getattr(kernel, "split_k", 1))


def _pipelines(shape: Shape, device: Device) -> Iterator[tuple[dict[int, Any], Callable[..., bool]]]:
    """Yield AITER's lists with their conditions."""
    if device.gfx == "gfx1250":
        fits = function(f"{_TUNE}_wmma_common", "kernel_fits_shape")
        yield fits.__globals__["kernels_list"], fits
        return
    fits = function(f"{_TUNE}_common", "kernel_fits_shape")
    word = "int8" if shape.dtype == "int8" else "fp8"
    for pipeline in fits.__globals__.get("PIPELINES", ()):
        if word in pipeline.q_dtypes_w:
            yield pipeline.kernels_list, pipeline.fits


def _opus(shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield opus's kernels that every build of AITER has; in the full space all of its list.

    A kernel that the build lacks is refused at bind.
    """
    full, compiled = SPACE.value() == "full", opus_kernels.compiled(device.gfx)
    wanted = {"bf16": "bf16_t", "fp32": "fp32_t"}[shape.outdtype]
    for number, instance in opus_kernels.kernels().items():
        if not (full or number in compiled):
            continue
        try:
            kernel = parse("opus", shape.op, instance.name)
        except PluginError:  # of another op
            continue
        splits = (range(17) if full else _SPLITS) if "splitk" in kernel.family else (0,)
        if "splitk" not in kernel.family and wanted not in instance.output_dtypes:
            continue
        for split in splits:
            if split * kernel.tile[2] * 2 <= shape.k and not unfit(kernel, split, shape, device):
                yield Candidate(instance.name, number, split, kernel.tile[:2], split or 1)


_LISTERS: dict[tuple[str, str], Callable[[Shape, Device], Iterator[Candidate]]] = {
    ("flydsl", "a16w16"): _hgemm,
    ("flydsl", "a8w8_bpreshuffle"): _preshuffled,
    ("opus", "a16w16"): _opus,
}
