"""libtypes: the orders and other names, as data."""

import importlib.metadata

import pytest
from tunedgemm import libtypes
from tunedgemm.libtypes import (
    AITER,
    AITERS_OWN,
    BUILTIN,
    RANK,
    UNTUNED,
    absent,
    canonical,
    is_known,
    libtype_of_kernel,
    owners,
    pip_hint,
    rank,
    stand_in,
)  # fmt: skip


def test_rank():
    """Our libtypes are first in their order, then others by name; the built-in one is last."""
    assert sorted([BUILTIN, "zebra", "ant", *reversed(RANK)], key=rank) == [*RANK, "ant", "zebra", BUILTIN]


def test_other_backends_serve_untuned_calls_only_if_named():
    """An installed third party does not change untuned calls: the list has only our libtypes."""
    assert set(UNTUNED) < set(RANK)


@pytest.mark.parametrize(("text", "libtype"), [("hipblast", "hipblaslt"), (" asm ", "asm"), ("mine", "mine")])
def test_names_of_old_files(text, libtype):
    """Old names become ours; unknown ones are kept."""
    assert canonical(text) == libtype


@pytest.mark.parametrize(
    ("kernel", "libtype"), [("_ZN5aiter24bf16gemm", "asm"), ("flydsl_gemm", "flydsl"), ("a8w8_rowwise_256x", "ck"), ("", "ck")]
)
def test_kernels_of_files_without_a_libtype(kernel, libtype):
    """The start of a kernel's name identifies its libtype."""
    assert libtype_of_kernel(kernel) == libtype


def test_the_pip_command_comes_from_our_extras(monkeypatch):
    """A libtype has a pip command if an installed distribution's extra names it."""
    required = ["attrs>=24", "tunedgemm-hipblaslt>=0.1 ; extra == 'cublaslt'", 'ray>=2 ; extra == "ray"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    assert owners() == {"cublaslt": "tunedgemm-hipblaslt"}
    assert pip_hint("cublaslt") == "pip install tunedgemm[cublaslt]"
    assert pip_hint("ray") == pip_hint("nosuch") == ""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert libtypes.owners() == {}


def test_what_aiter_names():
    """Every libtype of AITER's tables is known, and none is without a plugin."""
    assert all(is_known(libtype) for libtype in AITER)
    assert not any(map(absent, AITER))
    assert is_known("hipblast") and not is_known("asmm")


def test_joint_libtypes(monkeypatch):
    """A row with stages of two backends is known where both are; AITER's own functions run it."""
    assert is_known("asm+ck") and not is_known("asm+ckk")
    monkeypatch.setattr(libtypes, "owners", lambda: {AITERS_OWN: "tunedgemm-aiter"})
    assert absent("asm+ck").endswith("no installed backend runs both; pip install tunedgemm[aiter]")
    monkeypatch.setattr(libtypes, "owners", dict)
    assert absent("asm+ck") == "its stages belong to asm and ck: no installed backend runs both"
    assert absent("ck") == ""


def test_stand_ins():
    """gradlib's rocblas is torch's own product; no other libtype stands for another."""
    assert stand_in(" rocblas ") == (BUILTIN, "native")
    assert not any(stand_in(libtype) for libtype in (*AITER, *RANK, "hipblast", ""))


def test_a_text_of_libtypes():
    """A comma list in its order, each once; AITER's ``both`` is two, and ``all`` limits nothing."""
    assert libtypes.listed("asm, both,ck,hipblast") == ["asm", "ck", "cktile", "hipblaslt"]
    assert libtypes.listed("all") == libtypes.listed("asm,all") == libtypes.listed("") == []
