"""Child: launch programs with a CUDA driver that only records, and print what it got, as JSON.

It reads a JSON list of cases: kernel name, split_k, ``shape`` as a dict, and whether Triton's
launcher is to be ``unknown``. Each is launched by a call of ours and as Triton's own JIT does. The
environment puts the driver that fake_cuda.c makes where Triton looks for one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import re
import sys
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.nvidia.driver import CudaDriver
from triton.tools.tensor_descriptor import TensorDescriptor
from tunedgemm.plugin import Device, Shape, device_of
from tunedgemm.testing.launching import plain_weight
from tunedgemm.tools.tables import ops
from tunedgemm_triton import launch, loading
from tunedgemm_triton.families import family_of

_STREAM, _BYTES = 77, {"u64": 8, "u32": 4, "b64": 8, "b32": 4}
_empty = torch.empty


def _on_cpu(*size: Any, device: Any = None, **others: Any) -> Any:
    """Allocate where there is memory."""
    del device
    return _empty(*size, **others)


class _Driver:
    """The recording driver, and Triton's driver on top of it."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        self.library.fake_head.restype = ctypes.c_char_p
        active = CudaDriver()
        active.get_current_device = lambda: 0
        active.get_device_capability = lambda index: (9, 0)
        triton.runtime.driver.set_active(active)

    def record(self, ptx: str, start: Any) -> tuple[str, list[str]]:
        """Run a launch; return the grid and the rest of the configuration, and the parameters."""
        entry = re.search(r"\.entry[^(]*\((.*?)\)", ptx, re.DOTALL)[1]
        parameters = [re.search(r"\.(\w+) (?:\.ptr .*)?\w+(?:\[(\d+)\])?,?$", line) for line in entry.strip().splitlines()]
        sizes = [int(found[2]) if found[2] else _BYTES[found[1]] for found in parameters]
        self.library.fake_sizes(len(sizes), (ctypes.c_size_t * len(sizes))(*sizes))
        start()
        buffer = (ctypes.c_ubyte * 8192)()
        self.library.fake_recorded(buffer)
        content = bytes(buffer)
        values = [content[sum(sizes[:index]) : sum(sizes[: index + 1])].hex() for index in range(len(sizes))]
        return self.library.fake_head().decode(), values


def _jit_arguments(step: Any, named: dict[str, Any]) -> list[Any]:
    """Return the arguments that Triton's JIT has: tensors, descriptors, numbers and constants."""
    kinds, values, constants = dict(step.program.types), dict(step.values), dict(step.program.constants)

    def argument(name: str) -> Any:
        if name in constants:
            return constants[name]
        value = values[name]
        if isinstance(value, int):
            return value
        found = named[value.partition("+")[0]]
        if box := re.search(r"\[(.*)\]", kinds[name]):
            return TensorDescriptor.from_tensor(found, [int(size) for size in box[1].split(",")])
        return found

    return [argument(name) for name in step.program.source.arg_names]


def run(driver: _Driver, case: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration and the parameters of both launches."""
    shape, device = Shape.from_dict(case["shape"]), Device("sm_90", 4)
    family = family_of(shape.op)
    plan = family.plan_of(family.parse_name(case["kernel"]), case["split_k"], shape, device)
    [step], seen, made, warnings = plan.steps, dict[str, Any](), dict[str, Any](), list[str]()

    def counted(device: Any) -> Any:
        return lambda address: made.setdefault("counters", torch.zeros(1024, dtype=torch.int32))

    def allocated(*size: Any, **others: Any) -> Any:
        found = _on_cpu(*size, **others)
        made["partial" if others.get("dtype") is torch.uint8 else "out"] = found
        return found

    def loaded(kernel: Any, run: Any, index: int) -> Any:
        made["kernel"], made["run"] = kernel, run
        return function_of(kernel, run, index)

    function_of = loading.function_of
    unknown = mock.patch.object(loading, "_direct", side_effect=ValueError) if case.get("unknown") else contextlib.nullcontext()
    operands = tuple(map(plain_weight, ops()[shape.op].make_inputs(shape, torch.device("cpu"), 1)))
    with (
        mock.patch.object(torch.cuda, "device", lambda index: contextlib.nullcontext()),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: _STREAM, create=True),
        mock.patch.object(launch, "counters_of", counted),
        mock.patch.object(torch, "empty", allocated),
        mock.patch.object(loading, "warn_once", warnings.append),
        mock.patch.object(loading, "function_of", loaded),
        unknown,
    ):
        loading.load.cache_clear()
        function = loading.load(step.program, "sm_90", 0)
        call, kernel = launch.call_of(plan, [function], shape, device_of(-1)), made.pop("kernel")
        ptx, ours = kernel.asm["ptx"], partial(call, *operands)
        seen["ours"] = driver.record(ptx, ours)
        named = {name.removesuffix("?"): value for name, value in zip(ops()[shape.op].operands, operands, strict=False)} | made
        triton.set_allocator(lambda size, alignment, stream: made["partial"])
        head = (*step.grid, _STREAM, kernel.function, kernel.packed_metadata, None, None, None)
        seen["triton"] = driver.record(ptx, partial(made["run"], *head, *_jit_arguments(step, named)))
        del kernel
        gc.collect()
        seen["again"], _ = driver.record(ptx, ours)
    return {**seen, "warnings": warnings, "scratch": function.scratch}


if __name__ == "__main__":
    recorder = _Driver()
    json.dump([run(recorder, case) for case in json.load(sys.stdin)], sys.stdout)
