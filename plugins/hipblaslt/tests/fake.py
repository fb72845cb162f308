"""The fake Lt libraries: compiles them, and calls them by ctypes with independent numbers.

The C source in ``fake/`` documents its checks, its algorithms and its settings (``FAKE_LT_*``).
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).with_name("fake")
FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden")


class NoCompilerError(RuntimeError):
    """Missing C compiler, or one that does not compile the fake libraries."""


#: Folder of the compiled libraries, set by the session's fixture.
cache: Path | None = None


def build(libtype: str, folder: Path | None = None) -> Path:
    """Compile the fake library of a libtype, once for a source and a folder.

    Args:
        libtype: ``cublaslt`` or ``hipblaslt``.
        folder: where to put it; by default `cache`.

    Raises:
        NoCompilerError: ``cc`` is missing or refuses the source.
    """
    folder = folder or cache
    assert folder is not None
    files = sorted(SOURCES.iterdir())
    text = "".join([*FLAGS, *(file.read_text() for file in files)])
    target = folder / hashlib.sha256(text.encode()).hexdigest()[:16] / f"libfake_{libtype}.so"
    if target.exists():
        return target
    compiler = shutil.which("cc")
    if compiler is None:
        raise NoCompilerError("fake Lt libraries: `cc` not found on PATH; install a C compiler (gcc or clang)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        compiled = Path(scratch, target.name)
        sources = [str(file) for file in files if file.suffix in (".c", ".cpp")]
        command = [compiler, *FLAGS, f"-DFAKE_{libtype.upper()}", *sources, "-o", str(compiled), "-lm", "-lpthread", "-lstdc++"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoCompilerError(f"fake {libtype}: {compiler} failed: {done.stderr[-2000:]}")
        compiled.replace(target)  # atomic: another process never loads a partial file
    return target


#: Numbers of the dtypes in both libraries.
TYPES = {
    torch.float32: 0, torch.float16: 2, torch.int8: 3, torch.int32: 10, torch.bfloat16: 14, torch.float8_e4m3fn: 28,
    torch.float8_e4m3fnuz: 1000,
}  # fmt: skip
#: Attribute -> (number in cuBLASLt, in hipBLASLt, bytes, bytes in hipBLASLt where they differ).
LAYOUT = {"order": (1, 3, 4), "batch": (5, 0, 4), "stride": (6, 1, 8), "batch_mode": (8, 7, 4)}
DESC = {
    "pointer_mode": (2, 13, 4), "op_a": (3, 0, 4), "op_b": (4, 1, 4), "epilogue": (7, 2, 4), "bias": (8, 3, 8), "bias_type": (26, 4, 4),
    "scale_a": (17, 5, 8), "scale_b": (18, 6, 8), "scale_d": (20, 8, 8), "mode_a": (31, 31, 4), "mode_b": (32, 32, 4),
    "bias_stride": (10, 23, 8, 4),
}  # fmt: skip
OPS = {"n": (0, 111), "t": (1, 112), "c": (2, 113)}
#: Operands in the order of the library's arguments.
OPERANDS = ("a", "b", "c", "d")


class Library:
    """Fake library and its handle.

    Attributes:
        libtype: ``cublaslt`` or ``hipblaslt``.
        algo_bytes, result_bytes: sizes of an algorithm and of a heuristic's result.
        status: numbers of the statuses by name.
    """

    def __init__(self, libtype: str) -> None:
        self.libtype = libtype
        self.amd = int(libtype == "hipblaslt")
        self.algo_bytes, self.result_bytes = (24, 56) if self.amd else (64, 96)
        names = ("SUCCESS", "NOT_INITIALIZED", "ALLOC_FAILED", "INVALID_VALUE", "EXECUTION_FAILED", "NOT_SUPPORTED")
        self.status = dict(zip(names, (0, 1, 2, 3, 5, 7) if self.amd else (0, 1, 3, 7, 13, 15), strict=True))
        self.compute = {"32f": 2, "32i": 9} if self.amd else {"32f": 68, "32i": 72}
        built = build(libtype)
        # A copy has separate counters and objects.
        copied = Path(tempfile.mkdtemp(dir=cache), f"lib{libtype}.so")
        self.native = ctypes.CDLL(str(shutil.copy(built, copied)))
        self.native.fake_last_reason.restype = ctypes.c_char_p
        self.native.fake_calls.restype = self.native.fake_live.restype = ctypes.c_long
        self.native.fake_cost_us.restype = ctypes.c_double
        self.prefix = "hipblasLt" if self.amd else "cublasLt"
        self.handle = ctypes.c_void_p()
        self.check(self.call("Create", ctypes.byref(self.handle)))

    def call(self, function: str, *arguments: Any) -> int:
        """Call a function, named without its prefix, and return the status."""
        return int(self.native[self.prefix + function](*arguments))

    def check(self, status: int) -> None:
        """Fail with the library's reason where a status is not SUCCESS."""
        assert status == 0, f"{self.named(status)}: {self.reason()}"

    def named(self, status: int) -> str:
        """Return the name of a status."""
        return next(name for name, number in self.status.items() if number == status)

    def reason(self) -> str:
        """Return why the last refused call was refused."""
        return self.native.fake_last_reason().decode()

    def counted(self, function: str) -> int:
        """Return the calls of a function since the last reset."""
        return int(self.native.fake_calls(function.encode()))

    def live(self) -> int:
        """Return the number of live objects."""
        return int(self.native.fake_live())

    def cost(self, algo: Any) -> float:
        """Return the simulated microseconds of an algorithm beyond the product."""
        return float(self.native.fake_cost_us(algo))

    def set(self, kind: str, thing: Any, attribute: tuple[int, ...], value: int) -> int:
        """Set an attribute of `LAYOUT` or `DESC` and return the status."""
        size = attribute[-1 if self.amd else 2]
        return self.call(
            f"{kind}SetAttribute", thing, attribute[self.amd], value.to_bytes(size, "little", signed=True), ctypes.c_size_t(size)
        )


