"""libtypes: the orders and other names, as data."""

import importlib.metadata

import pytest
from tunedgemm import libtypes
from tunedgemm.libtypes import BUILTIN, RANK, UNTUNED, canonical, libtype_of_kernel, owners, pip_hint, rank


def test_rank():
    """Ours in their order, others by name after them, the built-in one last."""
    assert sorted([BUILTIN, "zebra", "ant", *reversed(RANK)], key=rank) == [*RANK, "ant", "zebra", BUILTIN]


def test_others_join_untuned_calls_only_when_asked():
    """An installed third party does not change untuned calls: the list names our own alone."""
    assert set(UNTUNED) < set(RANK)


@pytest.mark.parametrize(("text", "libtype"), [("hipblast", "hipblaslt"), (" asm ", "asm"), ("mine", "mine")])
def test_names_of_old_files(text, libtype):
    """Old names become ours, unknown ones stay."""
    assert canonical(text) == libtype


@pytest.mark.parametrize(
    ("kernel", "libtype"), [("_ZN5aiter24bf16gemm", "asm"), ("flydsl_gemm", "flydsl"), ("a8w8_rowwise_256x", "ck"), ("", "ck")]
)
def test_kernels_of_files_without_a_libtype(kernel, libtype):
    """The start of a kernel's name tells whose it is."""
    assert libtype_of_kernel(kernel) == libtype


def test_the_pip_command_comes_from_our_extras(monkeypatch):
    """A libtype that an extra names has a command, another has none, and nothing is known where we are not installed."""
    required = ["attrs>=24", "tunedgemm-hipblaslt>=0.1 ; extra == 'cublaslt'", 'ray>=2 ; extra == "ray"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    assert owners() == {"cublaslt": "tunedgemm-hipblaslt"}
    assert pip_hint("cublaslt") == "pip install tunedgemm[cublaslt]"
    assert pip_hint("ray") == pip_hint("nosuch") == ""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert libtypes.owners() == {}
