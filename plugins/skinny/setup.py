"""Build the C extension, for Python 3.10 and later. It is optional: without it ctypes launches."""

from setuptools import Extension, setup

shim = Extension(
    "tunedgemm_skinny._shim",
    ["tunedgemm_skinny/shim.c"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    extra_compile_args=["-O2"],
    py_limited_api=True,
    optional=True,
)

setup(ext_modules=[shim], options={"bdist_wheel": {"py_limited_api": "cp310"}})
