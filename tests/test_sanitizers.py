"""The C extensions under ASan and UBSan."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-shared", "-fPIC")

#: Source and module of each extension.
EXTENSIONS = {
    "core/tunedgemm/backends/native.c": "tunedgemm.backends._native",
    "plugins/hipblaslt/tunedgemm_hipblaslt/shim.c": "tunedgemm_hipblaslt._shim",
}
#: Tests that launch through them; those of other names compile changes of the source.
TESTS = ("tests/backends/test_native.py", "tests/backends/test_native_maps.py", "plugins/hipblaslt/tests/test_native.py")

#: Python source that loads modules from paths and runs pytest.
CHILD = """
import importlib.machinery, importlib.util, sys
import pytest
from tunedgemm.backends import native
from tunedgemm_hipblaslt import native as shim
for user, (name, path) in zip((native, shim), (pair.split("=") for pair in sys.argv[1:3])):
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    user._extension = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(user._extension)
raise SystemExit(pytest.main(sys.argv[3:]))
"""


def runtime(name: str) -> str:
    """Return the path of a runtime library of the compiler, or skip."""
    found = subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"the C compiler has no {name}")
    return found


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.no_cover
def test_the_extensions_have_no_fault_of_memory(tmp_path: Path) -> None:
    """Launches write and read only their own memory, and rely on no undefined behaviour."""
    if shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("needs `cc` and Python.h")
    # C++ exceptions of torch need libstdc++ before ASan looks for it.
    preloaded = [runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")]
    loaded = []
    for source, module in EXTENSIONS.items():
        loaded.append(f"{module}={tmp_path / module}.so")
        flags = (*FLAGS, "-DPy_LIMITED_API=0x030A0000", f"-I{sysconfig.get_path('include')}")
        subprocess.run(["cc", *flags, str(ROOT / source), "-o", f"{tmp_path / module}.so"], check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",  # Python keeps memory until it ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # ASan does not see inside the blocks of Python's own allocator
    }
    command = [sys.executable, "-c", CHILD, *loaded, "-q", "-x", "-p", "no:cacheprovider", "-k", "not matters", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    said = (done.stdout + done.stderr)[-6000:]
    passed = re.search(r"(\d+) passed", said)
    assert done.returncode == 0 and passed and int(passed[1]) > 20, said
