"""cuBLASLt's headers, where they are installed."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path


def include_folders() -> Iterator[Path]:
    """Yield folders that may hold CUDA's headers: toolkits, NVIDIA's wheels, Triton's copy."""
    toolkits = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    yield from (Path(folder, "include") for folder in toolkits if folder)
    for root in sys.path:
        for inside in ("nvidia/cu13", "nvidia/cublas", "nvidia/cuda_runtime", "triton/backends/nvidia"):
            yield Path(root, inside, "include")


@functools.cache
def read_headers() -> str:
    """Return the headers without comments; "" where one is missing."""
    files = [_find_header(name) for name in ("cublasLt.h", "cublas_api.h", "library_types.h")]
    if None in files:
        return ""
    text = "\n".join(file.read_text() for file in files if file)
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)


def _find_header(name: str) -> Path | None:
    return next((folder / name for folder in include_folders() if (folder / name).is_file()), None)
