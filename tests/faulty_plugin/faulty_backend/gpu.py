"""Kernels that break a GPU's context or keep it busy for two minutes, and one correct kernel.

``torch.cuda._compile_kernel`` compiles the CUDA source with the compiler that torch brings.
"""

import sys
from collections.abc import Iterator
from typing import Any

from tunedgemm.plugin import Backend, Device, Launcher, Shape, Solution, Unsupported, hookimpl

from faulty_backend import _kinds

LIBTYPE = "faulty_gpu"

#: Seconds that ``spins`` keeps one thread of the device busy.
SPIN_SECONDS = 120
#: Launches after which ``illegal_address_later`` writes to an unmapped address: more than a check
#: makes, fewer than one sample.
LATE = 40

#: solution -> its correct status words
EXPECTED: dict[str, tuple[str, ...]] = {
    "illegal_address": ("fault",),
    "spins": ("hung",),
    "traps": ("fault",),
    "out_of_memory": ("out_of_memory",),
    "good": ("ok",),
    "illegal_address_later": ("fault",),
}

_SOURCE = r"""
extern "C" __global__ void illegal_address(unsigned int *launches, int address)
{
    *(volatile int *)(size_t)address = 1;
}

extern "C" __global__ void illegal_address_later(unsigned int *launches, int limit)
{
    if (atomicAdd(launches, 1u) >= (unsigned int)limit)
        *(volatile int *)(size_t)16 = 1;
}

extern "C" __global__ void traps(unsigned int *launches, int unused)
{
    asm volatile("trap;");
}

extern "C" __global__ void spins(unsigned int *launches, int seconds)
{
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < (unsigned long long)seconds * 1000000000ull);
    *launches = 1u;
}
"""
#: kernel -> its second argument
_NUMBERS = {"illegal_address": 16, "illegal_address_later": LATE, "traps": 0, "spins": SPIN_SECONDS}


@hookimpl
def supports(shape: Shape, device: Device) -> Unsupported | None:
    """Accept plain operands of one dtype without bias on an NVIDIA device."""
    if device.kind != "nvidia":
        return Unsupported("its kernels are CUDA")
    if shape.layout != "row" or shape.scale != "none" or shape.bias or shape.outdtype != shape.dtype:
        return Unsupported("takes plain operands of one dtype without bias")
    return None


@hookimpl
def enumerate_solutions() -> Iterator[Solution]:
    """Return one of each kind."""
    return (Solution(LIBTYPE, name) for name in _kinds(tuple(EXPECTED)))


@hookimpl
def bind(solution: Solution, device: Device) -> Launcher | Unsupported:
    """Return a launcher of torch's product followed by the kernel of the solution's name."""
    import torch

    name = solution.kernel_name
    if name == "good":
        return Launcher(torch.nn.functional.linear)
    if name == "out_of_memory":
        return Launcher(lambda x, weight: x.new_empty(1 << 50), graph_safe=False)
    if name not in _NUMBERS:
        return Unsupported(f"no kernel {name!r}")
    kernel = torch.cuda._compile_kernel(_SOURCE, name)
    launches = torch.zeros(1, dtype=torch.int32, device=device.torch_device)

    def call(x: Any, weight: Any) -> Any:
        out = torch.nn.functional.linear(x, weight)
        kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[launches, _NUMBERS[name]])
        return out

    return Launcher(call)


backend = Backend(LIBTYPE, sys.modules[__name__], ops=("a16w16",))
