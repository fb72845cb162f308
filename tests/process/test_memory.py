"""memory: which exceptions stand for a lack of memory."""

import errno

import pytest
import torch
from tunedgemm.errors import LaunchError
from tunedgemm.process.memory import is_out_of_memory

LACKS = (
    MemoryError(),
    MemoryError("std::bad_alloc"),
    RuntimeError("std::bad_alloc"),
    torch.OutOfMemoryError("full"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 99 bytes."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    LaunchError("cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY"),
    LaunchError("rocblas_status_memory_error"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    RuntimeError("unable to allocate 2.5 GiB for a workspace"),
    RuntimeError("failed to allocate 1024 bytes of device memory"),
)


@pytest.mark.parametrize("error", LACKS, ids=str)
def test_a_lack_of_memory(error):
    """Each allocator's error counts, and so does a plugin's error that was raised from it."""
    wrapped = LaunchError("mine: failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(error) and is_out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        LaunchError("the compiler was killed by SIGKILL, probably out of memory; reduce --jobs"),
        RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"),
        ValueError("not enough memory for the reader"),
        RuntimeError("read out of memory bounds"),
        RuntimeError("not enough memory bandwidth"),
        RuntimeError("ran out of registers: out of memory for register allocation"),
        RuntimeError("ptxas: failed to allocate registers"),
        RuntimeError("cannot allocate 260 VGPRs"),
        RuntimeError("failed to allocate TMEM columns: 512 requested"),
        RuntimeError("cannot allocate shared memory of 300000 bytes"),
        RuntimeError("cannot allocate 300000 bytes of shared memory"),
    ],
    ids=str,
)
def test_other_errors(error):
    """Faults of kernels and resources of a multiprocessor do not count, also while one is handled."""
    error.__context__ = MemoryError()
    assert not is_out_of_memory(error)


def test_errors_that_are_their_own_cause():
    """Errors that were raised from each other in a circle end the search."""
    first, second = RuntimeError("first"), LaunchError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
    first.__cause__ = first
    assert not is_out_of_memory(first)
