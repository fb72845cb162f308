"""Build the C extension, one for Python 3.10 and later; without a C compiler ctypes launches."""

from setuptools import Extension, setup

shim = Extension(
    "tunedgemm_asm._shim",
    ["tunedgemm_asm/shim.c"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    extra_compile_args=["-O2"],
    py_limited_api=True,
    optional=True,
)

setup(ext_modules=[shim], options={"bdist_wheel": {"py_limited_api": "cp310"}})
