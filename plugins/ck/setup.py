"""The C extension: optional, for where there is no C compiler ctypes launches; one build serves all versions of Python from 3.10."""

from setuptools import Extension, setup

shim = Extension(
    "tunedgemm_ck._shim",
    ["tunedgemm_ck/shim.c"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    extra_compile_args=["-O2"],
    py_limited_api=True,
    optional=True,
)

setup(ext_modules=[shim], options={"bdist_wheel": {"py_limited_api": "cp310"}})
