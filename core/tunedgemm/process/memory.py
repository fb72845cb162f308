"""Recognise out-of-memory errors."""

from __future__ import annotations

import errno
import re
import sys

from tunedgemm.process.plugin_guard import described

#: Messages of torch's allocators, the C++ library and drivers in a RuntimeError; whole phrases, as
#: kernels also report "out of memory bounds" or "cannot allocate registers".
_ALLOCATORS = re.compile(
    r"(?:out of|not enough|insufficient) memory(?! ?\w)|bad_alloc\b|bad allocation"
    r"|(?:can't|cannot|failed to|could not|unable to) allocate (?:(?:device |host |pinned )?memory\b|"
    r"[\d.]+ ?(?:bytes|[KMGTPE]i?B)\b(?! (?:of|in) (?:shared|local|constant)))",
    re.IGNORECASE,
)
#: Of libraries, in errors of any class.
_CODES = re.compile(
    r"(?:STATUS|RESULT|ERROR|hipError|cudaError)_?(?:ALLOC_?FAILED|MEMORY_ERROR|OUT_?OF_?(?:HOST_|DEVICE_)?MEMORY|MemoryAllocation)",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Check whether an error, or one in its chain, is out of memory, which blames no solution."""
    torch = sys.modules.get("torch")
    classes = (MemoryError, torch.OutOfMemoryError) if torch is not None else (MemoryError,)
    seen: set[int] = set()  # an error may be raised from itself
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, classes) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        text = described(error)
        if _CODES.search(text) or (isinstance(error, RuntimeError) and _ALLOCATORS.search(text)):
            return True
        error = error.__cause__
    return False
