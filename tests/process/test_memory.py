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
    ],
    ids=str,
)
def test_other_errors(error):
    """Faults of kernels and resources of a multiprocessor do not count, also while one is handled."""
    error.__context__ = MemoryError()
    assert not is_out_of_memory(error)
