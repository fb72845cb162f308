"""Check which compiler and headers are found, the errors where one is missing, and the command
line.
"""

from __future__ import annotations

import shutil

import attrs
import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_ck import toolchain
from tunedgemm_ck.problem import Problem

BF16, FP4 = Problem("a16w16", "sm_90", "bf16", "bf16"), Problem("a4w4_blockscale", "gfx950", "fp4x2", "bf16")


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """Emulate a machine without any toolkit."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.setattr(toolchain, "_nvccs", lambda: [tmp_path / "nvcc"])


def test_both_are_found_with_their_versions(fakes):
    """Both toolchains are found with the versions of compiler and library."""
    found = toolchain.cuda(BF16)
    assert (found.version, found.library) == ("nvcc 13.0.88", "CUTLASS 4.2.0")
    assert toolchain.hip(BF16).identity == "Composable Kernel 1.2.0, clang 19.1.7"


def test_without_a_compiler_the_error_says_what_to_install(bare):
    """A missing compiler is an error with a remedy."""
    for find, says in [
        (toolchain.cuda, "nvcc not found; install the CUDA toolkit or set CUDACXX"),
        (toolchain.hip, "hipcc not found"),
    ]:
        with pytest.raises(PluginError, match=says):
            find(BF16)


def test_a_named_compiler_that_is_missing(fakes, monkeypatch, tmp_path):
    """A compiler named by a variable is not replaced by another."""
    monkeypatch.setenv("CUDACXX", str(tmp_path / "none"))
    with pytest.raises(PluginError, match="set CUDACXX"):
        toolchain.cuda(BF16)


def test_without_headers_the_error_says_what_to_install(fakes, monkeypatch, tmp_path):
    """Missing headers are an error with a remedy."""
    monkeypatch.setenv("CUTLASS_INCLUDE", str(tmp_path))
    monkeypatch.setenv("CK_INCLUDE", str(tmp_path))
    with pytest.raises(PluginError, match=r"pip install 'tunedgemm-ck\[cutlass\]' or set CUTLASS_INCLUDE"):
        toolchain.cuda(BF16)
    with pytest.raises(PluginError, match="composablekernel-dev or set CK_INCLUDE"):
        toolchain.hip(BF16)


@pytest.mark.parametrize(
    ("gfx", "version", "needs"), [("sm_90", "11.8.89", "12.0"), ("sm_100", "12.6.1", "12.8"), ("sm_103", "12.8.9", "12.9")]
)
def test_an_old_nvcc_is_refused(fakes, monkeypatch, gfx, version, needs):
    """An nvcc older than the architecture is refused."""
    monkeypatch.setenv("FAKE_CK_VERSION", version)
    toolchain._version_of.cache_clear()
    with pytest.raises(PluginError, match=f"{gfx} needs CUDA {needs} or newer .got {version}."):
        toolchain.cuda(attrs.evolve(BF16, gfx=gfx))
    toolchain._version_of.cache_clear()


def test_other_programs_are_refused(fakes, monkeypatch):
    """A program that is not a compiler is refused."""
    for program in ["true", "false"]:
        monkeypatch.setenv("CUDACXX", str(shutil.which(program)))
        with pytest.raises(PluginError, match="not nvcc or clang"):
            toolchain.cuda(BF16)


def test_a_file_that_does_not_run_is_refused(fakes, monkeypatch, tmp_path):
    """A file that does not run is refused."""
    (tmp_path / "nvcc").write_text("text")
    monkeypatch.setenv("CUDACXX", str(tmp_path / "nvcc"))
    with pytest.raises(PluginError, match="does not run"):
        toolchain.cuda(BF16)


def test_an_upgraded_compiler_is_another_one(fakes, monkeypatch):
    """The version is queried again when the file has changed."""
    before = toolchain.cuda(BF16).identity
    monkeypatch.setenv("FAKE_CK_VERSION", "13.1.5")
    fakes.install("nvcc")
    assert toolchain.cuda(BF16).identity != before


def test_fp4_has_a_separate_compiler(fakes, monkeypatch, tmp_path):
    """AITER's variable selects the compiler of a4w4 only."""
    monkeypatch.setenv(toolchain.FP4_CLANG, str(fakes.folder / "bin"))
    monkeypatch.setenv("HIPCXX", str(tmp_path / "none"))
    assert toolchain.hip(FP4).compiler == str(fakes.folder / "bin" / "clang++")
    with pytest.raises(PluginError, match="hipcc not found"):
        toolchain.hip(BF16)
    monkeypatch.setenv(toolchain.FP4_CLANG, str(tmp_path))
    with pytest.raises(PluginError, match=r"GEMM_A4W4_BLOCKWISE_HIP_CLANG_PATH: clang\+\+ not found in "):
        toolchain.hip(FP4)


def test_the_command_names_architecture_flags_headers_and_files(fakes, tmp_path):
    """The command line has architecture, flags, headers and files in order."""
    cases = [
        (toolchain.cuda, "sm_90", ["-gencode", "arch=compute_90a,code=sm_90a"]),
        (toolchain.cuda, "sm_80", ["-gencode", "arch=compute_80,code=sm_80"]),
        (toolchain.cuda, "sm_103", ["-gencode", "arch=compute_103a,code=sm_103a"]),
        (toolchain.hip, "gfx942", ["--offload-arch=gfx942"]),
    ]
    for find, gfx, wanted in cases:
        found = find(BF16)
        command = found.command(tmp_path / "in", tmp_path / "out.so", gfx, ["-DX=1"])
        assert command[0] == found.compiler
        assert command[-3:] == ["-o", str(tmp_path / "out.so"), str(tmp_path / "in")]
        at = command.index(wanted[0])
        assert command[at : at + len(wanted)] == wanted
        assert {"-shared", "-O3", "-DX=1", f"-I{found.includes[0]}"} <= set(command)


def test_objects_export_nothing_but_their_functions(fakes):
    """Options hide all symbols but the two functions."""
    cuda, hip = toolchain.cuda(BF16).options, toolchain.hip(BF16).options
    assert "--exclude-libs=ALL" in cuda
    assert "static" in cuda
    assert "-fvisibility=hidden" in hip
    assert {"-fvisibility=hidden", "-fno-gnu-unique"} <= set(cuda[cuda.index("-Xcompiler") + 1].split(","))
