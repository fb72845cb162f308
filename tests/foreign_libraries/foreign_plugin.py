"""Backends over libraries that users install, each sound or broken in one way.

A library is a package ``kernels_NAME``, which records each process that imports it.
"""

import importlib.metadata
import importlib.util
import sys

from tunedgemm.plugin import Backend, Launcher, Platform, Shape, Solution, Unsupported, hookimpl
from tunedgemm.tools.launching import load_fault


class Foreign:
    """Hooks over one library, which is loaded in a child first."""

    def __init__(self, name):
        self.name, self.answers = name, []

    def _refusal(self):
        """Return why the library cannot be used, or None."""
        package = f"kernels_{self.name}"
        if importlib.util.find_spec(package) is None:
            return Unsupported(f"{package}: not installed; pip install {package}")
        if not (version := importlib.metadata.version(package)).startswith("2."):
            return Unsupported(f"{package}: must be 2.0 to 2.9 (got {version})")
        fault = load_fault(f"import {package}", timeout=1.0 if self.name == "hangs" else 120.0)
        return Unsupported(f"{package}: does not load: {fault}") if fault else None

    @hookimpl
    def supports(self, shape: Shape):
        """Answer by the library once the static limits allow the shape."""
        if self.name == "gpu":
            return Unsupported("device must be an sm_90")
        self.answers = self.answers or [self._refusal()]
        return self.answers[0]

    @hookimpl
    def enumerate_solutions(self):
        """List the only kernel."""
        return [Solution(f"foreign_{self.name}", "product")]

    @hookimpl
    def bind(self):
        """Load the library here."""
        __import__(f"kernels_{self.name}")
        return Launcher(sys.modules[f"kernels_{self.name}"].product)


def __getattr__(name):
    platforms = (Platform(("sm_90" if name == "gpu" else "cpu",), needs=("kernels 2.0 to 2.9",)),)
    return Backend(f"foreign_{name}", Foreign(name), ops=("a16w16",), platforms=platforms)
