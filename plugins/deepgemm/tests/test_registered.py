"""Load extensions that register operations of torch, as of DeepGEMM 2.8, in private copies."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Shape, Unsupported
from tunedgemm_deepgemm import child, deepgemm, library, registered

PRESENT, SHAPE = Device("sm_90", 132, "nvidia-h200", 0), Shape("a16w16", 4, 64, 64)
BLOCKS = Shape("a8w8_blockscale", 4, 128, 128, "fp8_e4m3fn", "bf16", scale="block")
#: Schemas of vLLM 0.33's copy, as far as the plugin calls it, and where they are implemented.
SCHEMAS = {
    "init(str library_root_path, str python_package_name='deep_gemm') -> ()": "CompositeExplicitAutograd",
    "set_num_sms(int new_num_sms) -> ()": "CompositeExplicitAutograd",
    "get_num_sms() -> int": "CompositeExplicitAutograd",
    "set_pdl(bool new_enable_pdl) -> ()": "CompositeExplicitAutograd",
    "set_block_size_multiple_of(int[] new_value) -> ()": "CompositeExplicitAutograd",
    "bf16_gemm_nt(Tensor a, Tensor b, Tensor(d!) d, Tensor? c=None, str compiled_dims='nk', float? alpha=None) -> ()": "CUDA",
    "fp8_fp4_gemm_nt(Tensor a, Tensor sfa, Tensor b, Tensor sfb, Tensor(d!) d, Tensor? c=None, int[3]? recipe=None, "
    "str compiled_dims='nk', int epilogue_kind=0) -> ()": "CUDA",
}
#: An extension without torch's headers, with an inline variable, which the linker makes one for the
#: process. A product counts as 1000 SMs.
SOURCE = """
#include <cstdint>
#include <cstring>
struct Library;
extern "C" {
int aoti_torch_library_init_fragment(const char*, const char*, uint32_t, Library**);
int aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, Library**);
int aoti_torch_library_def(Library*, const char*);
int aoti_torch_library_impl(Library*, const char*, void (*)(uint64_t*, uint64_t, uint64_t));
}
inline int64_t num_sms = 0;
int64_t* joined() { return &num_sms; }
void set_num_sms(uint64_t* stack, uint64_t, uint64_t) { std::memcpy(joined(), stack, 8); }
void get_num_sms(uint64_t* stack, uint64_t, uint64_t) { std::memcpy(stack, joined(), 8); }
void product(uint64_t*, uint64_t, uint64_t) { *joined() += 1000; }
void nothing(uint64_t*, uint64_t, uint64_t) {}
static const char* own = "deep_gemm";
struct Registration {
    Registration() {
        Library* library = nullptr;
        static const struct { const char *name, *schema, *key; void (*function)(uint64_t*, uint64_t, uint64_t); } all[] = { ROWS };
        for (const auto& one : all) {
            aoti_torch_library_init_fragment(own, "", 1, &library);
            aoti_torch_library_def(library, one.schema);
            aoti_torch_library_init_impl(own, one.key, "", 1, &library);
            aoti_torch_library_impl(library, one.name, one.function);
        }
    }
} registration;
"""


def built(folder: Path, schemas: dict[str, str] = SCHEMAS, version: str = "2.8.1") -> Path:
    """Build a package of the layout that vLLM 0.33 has; return its extension."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(f"raise AssertionError('imported')\n__version__ = '{version}'\n")
    (folder / "_C.py").write_text("raise AssertionError('imported')\n")
    rows = []
    for schema, key in schemas.items():
        name = schema.partition("(")[0]
        function = name if name.endswith("num_sms") else "product" if key == "CUDA" else "nothing"
        rows.append(f'{{"{name}", "{schema}", "{key}", {function}}}')
    path, libraries = folder / "_C_extension.abi3.so", Path(torch.__file__).parent / "lib"
    options = ["-std=c++17", "-shared", "-fPIC", f"-L{libraries}", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    source = SOURCE.replace("ROWS", ", ".join(rows))
    subprocess.run([compiler, "-x", "c++", "-", *options, "-o", str(path)], input=source.encode(), check=True)
    return path


def backend_of(extension: Path) -> Any:
    """Return the backend over an installation, with a compiler that exists."""
    found = library.Installation(extension.parent, extension, "2.8.1", "vllm-0.33.0")
    access = attrs.evolve(deepgemm.hooks.access, find=lambda: found, toolkit=lambda: library.Toolkit(Path("/bin/sh")))
    return attrs.evolve(deepgemm, hooks=attrs.evolve(deepgemm.hooks, access=access))


def test_copies_have_separate_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a copy are in no other copy, nor in the library that a user loads before or after."""
    extension = built(tmp_path / "deep_gemm")
    found = library.Installation(extension.parent, extension, "2.8.1")
    first = library.open_copy(found, library.Toolkit(Path("/bin/sh")))
    torch.ops.load_library(str(extension))
    second = library.open_copy(found, library.Toolkit(Path("/bin/sh")))
    first.set_num_sms(7)
    torch.ops.deep_gemm.set_num_sms(9)
    first.set_pdl(True)
    first.set_block_size_multiple_of((1, 64))
    assert (first.get_num_sms(), second.get_num_sms(), torch.ops.deep_gemm.get_num_sms()) == (7, 0, 9)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    x = child.on_gpu(torch.zeros(2, 2))  # of the host's memory, as where the GPU is only described
    assert x.is_cuda
    first.bf16_gemm_nt(x, x, x, compiled_dims="mnk")
    first.fp8_gemm_nt((x, x), (x, x), x)
    assert (first.get_num_sms(), second.get_num_sms()) == (2007, 0)
    assert backend_of(extension).refusal(BLOCKS, PRESENT) is None
    assert "multiplies bf16 by cuBLASLt" in backend_of(extension).refusal(SHAPE, PRESENT).reason


def test_the_copy_of_sglang_is_called_with_all_that_it_requires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operations have no defaults, other names of scales, and two numbers in place of a list."""
    bf16, fp8 = "Tensor? c, str compiled_dims, float? alpha", "Tensor? c, int[]? recipe, str compiled_dims, bool disable_ue8m0_cast"
    schemas = {
        "init(str library_root_path, str cuda_home) -> ()": "CompositeExplicitAutograd",
        "set_block_size_multiple_of(int m, int n) -> ()": "CompositeExplicitAutograd",
        f"bf16_gemm_nt(Tensor a, Tensor b, Tensor(a!) d, {bf16}) -> ()": "CUDA",
        f"fp8_fp4_gemm_nt(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(a!) d, {fp8}) -> ()": "CUDA",
    }
    names = {schema.partition("(")[0] for schema in schemas}
    schemas |= {schema: key for schema, key in SCHEMAS.items() if schema.partition("(")[0] not in names}
    extension = built(tmp_path / "deep_gemm", schemas)
    extension = extension.rename(extension.with_name("_C.so"))
    (tmp_path / "deep_gemm" / "__init__.py").write_text("")
    (tmp_path / "deep_gemm" / "VERSION").write_text("0.2.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = library.find.__wrapped__()  # leaves the search of this process as it was
    assert (found.extension, found.version) == (extension, "sglang-0.2.3")
    copy = library.open_copy(found, library.Toolkit(Path("/bin/sh")))
    copy.set_num_sms(7)
    copy.set_block_size_multiple_of((1, 64))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    x = child.on_gpu(torch.zeros(2, 2))
    copy.bf16_gemm_nt(x, x, x)
    copy.fp8_gemm_nt((x, x), (x, x), x, compiled_dims="mnk")
    assert copy.get_num_sms() == 2007


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("str compiled_dims='nk', float? alpha=None", "float? alpha=None", r"bf16_gemm_nt must take a, b, d, compiled_dims \(got deep|dg"),
        ("Tensor a, Tensor sfa", "Tensor sfa, Tensor a", "fp8_gemm_nt must take a, sfa, b, sfb, d, compiled_dims"),
        ("(int new_num_sms)", "(int new_num_sms, int device)", "set_num_sms must take 1 arguments"),
        ("bf16_gemm_nt", "bf16_gemm_of_3_0", "it lacks bf16_gemm_nt"),
        ("get_num_sms", "have_num_sms", "it lacks get_num_sms"),
    ],
)
def test_another_interface_is_a_reason(tmp_path: Path, old: str, new: str, reason: str) -> None:
    """A library that takes other arguments is refused with its version and what differs."""
    schemas = {schema.replace(old, new): key for schema, key in SCHEMAS.items()}
    if old == "get_num_sms":
        schemas = {schema: key for schema, key in SCHEMAS.items() if not schema.startswith(old)}
    answer = backend_of(built(tmp_path / "deep_gemm", schemas)).refusal(SHAPE, PRESENT)
    assert isinstance(answer, Unsupported)
    assert answer.reason.startswith("deepgemm: deep_gemm 2.8.1, ")
    assert "does not load" in answer.reason
    with pytest.raises(ImportError, match=reason):
        library.load_copy(tmp_path / "deep_gemm" / "_C_extension.abi3.so")


