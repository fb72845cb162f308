"""Map AITER's names to the template parameters of a CK device op and back."""

from __future__ import annotations

import functools
import math

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.tables import KernelName

#: Lanes of a wavefront of CDNA.
WAVE = 64

#: Parts of a name, between its prefix and its scheduler, to how many numbers each has.
_PARTS = {
    "scale": 3,  # rows of x, rows of the weight and elements of K that share a scale
    "tile": 4,  # threads, M, N and K of a block
    "k1": 2,  # elements of K that are adjacent in shared memory: of x, of the weight
    "xdl": 2,  # M and N of the matrix instruction
    "per_wave": 2,  # instructions of a wave along M and N
    "a_cluster": 3,  # threads that load x: along K, M and within k1
    "b_cluster": 3,
    "c_cluster": 4,  # threads that store: along blocks of M, M, blocks of N, N
    "store": 3,  # elements of the output, and of each operand of the epilogue, that a thread stores at a time
    "store1": 1,
    "shuffle": 2,  # instructions of a wave, along M and N, whose sums share a pass through shared memory
}

_ROWWISE = ("tile", "xdl", "per_wave", "a_cluster", "b_cluster", "c_cluster", "store", "shuffle")
_SHUFFLED = ("tile", "k1", "xdl", "a_cluster", "b_cluster", "c_cluster", "store", "shuffle")
_BLOCKSCALE = ("scale", "tile", "k1", "xdl", "per_wave", "a_cluster", "b_cluster", "c_cluster", "store1", "shuffle")


@attrs.frozen(slots=False)
class Form:
    """How AITER names the instances of an op.

    Attributes:
        prefix: of each name.
        parts: the parts that follow, in order.
        bits: of an element of x and the weight; mxfp4 counts packed bytes, as in the names.
    """

    prefix: str
    parts: tuple[str, ...]
    bits: int

    @functools.cached_property
    def form(self) -> KernelName:
        """Return the form of the names, whose fields are the parts."""
        parts = (f"{{{part}:x{_PARTS[part]}}}" for part in self.parts)
        return KernelName("_".join([self.prefix, *parts, "{scheduler:word}", "v{pipeline}"]), "tile", "k1", "store1")

    @property
    def example(self) -> str:
        """Return the pattern of a name, for messages."""
        return "_".join([self.prefix, *("x".join(["#"] * _PARTS[part]) for part in self.parts), "intrawave_v3"])


#: Op to the form of its names. AITER has no a16w16 instances; this plugin names them in the style
#: of the others.
FORMS = {
    "a16w16": Form("a16w16", _ROWWISE, 16),
    "a8w8": Form("a8w8_rowwise", _ROWWISE, 8),
    "a8w8_bpreshuffle": Form("a8w8_bpreshuffle", _SHUFFLED, 8),
    "a8w8_blockscale": Form("a8w8_blockscale", _BLOCKSCALE, 8),
    "a8w8_blockscale_bpreshuffle": Form("a8w8_blockscale_bpreshuffle", tuple(part for part in _BLOCKSCALE if part != "per_wave"), 8),
    "a4w4_blockscale": Form("a4w4_blockscale", tuple("store1" if part == "store" else part for part in _SHUFFLED), 8),
    "batched_bf16": Form("bf16_batched", _ROWWISE, 16),
    "batched_a8w8": Form("a8w8_batched_rowwise", _ROWWISE, 8),
}

_SCHEDULERS = ("intrawave", "interwave")
_PIPELINES = (1, 2, 3, 4, 5)


