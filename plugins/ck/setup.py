"""Handle PREBUILD_KERNELS=1."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class Build(build_py):
    """Compile with PREBUILD_KERNELS=1, as in AITER, what the tables in effect name.

    The objects go into the installing user's artifact cache.
    """

    def run(self):
        super().run()
        if os.environ.get("PREBUILD_KERNELS") == "1":
            code = "from tunedgemm_ck.command import prebuild_at_install; raise SystemExit(prebuild_at_install())"
            here = os.pathsep.join([str(Path(__file__).parent.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
            if subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": here}, check=False).returncode:
                hint = "pip install --no-build-isolation builds where tunedgemm is installed; `tunedgemm ck prebuild` builds later"
                sys.stderr.write(f"PREBUILD_KERNELS=1: some kernels were not built; {hint}\n")


setup(cmdclass={"build_py": Build})
