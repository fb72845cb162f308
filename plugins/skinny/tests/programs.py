"""Kernel programs on the fake GPUs: macros, launches and references."""

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
#: Dtypes in the order of the sources' numbers.
INPUTS, OUTPUTS = ("bf16", "fp16", "int8", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp4x2"), ("bf16", "fp16", "fp32")
SCALES = ("none", "tensor", "row", "block")
#: Elements of K, and weight rows, that share a block scale.
BLOCK = 128
ARCHITECTURES = {32: "sm_90", 64: "gfx942"}
#: Rows of x that a matrix instruction takes, by the width of a warp.
COLUMNS = {32: 8, 64: 16}
#: Weight rows of the smallest tile of a warp or group of warps.
UNITS = {"rows": 1, "tiles": 16, "wgmma": 64}
MAX_THREADS = 1024
#: Most bytes of shared memory of a block.
SHARED = {32: 227 << 10, 64: 64 << 10}


def up(size: int, step: int) -> int:
    """Round a size up to a multiple of a step."""
    return -(-size // step) * step


@attrs.frozen
class Program:
    """Macros of a program.

    Attributes:
        family: ``rows``, ``tiles`` or ``wgmma``.
        wave: threads of a warp.
        m: rows of x that it serves.
        vec: elements of one load.
        stages: stages of the weight's ring; 0 for none.
        scale: kind of the operands' scales.
        batched: whether it serves a batch.
        shuffled: weight rows whose pieces are adjacent; 0 for a plain weight.
        wide: whether x is bf16 and the weight mxfp4.
        x_column: floats to whose multiple transposed block scales of x are padded; 0 for row-major.
        The other attributes are those of a solution name, dtypes by their short names.
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
    x_column: int = 0

    @property
    def per_block(self) -> int:
        """Return the weight rows of a block."""
        return UNITS[self.family] * self.n_each * self.warps_n

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return self.wave * self.warps_n * self.warps_k * (4 if self.family == "wgmma" else 1)

    @property
    def span(self) -> int:
        """Return the elements of K of all warps of a block in one iteration."""
        return self.unroll * self.warps_k * {"rows": self.piece * self.wave, "tiles": 4 * self.piece, "wgmma": 8 * self.piece}[self.family]

    @property
    def piece(self) -> int:
        """Return the elements along K of a lane's piece."""
        return 8 if self.dtype in INPUTS[:2] else 16

    def source(self) -> str:
        """Return the text of the program."""
        return "\n".join((KERNELS / f"{part}.h").read_text() for part in ("portable", "finish", self.family))

    def defines(self) -> list[str]:
        """Return the macros as compiler options."""
        values = {
            f"FAMILY_{self.family}": 1, "DTYPE": INPUTS.index(self.dtype), "OUT": OUTPUTS.index(self.out),
            "BIAS": OUTPUTS.index(self.bias) + 1 if self.bias else 0, "M": self.m, "N_EACH": self.n_each, "WARPS_N": self.warps_n,
            "WARPS_K": self.warps_k, "UNROLL": self.unroll, "VEC": self.vec, "WAVE": self.wave, "X_SHARED": int(self.x_shared),
            "STAGES": self.stages, "SCALE": SCALES.index(self.scale), "BATCHED": int(self.batched), "CLUSTER": self.cluster,
            "SHUFFLED": self.shuffled, "X_WIDE": int(self.wide), **({"X_ORDER": self.x_column} if self.x_column else {}),
        }  # fmt: skip
        return [f"-D{name}={value}" for name, value in values.items()]

    def shared(self, per_split: int) -> int:
        """Return the bytes of dynamic shared memory: ring and x, then the warps' sums."""
        sums = 4 * self.warps_k * self.m * (self.per_block + (0 if self.family == "rows" else 4))
        if self.family == "wgmma":
            return max(sums, self.stages * (16 // self.piece) * self.span * (self.per_block + self.m))
        length = up(per_split, self.piece) if self.family == "rows" else self.stages * self.span or up(per_split, 4 * self.piece)
        held = 2 if self.family == "tiles" and self.wave == 32 else 1  # rows of a tile per lane
        ring = 16 * self.stages * self.unroll * self.n_each * held * self.threads
        return max(sums, 16 // self.piece * self.m * length * (4 if self.wide else 1) * self.x_shared + ring)


@attrs.frozen(eq=False)
class Case:
    """Operands of one product or of a batch, and the split of K.

    Attributes:
        x, weight, bias: [m, k], [n, k], [n] or None; of a batch each [B, ...].
        per_split: elements of K of each split but the last.
        x_scale, w_scale: one value each; per row [m] and [n]; or per block [m, ceil(k/128)] and
            [ceil(n/128), ceil(k/128)].
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    per_split: int
    x_scale: torch.Tensor | None = None
    w_scale: torch.Tensor | None = None

    @property
    def splits(self) -> int:
        """Return the number of splits of K."""
        return -(-self.x.shape[-1] // self.per_split)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the products, rows of x, weight rows, and K."""
        return (1 if self.x.dim() == 2 else self.x.shape[0]), self.x.shape[-2], self.weight.shape[-2], self.x.shape[-1]

    def reference(self) -> torch.Tensor:
        """Return the product in float64, [m, n]; of a batch [B, m, n]."""
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
        """Return the sums of the terms' absolute values, [m, n]."""
        out = self.x.double().abs() @ self.weight.double().abs().mT
        return out if self.bias is None else out + self.bias.double().abs()


def whole(program: Program, m: int, n: int, k: int, splits: int = 1, seed: int = 0) -> Case:
    """Make operands of whole numbers, whose sums are exact in float32, in any order.

    Every wrong, missing or repeated element changes the output. Scales are powers of two; a program
    for batches gets three products.
    """
    generator, batch = torch.Generator().manual_seed(seed), (3,) * program.batched

    def drawn(*shape: int, dtype: str, most: int) -> torch.Tensor:
        return torch.randint(-most, most + 1, (*batch, *shape), generator=generator).to(DTYPES[dtype])

    def powers(*shape: int) -> torch.Tensor:
        return 2.0 ** torch.randint(-1, 2, (*batch, *shape), generator=generator)

    bias = drawn(n, dtype=program.bias, most=99) if program.bias else None
    weight = drawn(n, k, dtype=program.dtype, most=9)
    x, blocks = drawn(m, k, dtype=program.dtype, most=9), -(-k // BLOCK)
    sizes = {"none": None, "tensor": ((1,), (1,)), "row": ((m,), (n,)), "block": ((m, blocks), (-(-n // BLOCK), blocks))}[program.scale]
    scales = (None, None) if sizes is None else tuple(powers(*size) for size in sizes)
    return Case(x, weight, bias, split(program, k, splits), *scales)


def normal(program: Program, m: int, n: int, k: int, splits: int = 1, seed: int = 0) -> Case:
    """Make operands of normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(rows, k, generator=generator).to(DTYPES[program.dtype]) for rows in (m, n))
    bias = torch.randn(n, generator=generator).to(DTYPES[program.bias]) if program.bias else None
    return Case(x, weight, bias, split(program, k, splits))


def split(program: Program, k: int, splits: int) -> int:
    """Return the elements of K of a split.

    With block scales whole blocks, or steps of 64 with separate scales.
    """
    steps = BLOCK if program.family == "wgmma" else min(BLOCK, 64 * program.unroll)
    return up(-(-k // splits), steps if program.scale == "block" else program.vec)


def shuffled(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Reorder a weight [..., n, k] like AITER: 16-byte pieces of *rows* rows, then on along K."""
    pieces = weight.contiguous().view(torch.uint8).view(*weight.shape[:-2], weight.shape[-2] // rows, rows, -1, 16)
    return pieces.transpose(-3, -2).contiguous().view(torch.uint8)


class Machine:
    """A fake GPU with warps of *wave* threads, and its loaded programs.

    Attributes:
        compiler, driver: fake libraries.
    """

    def __init__(self, fake: ModuleType, wave: int) -> None:
        self.fake, self.wave = fake, wave
        self.compiler = fake.Compiler("hiprtc" if wave == 64 else "nvrtc")
        self.driver = fake.Driver("hip" if wave == 64 else "cuda")
        self.loaded = functools.cache(self._loaded)

    def options(self, program: Any) -> list[str]:
        """Return the compiler's options."""
        amd = ["--offload-arch=gfx942", "-std=c++17", "-O3"]
        nvidia = ["--gpu-architecture=sm_90", "--std=c++17", "-default-device"]
        return [*(amd if self.wave == 64 else nvidia), *program.defines()]

    def _loaded(self, program: Program) -> Any:
        return self.driver.load(self.compiler.compile(program.source(), self.options(program)))[1]

    def status(self, program: Any, case: Case, out: torch.Tensor, seed: int = 1) -> int:
        """Launch into *out*, over partials of NaN, and return the status."""
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
        if (column := getattr(program, "x_column", 0)) and case.x_scale is not None:
            padding = torch.full((case.x_scale.shape[1], -m % column), torch.nan)
            x_scale = torch.cat((case.x_scale.T, padding), 1).flatten()
            x_scale = x_scale[: len(x_scale) - padding.shape[1]].clone()  # the last block ends without its padding
        given |= {"x_scale": x_scale, "w_scale": case.w_scale}
        pointers = {name: None if tensor is None else tensor.data_ptr() for name, tensor in given.items()}
        args = self.fake.Args(**pointers, n=n, k=k, m=m, splits=case.splits, per_split=case.per_split)
        grid = self.fake.Grid(blocks, case.splits, program.threads, program.shared(case.per_split), batches)
        function = self.loaded(program)
        if grid.shared > 48 << 10 and self.wave == 32:
            assert self.driver.call("FuncSetAttribute", function, self.fake.DYNAMIC_SHARED, grid.shared) == 0, self.driver.reason()
        self.driver.native.fake_seed(seed)
        status = self.driver.launch(function, grid, args)
        assert status or counters is None or not counters.any(), "the counters are not reset"
        return status

    def run(self, program: Any, case: Case, seed: int = 1) -> torch.Tensor:
        """Launch and return the output; fail with the emulator's reason."""
        out = torch.full((*case.x.shape[:-1], case.weight.shape[-2]), torch.nan, dtype=DTYPES[program.out])
        status = self.status(program, case, out, seed)
        assert status == 0, f"{program} {tuple(case.x.shape)} x {tuple(case.weight.shape)}, splits {case.splits}: {self.driver.reason()}"
        return out

    def fault(self, program: Program, case: Case, seed: int = 1) -> str:
        """Return the fault of an output of whole numbers; "" for a right one."""
        out, wanted = self.run(program, case, seed), case.reference().float().to(DTYPES[program.out])
        wrong = (out != wanted).nonzero().tolist()
        if not wrong:
            return ""
        index = tuple(wrong[0])
        sizes = "batches={} m={} n={} k={}".format(*case.sizes) + f" splits={case.splits} seed={seed}"
        return f"{program} {sizes}: {len(wrong)} of {out.numel()} wrong, {index} is {out[index]}, not {wanted[index]}"


def drawn(chosen: random.Random, wave: int) -> Program:
    """Draw a random program that fits a block."""
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
        if program.stages and (wave == 64 or program.vec == 1):  # copies have 4, 8 or 16 bytes; AMD has none
            continue
        if program.threads <= MAX_THREADS and program.shared(4096) <= SHARED[wave]:
            return program


def seed_of(*words: Any) -> int:
    """Hash a description to a number, the same in every process."""
    return int(hashlib.sha256(repr(words).encode()).hexdigest()[:8], 16)