START = b"\x7fELF\x02\x01" + b"\0deep_gemm\0"


@pytest.mark.parametrize("content", [b"", b"broken", START, START + b"\xff" * 60, START + b"\0" * 60])
def test_a_damaged_file_is_a_reason(content: bytes) -> None:
    """A file that is truncated, or stripped of its sections, is refused before it is loaded."""
    with pytest.raises(ImportError, match=r"registers nothing|damaged|no section"):
        registered.private_content(content, "dg0000000")


#: Files of each layout: a stand-alone package, vLLM 0.25, and vLLM 0.32 and 0.33.
TAG = f"cpython-{sys.version_info[0]}{sys.version_info[1]}-x86_64-linux-gnu"
LAYOUTS = {
    "2.5.0": (f"_C.{TAG}.so", "_C.cpython-27-x86_64-linux-gnu.so"),
    "2.8.0": ("_C.py", "_C_extension.abi3.so"),
    "2.8.1": ("_C.py", "_C_extension.abi3.so", "locality_domain.py"),
}


@pytest.mark.parametrize(("version", "vendored"), itertools.product(LAYOUTS, [False, True]))
def test_each_layout_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, vendored: bool) -> None:
    """The extension is found in a package of either layout, in vLLM or alone, without an import."""
    folder = tmp_path / "vllm" / "third_party" / "deep_gemm" if vendored else tmp_path / "deep_gemm"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(f"raise AssertionError('imported')\n__version__ = '{version}'\n")
    (tmp_path / "vllm").mkdir(exist_ok=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')\n")
    for name in LAYOUTS[version]:
        (folder / name).write_bytes(b"")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("deep_gemm", "vllm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = library.find.__wrapped__()
    assert (found.folder, found.version) == (folder, version)
    assert found.extension.name == (LAYOUTS[version][0] if version == "2.5.0" else "_C_extension.abi3.so")
    if version != "2.5.0":
        (folder / "_C_extension.other.so").write_bytes(b"")  # which of the two `_C.py` refuses to choose
        with pytest.raises(Exception, match=r"needs _C for Python .*one _C_extension\*.so \(got _C.py, _C_extension"):
            library.find.__wrapped__()
