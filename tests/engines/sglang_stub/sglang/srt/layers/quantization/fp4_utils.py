"""The kernel of nvfp4 that a user names or SGLang chooses."""

from __future__ import annotations

from types import SimpleNamespace

#: Its name, for tests.
chosen = ["marlin"]


def get_fp4_gemm_runner_backend() -> SimpleNamespace:
    """Return the kernel."""
    return SimpleNamespace(is_marlin=lambda: chosen[-1] == "marlin")
