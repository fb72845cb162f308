"""Emulate a CUDA driver over host memory: it loads text, which runs on the emulator."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import attrs
from tunedgemm.tools.launching import Driver
from tunedgemm_asm.abi import Abi
from tunedgemm_asm.driver import CUDA
from tunedgemm_asm.ptx.abi import MAP_BYTES, MAPS, abi_of

from .formats import BYTES
from .launch import Launch, run
from .memory import Memory, described, operand_of

#: Type of a descriptor's elements -> their bytes: UINT8, FLOAT16, BFLOAT16.
_TYPES = {0: 1, 6: 2, 9: 2}
#: Bytes of a box's rows -> CU_TENSOR_MAP_SWIZZLE_32B, _64B, _128B.
_SWIZZLES = {32: 1, 64: 2, 128: 3}
_HEAD = re.compile(r"// (ptx_(\d+)x(\d+)\w+): (\w+) to (\w+), bias (\w+)(?:, scales by (\w+))?")


@attrs.define(eq=False)
class Cuda:
    """The fake driver and a record of its calls.

    Attributes:
        seed: of the next launch.
        texts: what was loaded.
        descriptors: how many were made.
        failing: the status of the next launch; it fails once.
    """

    seed: int = 0
    texts: list[str] = attrs.field(factory=list, repr=False)
    descriptors: int = 0
    failing: int = 0
    faults: list[str] = attrs.field(factory=list)
    kept: list[Any] = attrs.field(factory=list)

    def driver(self) -> Driver:
        """Return the driver with these functions."""
        own = {"load": self._load, "function": self._function, "launch": self._launch, "set": self._set, "describe": self._describe}
        functions = {}
        for word, (_, arguments) in CUDA.functions.items():
            # Pointers to handles come as addresses here.
            plain = [ctypes.c_void_p if hasattr(each, "_type_") and not isinstance(each._type_, str) else each for each in arguments]
            callback = ctypes.CFUNCTYPE(ctypes.c_int, *plain)(own[word])
            self.kept.append(callback)
            functions[word] = ctypes.cast(callback, ctypes.CFUNCTYPE(ctypes.c_int))
            functions[word].argtypes, functions[word].restype = arguments, ctypes.c_int
        functions["error"] = self._error
        return Driver(CUDA, "", functions)

    def _error(self, status: int, found: Any) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_char_p))[0] = f"fake status {status}".encode()
        return 0

    def _load(self, module: int, code: int) -> int:
        self.texts.append(ctypes.string_at(code).decode())
        ctypes.c_void_p.from_address(module).value = len(self.texts)
        return 0

    def _function(self, function: int, module: int, name: bytes) -> int:
        ctypes.c_void_p.from_address(function).value = module
        return 0 if f".entry {name.decode()}(" in self.texts[module - 1] else 500

    def _set(self, function: int, attribute: int, value: int) -> int:
        return 0 if attribute == 8 and 0 < value <= 232448 else 1

    def _describe(self, to: int, kind: int, rank: int, *told: int) -> int:
        address, sizes, strides, box, every, *kinds = told
        if to % 64 or rank not in (2, 3) or address % 16:
            return 1
        k, rows, *columns = (ctypes.c_uint64 * rank).from_address(sizes)
        stride, *further = (ctypes.c_uint64 * (rank - 1)).from_address(strides)
        deep, high, *thick = (ctypes.c_uint32 * rank).from_address(box)
        steps = list((ctypes.c_uint32 * rank).from_address(every))
        size = _TYPES.get(kind, 0)
        if stride % 16 or stride != size * k or high > 256 or steps != [1] * rank or kinds != [0, _SWIZZLES.get(deep * size), 3, 0]:
            return 1
        if columns and (k != deep or further != [rows * stride] or thick != [1]):
            return 1
        self.descriptors += 1
        whole = k * columns[0] if columns else k
        ctypes.memmove(to, described(address, rows, whole, high, size, deep * size, *columns), MAP_BYTES)
        return 0

    def _launch(self, function: int, *told: Any) -> int:
        grid, threads, shared, parameters, extra = told[:3], told[3:6], told[6], told[8], told[9]
        if self.failing:
            status, self.failing = self.failing, 0
            return status
        text = self.texts[function - 1]
        if extra or not parameters or f".reqntid {threads[0]}, 1, 1" not in text or grid[1:] != (1, 1):
            return 1
        arguments = ctypes.string_at(ctypes.c_uint64.from_address(parameters).value, abi_in(text).size)
        try:
            run(text, Launch(grid[0], shared, arguments), memory_of(text, arguments), self.seed)
        except AssertionError as fault:
            self.faults.append(str(fault))
            return 700
        return 0


def _head(text: str) -> tuple[str, ...]:
    """Return name, tile, dtypes and kind of scales from a text's header."""
    match = _HEAD.match(text)
    assert match, text[:200]
    return match.groups()


def abi_in(text: str) -> Abi:
    """Return the layout of a text's arguments."""
    name, *_, scale = _head(text)
    return abi_of(scale or "none", "_b" in name)


def memory_of(text: str, arguments: bytes) -> Memory:
    """Return the host memory that the arguments name, sized by the arguments."""
    memory = Memory()
    told = {field.name: int.from_bytes(arguments[field.offset : field.offset + field.bytes], "little") for field in abi_in(text).fields}
    for offset in MAPS.values():
        address, rows, row = operand_of(arguments[offset : offset + MAP_BYTES])
        memory.take(address, rows * row, False)
    name, *tile, _, out, bias, scale = _head(text)
    m, n = (told["rows_b"], told["rows_a"]) if "_swap" in name else (told["rows_a"], told["rows_b"])
    memory.take(told["out"], m * n * BYTES[out], True)
    if told["bias"]:
        memory.take(told["bias"], n * BYTES[bias], False)
    for word, rows, lines in (("x_scale", m, m), ("w_scale", n, -(-n // 128))) if scale else ():
        # The last step of padded scales of x ends without its padding.
        padding = -m % 4 * (told["steps"] - 1) if word == "x_scale" and " and padded" in text.partition("\n")[0] else 0
        memory.take(told[word], 4 * {"tensor": 1, "row": rows, "block": lines * told["steps"] + padding}[scale], False)
    if told["workspace"]:
        # A tile's share: 128 threads times their sums for each consumer that has some; the whole of
        # them is the grid's tile, in float32.
        tile_m, tile_n = map(int, tile)
        cluster = 2 if "reqnctapercluster" in text else 1
        consumers = 1 if "_t_" in name else (int(text.split(".reqntid ", 1)[1].split(",", 1)[0]) - 128) // 128
        memory.take(told["workspace"], told["tiles"] * cluster * told["splits"] * tile_m * tile_n * 4, True)
        memory.take(told["counters"], told["tiles"] * cluster * consumers * 4, True)
    return memory
