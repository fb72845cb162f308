"""Programs of the kernels on the fake GPUs: what they are compiled with, how they are launched, and what comes out by definition."""

from __future__ import annotations

import functools
import hashlib
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import torch
import tunedgemm_skinny

KERNELS = Path(tunedgemm_skinny.__file__).with_name("kernels")
DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8, "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz, "fp4x2": torch.uint8,
}  # fmt: skip
#: In the order of the sources' numbers.
INPUTS, OUTPUTS = ("bf16", "fp16", "int8", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp4x2"), ("bf16", "fp16", "fp32")
SCALES = ("none", "tensor", "row", "block")
#: Elements of K, and rows of the weight, that share a scale of a block.
BLOCK = 128
ARCHITECTURES = {32: "sm_90", 64: "gfx942"}
#: Rows of x that a matrix instruction takes, by the width of a warp.
COLUMNS = {32: 8, 64: 16}
#: Rows of the weight of one warp's, or group of warps', smallest piece.
UNITS = {"rows": 1, "tiles": 16, "wgmma": 64}
MAX_THREADS = 1024
#: Shared memory of a block in bytes, at its most.
SHARED = {32: 227 << 10, 64: 64 << 10}


def up(size: int, step: int) -> int:
    """The next multiple of a step."""
    return -(-size // step) * step


@attrs.frozen
class Program:
    """What a program is compiled with.

    Attributes:
        family: ``rows``, ``tiles`` or ``wgmma``.
        wave: threads of a warp.
        m: rows of x that it serves.
        vec: elements of one load.
        stages: slots of the ring that the weight comes through; 0: none.
        scale: kind of the operands' scales.
        batched: whether it serves several products.
        shuffled: rows of the weight whose pieces lie side by side; 0: it is plain.
        wide: whether x is bf16 beside a weight of mxfp4.
        The others are as the kernels' names have them, dtypes by their short names.
    """

    family: str
    wave: int
    m: int = 1
    n_each: int = 1
    warps_n: int = 1
    warps_k: int = 1
    unroll: int = 1
    vec: int = 8
    dtype: str = "bf16"
    out: str = "bf16"
    bias: str = ""
    x_shared: bool = False
    stages: int = 0
    scale: str = "none"
    batched: bool = False
    cluster: int = 0
    shuffled: int = 0
    wide: bool = False

    @property
    def per_block(self) -> int:
        """Rows of the weight of a block."""
        return UNITS[self.family] * self.n_each * self.warps_n

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.wave * self.warps_n * self.warps_k * (4 if self.family == "wgmma" else 1)

    @property
    def span(self) -> int:
        """Elements of K that all warps of a block take in one turn."""
        return self.unroll * self.warps_k * {"rows": self.piece * self.wave, "tiles": 4 * self.piece, "wgmma": 8 * self.piece}[self.family]

    @property
    def piece(self) -> int:
        """Elements of K that a lane has at once."""
        return 8 if self.dtype in INPUTS[:2] else 16

    def source(self) -> str:
        """The text of the program."""
        return "\n".join((KERNELS / f"{part}.h").read_text() for part in ("portable", "finish", self.family))

    def defines(self) -> list[str]:
        """Its macros."""
        values = {
            f"FAMILY_{self.family}": 1, "DTYPE": INPUTS.index(self.dtype), "OUT": OUTPUTS.index(self.out),
            "BIAS": OUTPUTS.index(self.bias) + 1 if self.bias else 0, "M": self.m, "N_EACH": self.n_each, "WARPS_N": self.warps_n,
            "WARPS_K": self.warps_k, "UNROLL": self.unroll, "VEC": self.vec, "WAVE": self.wave, "X_SHARED": int(self.x_shared),
            "STAGES": self.stages, "SCALE": SCALES.index(self.scale), "BATCHED": int(self.batched), "CLUSTER": self.cluster,
            "SHUFFLED": self.shuffled, "X_WIDE": int(self.wide),
        }  # fmt: skip
        return [f"-D{name}={value}" for name, value in values.items()]

    def shared(self, per_split: int) -> int:
        """Bytes of dynamic shared memory: the ring and x where they lie there, in the end the sums of all warps."""
        sums = 4 * self.warps_k * self.m * (self.per_block + (0 if self.family == "rows" else 4))
        if self.family == "wgmma":
            return max(sums, self.stages * (16 // self.piece) * self.span * (self.per_block + self.m))
        length = up(per_split, self.piece) if self.family == "rows" else self.stages * self.span or up(per_split, 4 * self.piece)
        held = 2 if self.family == "tiles" and self.wave == 32 else 1  # rows of a tile that a lane has
        ring = 16 * self.stages * self.unroll * self.n_each * held * self.threads
        return max(sums, 16 // self.piece * self.m * length * (4 if self.wide else 1) * self.x_shared + ring)


@attrs.frozen(eq=False)
class Case:
    """The operands of one product, or of a batch of them, and how K is split.

    Attributes:
        x, weight, bias: [m, k], [n, k], [n] or None; of a batch each [B, ...].
        per_split: elements of K of each split but the last.
        x_scale, w_scale: one value each; by row [m] and [n]; or by block [m, ceil(k/128)] and [ceil(n/128), ceil(k/128)].
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    per_split: int
    x_scale: torch.Tensor | None = None
    w_scale: torch.Tensor | None = None

    @property
    def splits(self) -> int:
        """Splits of K."""
        return -(-self.x.shape[-1] // self.per_split)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Products, rows of x, rows of the weight, and K."""
        return (1 if self.x.dim() == 2 else self.x.shape[0]), self.x.shape[-2], self.weight.shape[-2], self.x.shape[-1]

    def reference(self) -> torch.Tensor:
        """The product in float64, [m, n]; of a batch [B, m, n]."""
        x, weight, scales = self.x.double(), self.weight.double(), (self.x_scale, self.w_scale)
        if self.x_scale is None or self.w_scale is None:
            scales = (torch.ones(1), torch.ones(1))
        elif self.x_scale.dim() == self.x.dim():
            k, n = x.shape[-1], weight.shape[0]
            x = x * self.x_scale.double().repeat_interleave(BLOCK, 1)[:, :k]
            weight = weight * self.w_scale.double().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
            scales = (torch.ones(1), torch.ones(1))
        out = x @ weight.mT * scales[0].double().unsqueeze(-1) * scales[1].double().unsqueeze(-2)
        return out if self.bias is None else out + self.bias.double().unsqueeze(-2)

    def size(self) -> torch.Tensor:
        """The sum of the absolute values of what is added up, [m, n]."""
        out = self.x.double().abs() @ self.weight.double().abs().mT
        return out if self.bias is None else out + self.bias.double().abs()


def whole(program: Program, m: int, n: int, k: int, splits: int = 1, seed: int = 0) -> Case:
    """Operands of whole numbers, whose sums float32 has exactly, in any order: every wrong, missing or doubled element shows.

    Scales are powers of two; a program for batches gets three products.
    """
    made, batch = torch.Generator().manual_seed(seed), (3,) * program.batched

    def drawn(*shape: int, dtype: str, most: int) -> torch.Tensor:
        return torch.randint(-most, most + 1, (*batch, *shape), generator=made).to(DTYPES[dtype])

    def powers(*shape: int) -> torch.Tensor:
        return 2.0 ** torch.randint(-1, 2, (*batch, *shape), generator=made)

    bias = drawn(n, dtype=program.bias, most=99) if program.bias else None
    weight = drawn(n, k, dtype=program.dtype, most=9)
    x, blocks = drawn(m, k, dtype=program.dtype, most=9), -(-k // BLOCK)
    sizes = {"none": None, "tensor": ((1,), (1,)), "row": ((m,), (n,)), "block": ((m, blocks), (-(-n // BLOCK), blocks))}[program.scale]
    scales = (None, None) if sizes is None else tuple(powers(*size) for size in sizes)
    return Case(x, weight, bias, split(program, k, splits), *scales)


def normal(program: Program, m: int, n: int, k: int, splits: int = 1, seed: int = 0) -> Case:
    """Normal numbers."""
    made = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(rows, k, generator=made).to(DTYPES[program.dtype]) for rows in (m, n))
    bias = torch.randn(n, generator=made).to(DTYPES[program.bias]) if program.bias else None
    return Case(x, weight, bias, split(program, k, splits))


def split(program: Program, k: int, splits: int) -> int:
    """Elements of K of each of so many splits; with scales of blocks whole blocks, or steps of 64 where each step has its own scales."""
    steps = BLOCK if program.family == "wgmma" else min(BLOCK, 64 * program.unroll)
    return up(-(-k // splits), steps if program.scale == "block" else program.vec)


#: The beginning of the tests' own kernels.
PREAMBLE = """
struct Args {
    void *x, *weight, *bias, *out, *partial, *counters, *x_scale, *w_scale;
    long long n, k;
    int m, splits;
    long long per_split;
};
typedef unsigned short u16;
static float *out_of(const Args &args) { return (float *)args.out; }
static void put(const Args &args, int place, float value) { host_store(out_of(args) + place, &value, 4); }
static float get(const void *from, int place) {  // a bfloat16
    unsigned bits = 0;
    host_load((u16 *)&bits + 1, (const u16 *)from + place, 2);
    return __builtin_bit_cast(float, bits);
}
extern "C" void skinny(Args args) {
    const int thread = host_thread(), lane = thread % WAVE;
    (void)args, (void)lane;
"""
#: Threads of a block of theirs in warps, and rows of the weight that it has.
WARPS, PER_BLOCK = 2, 16


@attrs.frozen
class Tiny:
    """A kernel of the tests' own, with the macros of a program of the family `rows`."""

    wave: int
    body: str
    bytes_shared: int = 4096
    m: int = 1
    bias: int = 0
    per_block: int = PER_BLOCK
    out: str = "fp32"
    cluster: int = 0

    @property
    def threads(self) -> int:
        return self.wave * WARPS

    def source(self) -> str:
        return f"{PREAMBLE}{self.body}\n}}"

    def shared(self, per_split: int) -> int:
        return self.bytes_shared

    def defines(self) -> list[str]:
        values = {"FAMILY_rows": 1, "DTYPE": 0, "OUT": 2, "BIAS": self.bias, "M": self.m, "N_EACH": 8, "WARPS_N": WARPS, "WARPS_K": 1}
        values |= {"UNROLL": 1, "VEC": 1, "WAVE": self.wave, "X_SHARED": 0, "SCALE": 0, "BATCHED": 0, "CLUSTER": self.cluster}
        return [f"-D{name}={value}" for name, value in values.items()]


def small(m: int = 1, n: int = PER_BLOCK, k: int = 128, splits: int = 1) -> Case:
    """Operands of small whole numbers."""
    made = torch.Generator().manual_seed(1)
    x, weight = (torch.randint(-9, 10, (rows, k), generator=made).to(torch.bfloat16) for rows in (m, n))
    return Case(x, weight, None, -(-k // splits))


def shuffled(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """The weight [..., n, k] in AITER's order: of each so many rows the pieces of 16 bytes side by side, then those further along K."""
    pieces = weight.contiguous().view(torch.uint8).view(*weight.shape[:-2], weight.shape[-2] // rows, rows, -1, 16)
    return pieces.transpose(-3, -2).contiguous().view(torch.uint8)


class Machine:
    """A fake GPU whose warps have *wave* threads; keeps the programs that it has loaded.

    Attributes:
        compiler, driver: its fake libraries.
        poison: what output and partial sums hold before a launch.
    """

    def __init__(self, fake: ModuleType, wave: int) -> None:
        self.fake, self.wave = fake, wave
        self.compiler = fake.Compiler("hiprtc" if wave == 64 else "nvrtc")
        self.driver = fake.Driver("hip" if wave == 64 else "cuda")
        self.loaded = functools.cache(self._loaded)

    def options(self, program: Any) -> list[str]:
        """The compiler's options."""
        amd = ["--offload-arch=gfx942", "-std=c++17", "-O3"]
        nvidia = ["--gpu-architecture=sm_90", "--std=c++17", "-default-device"]
        return [*(amd if self.wave == 64 else nvidia), *program.defines()]

    def _loaded(self, program: Program) -> Any:
        return self.driver.load(self.compiler.compile(program.source(), self.options(program)))[1]

    def status(self, program: Any, case: Case, out: torch.Tensor, seed: int = 1) -> int:
        """The status of a launch over poisoned partial sums; *out* is the output."""
        batches, m, n, k = case.sizes
        blocks = -(-n // program.per_block)
        meets = case.splits > 1 and not program.cluster
        partial = torch.full((batches, case.splits, m, n), torch.nan) if meets else None
        counters = torch.zeros(batches, blocks, dtype=torch.int32) if meets else None
        weight = shuffled(case.weight, program.shuffled) if getattr(program, "shuffled", 0) else case.weight
        given = {"x": case.x, "weight": weight, "bias": case.bias, "out": out, "partial": partial, "counters": counters}
        transposed = (
            weight is not case.weight and program.scale == "block" and case.x_scale is not None and case.x_scale.dim() == case.x.dim()
        )
        x_scale = case.x_scale.T.contiguous() if transposed and program.dtype != "fp4x2" else case.x_scale
        given |= {"x_scale": x_scale, "w_scale": case.w_scale}
        pointers = {name: None if tensor is None else tensor.data_ptr() for name, tensor in given.items()}
        args = self.fake.Args(**pointers, n=n, k=k, m=m, splits=case.splits, per_split=case.per_split)
        grid = self.fake.Grid(blocks, case.splits, program.threads, program.shared(case.per_split), batches)
        function = self.loaded(program)
        if grid.shared > 48 << 10 and self.wave == 32:
            assert self.driver.call("FuncSetAttribute", function, self.fake.DYNAMIC_SHARED, grid.shared) == 0, self.driver.reason()
        self.driver.native.fake_seed(seed)
        status = self.driver.launch(function, grid, args)
        assert status or counters is None or not counters.any(), "the counters are not zero again"
        return status

    def unfit(self, program: Any, case: Case) -> tuple[int, str]:
        """Status and reason of a launch that fails."""
        out = torch.full((case.x.shape[0], case.weight.shape[0]), torch.nan)
        status = self.status(program, case, out)
        assert status, f"{program} is launched"
        return status, self.driver.reason()

    def run(self, program: Any, case: Case, seed: int = 1) -> torch.Tensor:
        """The output of a launch; fails with the emulator's reason."""
        out = torch.full((*case.x.shape[:-1], case.weight.shape[-2]), torch.nan, dtype=DTYPES[program.out])
        status = self.status(program, case, out, seed)
        assert status == 0, f"{program} {tuple(case.x.shape)} x {tuple(case.weight.shape)}, splits {case.splits}: {self.driver.reason()}"
        return out

    def fault(self, program: Program, case: Case, seed: int = 1) -> str:
        """What is wrong with the output of whole numbers, "" for the right one."""
        out, wanted = self.run(program, case, seed), case.reference().float().to(DTYPES[program.out])
        wrong = (out != wanted).nonzero().tolist()
        if not wrong:
            return ""
        place = tuple(wrong[0])
        sizes = "batches={} m={} n={} k={}".format(*case.sizes) + f" splits={case.splits} seed={seed}"
        return f"{program} {sizes}: {len(wrong)} of {out.numel()} wrong, {place} is {out[place]}, not {wanted[place]}"


def drawn(chosen: random.Random, wave: int) -> Program:
    """A random program that a block can have."""
    family = chosen.choice(["rows", "tiles"])
    step = COLUMNS[wave]
    rows = family == "rows"
    while True:
        program = Program(
            family,
            wave,
            m=chosen.randint(1, 8) if rows else step * chosen.randint(1, 64 // step),
            n_each=chosen.choice([1, 2, 4, 8] if rows else [1, 2, 4]),
            warps_n=chosen.choice([1, 2, 4]),
            warps_k=chosen.choice([1, 2, 4, 8]),
            unroll=chosen.choice([1, 2, 4]),
            vec=chosen.choice([8, 8, 4, 2, 1]),
            dtype=chosen.choice(["bf16", "fp16"]),
            out=chosen.choice(OUTPUTS),
            bias=chosen.choice(["", *OUTPUTS]),
            x_shared=rows and chosen.random() < 0.3,
            stages=chosen.choice([0, 0, 2, 3, 4]),
        )
        if program.stages and (wave == 64 or program.vec == 1):  # copies go 4, 8 or 16 bytes at a time, and AMD has none
            continue
        if program.threads <= MAX_THREADS and program.shared(4096) <= SHARED[wave]:
            return program


def seed_of(*words: Any) -> int:
    """A number from a description: the same in every process."""
    return int(hashlib.sha256(repr(words).encode()).hexdigest()[:8], 16)