@attrs.frozen(cache_hash=True)
class XdlInstance:
    """Template parameters of one kernel.

    Attributes:
        op: the op, whose `Form` the name has.
        threads: of a block.
        m, n, k: of a block's tile; K of a4w4 counts bytes, of two values each.
        a_k1, b_k1: elements of K that are adjacent in shared memory; a thread loads as many at a
            time.
        xdl: M and N of the matrix instruction.
        per_wave: instructions of a wave along M and N.
        a_cluster, b_cluster: threads that load, along K / k1, along the rows, and 1.
        c_cluster: threads that store: 1, along M, 1, along N.
        store: elements that a thread stores at a time, then those of each operand of the epilogue,
            where the name has them.
        shuffle: instructions of a wave, along M and N, whose sums share a pass through shared
            memory.
        scheduler: ``intrawave``, each wave overlaps its loads and products, or ``interwave``, waves
            alternate.
        pipeline: version of CK's block pipeline, 1 to 5.
        scale: rows of x, rows of the weight and elements of K that share a scale; () without block
            scales.

    Raises:
        PluginError: the parameters are inconsistent; the message names the part.
    """

    op: str
    threads: int
    m: int
    n: int
    k: int
    a_k1: int
    b_k1: int
    xdl: tuple[int, int]
    per_wave: tuple[int, int]
    a_cluster: tuple[int, ...]
    b_cluster: tuple[int, ...]
    c_cluster: tuple[int, ...]
    store: tuple[int, ...]
    shuffle: tuple[int, int]
    scheduler: str
    pipeline: int
    scale: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        for part, wrong in _faults(self):
            if wrong:
                raise PluginError(f"ck {self.op}: {part}: {wrong}")

    @property
    def sides(self) -> tuple[int, int, int]:
        """Return M, N and the elements of K of a block's tile."""
        return self.m, self.n, self.k * 2 if self.op == "a4w4_blockscale" else self.k

    @property
    def waves(self) -> tuple[int, int]:
        """Return the waves of a block along M and along N."""
        return self.m // (self.xdl[0] * self.per_wave[0]), self.n // (self.xdl[1] * self.per_wave[1])

    @property
    def name(self) -> str:
        """Return ``kernelName``."""
        form = FORMS[self.op].form
        return form.write(self, (self.threads, self.m, self.n, self.k), (self.a_k1, self.b_k1), self.store)


def _faults(of: XdlInstance) -> list[tuple[str, str]]:
    """Return the parts of the name, each with its fault or "".

    They are CK's compile-time conditions, as far as a name determines them.
    """
    words = "x".join(map(str, (of.threads, of.m, of.n, of.k)))
    faults = [
        ("scheduler", "" if of.scheduler in _SCHEDULERS else f"must be one of {', '.join(_SCHEDULERS)} (got {of.scheduler!r})"),
        ("pipeline", "" if of.pipeline in _PIPELINES else f"must be v1 to v5 (got v{of.pipeline})"),
        ("xdl", "" if of.xdl in ((16, 16), (32, 32)) else f"must be 16x16 or 32x32 (got {of.xdl[0]}x{of.xdl[1]})"),
    ]
    if any(wrong for _, wrong in faults):
        return faults
    per_m, per_n = of.xdl[0] * of.per_wave[0], of.xdl[1] * of.per_wave[1]
    whole = per_m and per_n and of.m % per_m == 0 and of.n % per_n == 0
    if not whole or math.prod(of.waves) * WAVE != of.threads or of.k <= 0:
        return [("tile", f"{words} threads, M, N and K cannot be cut into waves of {per_m}x{per_n}")]
    for part, cluster, rows, k1 in (("a_cluster", of.a_cluster, of.m, of.a_k1), ("b_cluster", of.b_cluster, of.n, of.b_k1)):
        text = "x".join(map(str, cluster))
        fits = k1 > 0 and all(cluster) and cluster[2] == 1 and of.k % (cluster[0] * k1) == 0 and rows % cluster[1] == 0
        if not fits or math.prod(cluster) > of.threads:
            faults.append((part, f"{text} threads that load {k1} elements of K each do not divide {rows} rows of {of.k}"))
    shuffle_m, shuffle_n = of.shuffle
    tile = (shuffle_m * of.waves[0] * of.xdl[0], shuffle_n * of.waves[1] * of.xdl[1])
    fits = min(of.shuffle) > 0 and of.per_wave[0] % shuffle_m == 0 and of.per_wave[1] % shuffle_n == 0
    if not fits:
        faults.append(("shuffle", f"{shuffle_m}x{shuffle_n} does not divide the {of.per_wave[0]}x{of.per_wave[1]} products of a wave"))
    elif not _stores(tile, of.c_cluster, of.store) or math.prod(of.c_cluster) > of.threads:
        text = "x".join(map(str, of.c_cluster))
        faults.append(("c_cluster", f"{text} threads that store {of.store[0]} elements each do not divide {tile[0]}x{tile[1]}"))
    if of.scale and (not all(of.scale) or of.m % of.scale[0] or of.k % of.scale[2]):
        faults.append(("scale", f"blocks of {'x'.join(map(str, of.scale))} do not divide the tile {words}"))
    return faults


