"""A CUDA driver that records launches, made of C where there is a compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def recording_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a libcuda.so.1 that needs no device."""
    triton = pytest.importorskip("triton")
    compiler, headers = shutil.which("cc"), Path(triton.__file__).parent / "backends/nvidia/include"
    if not compiler or not (headers / "cuda.h").is_file():
        pytest.skip("a C compiler and CUDA's headers are needed")
    folder, source = tmp_path_factory.mktemp("driver"), Path(__file__).with_name("fake_cuda.c")
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{headers}", "-o", str(folder / "libcuda.so.1"), str(source)]
    subprocess.run(command, check=True)
    return folder
