"""Compile a kernel ahead, into the library's cache in our artifact cache.

DeepGEMM chooses and compiles a kernel within a call. A child process makes that call for a
described GPU, so that no process with a device waits for nvcc.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import attrs
from tunedgemm.plugin import Device, LaunchError, PluginError
from tunedgemm.tools.files import artifact, private_folder

from tunedgemm_deepgemm.library import Access, Installation, Toolkit, run_child, variables
from tunedgemm_deepgemm.names import Kernel
from tunedgemm_deepgemm.product import Product

#: Switch: compile in `bind`, too.
COMPILE = "TUNEDGEMM_DEEPGEMM_COMPILE"
#: Longest compilation, seconds.
_COMPILE_S = 600
_SOURCE = Path(__file__).with_name("sources") / "described_gpu.cpp"


class MissingError(PluginError):
    """A kernel is not compiled."""


@attrs.frozen
class Target:
    """Everything that a compiled kernel depends on.

    Attributes:
        installation, toolkit: the library and its compiler.
        product, kernel: the call and its settings.
        device: the device that it is for.
    """

    installation: Installation
    toolkit: Toolkit
    product: Product
    kernel: Kernel
    device: Device

    @property
    def key(self) -> str:
        """Return the cache key of the list of its files; overlapping launches are no other kernel."""
        kernel = attrs.evolve(self.kernel, pdl=False)
        return (
            f"deepgemm compiled {self.installation.identity}, {self.toolkit.identity}, {self.product}, {kernel.name}, "
            f"{self.device.gfx}, {self.device.cu_num}, {private_folder('deepgemm')}"
        )


def check_compiled(target: Target) -> None:
    """Check that the library's cache has the kernel.

    Raises:
        MissingError: it has not; the message says how to compile it.
    """
    if not _files(target):
        name = f"deepgemm {target.kernel.name} for M={target.product.m}, N={target.product.n}, K={target.product.k}"
        raise MissingError(f"{name} is not compiled; tune the shape on this machine, or set {COMPILE}=1 to compile here")


def ensure_compiled(access: Access, target: Target) -> None:
    """Compile the kernel where the library's cache lacks it.

    Raises:
        PluginError: the library refuses the product.
        LaunchError: it does not compile.
    """
    if not _files(target):
        artifact(target.key, lambda: json.dumps(access.compile(target)).encode(), fresh=True, on_disk=True)


def _files(target: Target) -> list[str]:
    """Return the files of a compiled kernel; none where one is missing."""

    def missing() -> bytes:
        raise MissingError("not compiled")

    try:
        files: list[str] = json.loads(artifact(target.key, missing))
    except MissingError:
        return []
    return files if all(Path(file).is_file() for file in files) else []


def compile_ahead(target: Target) -> list[str]:
    """Compile a kernel in a child process; return its files, one for each kernel of the call.

    Raises:
        PluginError: the library refuses the product.
        LaunchError: it does not compile.
    """
    installation = {name: str(value) for name, value in attrs.asdict(target.installation).items()}
    question = {"installation": installation, "home": str(target.toolkit.home)}
    question |= {"product": attrs.asdict(target.product), "kernel": target.kernel.name, "sms": target.device.cu_num}
    with tempfile.TemporaryDirectory(dir=private_folder("deepgemm")) as folder:
        preloaded = [str(_described_gpu(target, Path(folder))), *filter(None, [os.environ.get("LD_PRELOAD")])]
        done = run_child(question, {**variables(target.toolkit), "LD_PRELOAD": ":".join(preloaded)}, _COMPILE_S)
    files = re.findall(r"^compiled (.+)$", done.stderr, re.MULTILINE)
    if len(files) == len(target.product.compiled_forms()):
        return files
    if "NVCC compilation failed" in done.stdout:
        wrong = [line for line in done.stdout.splitlines() if "error" in line] or done.stdout.splitlines()
        raise LaunchError(f"deepgemm {target.kernel.name} does not compile: {' | '.join(wrong[:3])[:600]}")
    if done.returncode:
        errors = re.findall(r"^\w[\w.]*(?:Error|Exception): .*$", done.stderr, re.MULTILINE)  # a trace of C++ may follow
        raise LaunchError(f"deepgemm {target.kernel.name}: the compiling process failed: {(errors or [done.stderr.strip()])[-1][-300:]}")
    reason = json.loads(done.stdout.splitlines()[-1])[-1]
    raise PluginError(f"deepgemm {target.kernel.name}: the library refuses {target.product}: {short(reason)}")


def short(error: str) -> str:
    """Return an error of the library without the folders of its sources."""
    return re.sub(r"\((?:[^():]*/)?([^():/]+:\d+)\)", r"(\1)", error.strip())[:300]


def _described_gpu(target: Target, folder: Path) -> Path:
    """Compile the description of the device, to preload."""
    library = folder / "libcuda.so.1"
    major, minor = re.fullmatch(r"sm_(\d+)(\d)", target.device.gfx).groups()  # type: ignore[union-attr]
    sizes = [f"-DMAJOR={major}", f"-DMINOR={minor}", f"-DSMS={target.device.cu_num}"]
    options = ["-x", "c++", "-shared", "-Xcompiler", "-fPIC", "-cudart", "none", "-Xlinker", f"-soname={library.name}"]
    command = [str(target.toolkit.nvcc), *options, *sizes, "-o", str(library), str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise LaunchError(f"deepgemm: {target.toolkit.nvcc} does not compile {_SOURCE.name}: {(done.stderr or done.stdout).strip()[:300]}")
    return library