class Product:
    """Product ``d = op(a) op(b)`` whose arguments a test may change before `run`.

    Attributes:
        layouts: operand -> [type, rows, cols, ld].
        of_layout: operand -> attributes to set, by their names in `LAYOUT`.
        desc: attributes to set, by their names in `DESC`.
        pointers: operand -> address; None for a null pointer.
        arguments: replaced arguments of the call: ``handle``, ``desc``, ``algo``, ``workspace``,
            ``workspace_bytes``.
    """

    def __init__(self, library: Library, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, *, ops: str = "tn", **desc: int) -> None:
        """Take row-major tensors [..., cols, rows] of column-major matrices, batches first."""
        self.library = library
        self.tensors = {"a": a, "b": b, "c": d, "d": d}
        self.layouts = {name: [TYPES[x.dtype], x.shape[-1], x.shape[-2], x.stride(-2)] for name, x in self.tensors.items()}
        self.of_layout: dict[str, dict[str, int]] = {name: {} for name in OPERANDS}
        for name, x in self.tensors.items():
            if x.dim() > 2:
                self.of_layout[name] |= {"batch": x.shape[0], "stride": x.stride(0)}
        self.desc = {"op_a": OPS[ops[0]][library.amd], "op_b": OPS[ops[1]][library.amd], **desc}
        self.pointers: dict[str, int | None] = {name: x.data_ptr() for name, x in self.tensors.items()}
        integer = a.dtype is torch.int8
        self.compute, self.scale_type = library.compute["32i" if integer else "32f"], TYPES[torch.int32 if integer else torch.float32]
        scalar: Any = ctypes.c_int32 if integer else ctypes.c_float
        self.alpha, self.beta = scalar(1), scalar(0)
        self.arguments: dict[str, Any] = {}
        self.max_workspace = 32 << 20

    @contextmanager
    def descriptors(self) -> Iterator[tuple[Any, list[Any]]]:
        """Yield the matmul descriptor and the four layouts."""
        lib, created = self.library, []
        try:
            desc = ctypes.c_void_p()
            lib.check(lib.call("MatmulDescCreate", ctypes.byref(desc), self.compute, self.scale_type))
            created.append(("MatmulDesc", desc))
            for name, value in self.desc.items():
                lib.check(lib.set("MatmulDesc", desc, DESC[name], value))
            for operand in OPERANDS:
                dtype, rows, cols, ld = self.layouts[operand]
                layout = ctypes.c_void_p()
                sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(ld))
                lib.check(lib.call("MatrixLayoutCreate", ctypes.byref(layout), dtype, *sizes))
                created.append(("MatrixLayout", layout))
                for name, value in self.of_layout[operand].items():
                    lib.check(lib.set("MatrixLayout", layout, LAYOUT[name], value))
            yield desc, [layout for _, layout in created[1:]]
        finally:
            for kind, thing in created:
                lib.check(lib.call(f"{kind}Destroy", thing))

    def heuristic(self, count: int = 8) -> tuple[int, list[tuple[bytes, int]]]:
        """Return the status, and the algorithms with their workspaces, best first."""
        lib, preference, returned = self.library, ctypes.c_void_p(), ctypes.c_int()
        results = ctypes.create_string_buffer(count * lib.result_bytes)
        lib.check(lib.call("MatmulPreferenceCreate", ctypes.byref(preference)))
        lib.check(lib.set("MatmulPreference", preference, (1, 1, 8), self.max_workspace))
        with self.descriptors() as (desc, layouts):
            given = (self.arguments.get("handle", lib.handle), self.arguments.get("desc", desc), *layouts, preference)
            status = lib.call("MatmulAlgoGetHeuristic", *given, count, results, ctypes.byref(returned))
        lib.check(lib.call("MatmulPreferenceDestroy", preference))
        parts = [results.raw[i * lib.result_bytes : (i + 1) * lib.result_bytes] for i in range(returned.value)]
        return status, [(x[: lib.algo_bytes], int.from_bytes(x[lib.algo_bytes : lib.algo_bytes + 8], "little")) for x in parts]

    def run(self, algo: bytes | None = None, workspace: torch.Tensor | None = None) -> int:
        """Run an algorithm and return the status; None lets the library choose."""
        lib = self.library
        size = 0 if workspace is None else workspace.nbytes
        with self.descriptors() as (desc, layouts):
            a, b, c, d = ((ctypes.c_void_p(self.pointers[name]), layout) for name, layout in zip(OPERANDS, layouts, strict=True))
            given = {"handle": lib.handle, "desc": desc, "alpha": ctypes.byref(self.alpha), "d_layout": d[1]} | self.arguments
            given.setdefault("workspace", None if workspace is None else workspace.data_ptr())
            front = (given["handle"], given["desc"], given["alpha"], *a, *b, ctypes.byref(self.beta), *c, d[0], given["d_layout"])
            space = (ctypes.c_void_p(given["workspace"]), ctypes.c_size_t(given.get("workspace_bytes", size)))
            return lib.call("Matmul", *front, algo, *space, None)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw normal numbers, or integers from -127 to 127 for int8."""
    return torch.randint(-127, 128, shape, dtype=dtype) if dtype is torch.int8 else torch.randn(shape).to(dtype)


def aligned(size: int) -> torch.Tensor:
    """Return zeroed bytes at a multiple of 256."""
    content = torch.zeros(size + 256, dtype=torch.uint8)
    return content[-content.data_ptr() % 256 :][:size]


def linear(
    library: Library, dtype: torch.dtype, out: torch.dtype | None = None, m: int = 5, n: int = 48, k: int = 64, **desc: int
) -> Product:
    """Return ``x[m, k] @ w[n, k].T`` as a linear layer's product: the weight is A."""
    x, w = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype)
    stored = torch.int32 if dtype is torch.int8 else out or (torch.bfloat16 if dtype.itemsize == 1 else dtype)
    return Product(library, w, x, torch.empty(m, n, dtype=stored), **desc)
