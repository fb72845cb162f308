"""Load code objects, and check that the device can run their kernels."""

from __future__ import annotations

import functools

import attrs
from tunedgemm.plugin import LaunchError, OutOfResources
from tunedgemm.tools.launching import Driver, KernelFunction, driver_interface, load_function

#: Values of ``CUfunction_attribute``; those of ``hipFunction_attribute`` are the same.
MAX_THREADS, LOCAL_BYTES, REGISTERS = 0, 3, 4

CUDA = driver_interface("skinny", "nvidia", "get", "set")
HIP = driver_interface("skinny", "amd", "get")
INTERFACES = {interface.kind: interface for interface in (CUDA, HIP)}


@attrs.frozen(eq=False)
class LoadedKernel:
    """A kernel loaded on a device, and the resources that it needs.

    Attributes:
        function: the driver's function.
        threads: most threads of a block with these registers.
        registers: 32-bit registers per thread.
        local_bytes: local memory per thread, mostly spilled registers.
    """

    function: KernelFunction
    threads: int
    registers: int
    local_bytes: int

    def allow(self, threads: int, shared: int) -> None:
        """Request blocks of so many threads with so many bytes of dynamic shared memory.

        Raises:
            OutOfResources: the device cannot run them.
        """
        if threads > self.threads:
            raise OutOfResources(f"threads of a block with {self.registers} registers each must be at most {self.threads} (got {threads})")
        try:
            self.function.grant(shared)
        except LaunchError as error:
            raise OutOfResources(f"shared memory of {shared} bytes refused: {error}") from error


@functools.cache
def load_kernel(driver: Driver, code: bytes, entry: str, index: int) -> LoadedKernel:
    """Load the kernel *entry* of a code object, once per device; index -1 is host memory.

    Raises:
        LaunchError: the driver refuses the code object.
    """
    function = load_function(driver, code, entry, index)
    return LoadedKernel(function, *(function.attribute(number) for number in (MAX_THREADS, REGISTERS, LOCAL_BYTES)))