def _stores(tile: tuple[int, int], c_cluster: tuple[int, ...], store: tuple[int, ...]) -> bool:
    """Return whether the storing threads divide a tile of sums."""
    (first, along_m, third, along_n), vector = c_cluster, store[0]
    return first == third == 1 and min(along_m, along_n, vector) > 0 and tile[0] % along_m == 0 and tile[1] % (along_n * vector) == 0


@functools.lru_cache(maxsize=4096)
def parse_name(name: str, op: str) -> XdlInstance:
    """Return the instance of *op* with this name; `XdlInstance.name` is the inverse.

    Raises:
        PluginError: the op has no instance of that name; the message names the unknown part.
    """
    form = FORMS.get(op)
    if form is None:
        raise PluginError(f"ck has no instances of op {op!r}; supported: {', '.join(FORMS)}")
    fields = form.form.parse(name)
    if fields is None:
        raise PluginError(f"ck {op} has no kernel {name!r}: names look like {form.example}")
    if zeros := [part for part, numbers in fields.items() if isinstance(numbers, tuple) and 0 in numbers]:
        raise PluginError(f"ck {op} has no kernel {name!r}: {zeros[0]} must be positive numbers (got {fields[zeros[0]]})")
    return _built(op, fields, fields.pop("scheduler"), fields.pop("pipeline"))


def _built(op: str, numbers: dict[str, tuple[int, ...]], scheduler: str, pipeline: int) -> XdlInstance:
    """Return the instance of a name's parts; the rest of them imply what a form omits."""
    threads, m, n, k = numbers["tile"]
    a_cluster, b_cluster = numbers["a_cluster"], numbers["b_cluster"]
    a_k1, b_k1 = numbers.get("k1", (k // a_cluster[0], k // b_cluster[0]))
    store = numbers.get("store") or numbers["store1"]
    block = (threads, m, n)
    per_wave = numbers.get("per_wave") or _per_wave(block, numbers["xdl"], numbers["shuffle"], numbers["c_cluster"], store)
    return XdlInstance(
        op=op,
        threads=threads,
        m=m,
        n=n,
        k=k,
        a_k1=a_k1,
        b_k1=b_k1,
        xdl=numbers["xdl"],  # type: ignore[arg-type]
        per_wave=per_wave,  # type: ignore[arg-type]
        a_cluster=a_cluster,
        b_cluster=b_cluster,
        c_cluster=numbers["c_cluster"],
        store=store,
        shuffle=numbers["shuffle"],  # type: ignore[arg-type]
        scheduler=scheduler,
        pipeline=pipeline,
        scale=numbers.get("scale", ()),
    )


def _per_wave(
    block: tuple[int, int, int], xdl: tuple[int, ...], shuffle: tuple[int, ...], c_cluster: tuple[int, ...], store: tuple[int, ...]
) -> tuple[int, int]:
    """Return the instructions of a wave where the name omits them.

    It takes the fewest waves along M whose sums the threads can store; all instances that AITER
    lists
    without them follow this rule. Where no number of waves fits, it returns (0, 0), which is
    invalid.
    """
    threads, m, n = block
    for waves_m in (1, 2, 4, 8, 16):
        waves_n, rest = divmod(threads, WAVE * waves_m)
        if rest or not waves_n or m % (waves_m * xdl[0]) or n % (waves_n * xdl[1]):
            continue
        per_wave = (m // (waves_m * xdl[0]), n // (waves_n * xdl[1]))
        tile = (shuffle[0] * waves_m * xdl[0], shuffle[1] * waves_n * xdl[1])
        if per_wave[0] % shuffle[0] == 0 and per_wave[1] % shuffle[1] == 0 and _stores(tile, c_cluster, store):
            return per_wave
    return 0, 0
