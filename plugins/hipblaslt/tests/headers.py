"""The headers of cuBLASLt, where they are installed."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path


def folders() -> Iterator[Path]:
    """Where headers of CUDA may be: a toolkit, the wheels of NVIDIA, and Triton's copy of the toolkit's own."""
    toolkits = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    yield from (Path(folder, "include") for folder in toolkits if folder)
    for place in sys.path:
        for inside in ("nvidia/cu13", "nvidia/cublas", "nvidia/cuda_runtime", "triton/backends/nvidia"):
            yield Path(place, inside, "include")


def _header(name: str) -> Path | None:
    return next((folder / name for folder in folders() if (folder / name).is_file()), None)


@functools.cache
def text() -> str:
    """The headers without their comments, "" where one is missing."""
    files = [_header(name) for name in ("cublasLt.h", "cublas_api.h", "library_types.h")]
    if None in files:
        return ""
    found = "\n".join(file.read_text() for file in files if file)
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", found, flags=re.DOTALL)
