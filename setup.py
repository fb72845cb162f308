"""Build the optional C extension, one for Python 3.10 and later; without a compiler ctypes launches."""

from setuptools import Extension, setup

native = Extension(
    "tunedgemm.backends._native",
    ["core/tunedgemm/backends/native.c"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    extra_compile_args=["-O2"],
    py_limited_api=True,
    optional=True,
)

setup(ext_modules=[native], options={"bdist_wheel": {"py_limited_api": "cp310"}})
