"""AITER's names, against a checkout of AITER that the environment variable CHECKOUT_OF_AITER names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from pathlib import Path

import pytest
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm_aiter_names import names, unserved

CHECKOUT = Path(os.environ.get("CHECKOUT_OF_AITER", "absent"))
SCRIPT = Path(__file__).parents[2] / ".ci" / "aiter_names.py"
with_checkout = pytest.mark.skipif(not CHECKOUT.is_dir(), reason="CHECKOUT_OF_AITER names no checkout of AITER")


@pytest.fixture
def script(as_module):
    """Return the script that compares the names."""
    return as_module(SCRIPT)


@with_checkout
def test_calls_of_aiter_fit_the_served_functions(aiter, script):
    """Each served function has AITER's arguments in AITER's order, or is listed with the difference."""
    faults = {}
    for module, served in names.SERVED.items():
        theirs = script.definitions(CHECKOUT, module) if (CHECKOUT / module.replace(".", "/")).with_suffix(".py").is_file() else {}
        for name in served:
            node = theirs.get(name)
            if node is not None and (fault := script.signature_fault(node, getattr(importlib.import_module(module), name))):
                faults[name] = fault

    assert {name: fault for name, fault in faults.items() if name not in unserved.DIFFERENT} == {}
    assert sorted(faults) == sorted(unserved.DIFFERENT)


@with_checkout
def test_every_served_name_is_one_of_aiter(script):
    """Modules and names that are served exist in AITER, at present or at an older path."""
    modules = set(script.modules(CHECKOUT))
    older = {name for name in names.SERVED if name.startswith("aiter.ops.triton.") and name.count(".") == 3}

    assert {name for name in set(names.SERVED) - modules - older if not (CHECKOUT / name.replace(".", "/")).is_dir()} == set()


@with_checkout
def test_the_page_has_the_names_of_aiter(script):
    """The generated part of the migration page is what the script writes from the checkout."""
    assert script.generated(script.PAGE.read_text()) == script.table(CHECKOUT)


def test_a_fault_of_a_signature_is_found(script):
    """Another name, another order and a missing default are faults; further arguments are none."""
    import ast

    theirs = ast.parse("def f(A, B, bias=None): ...").body[0]

    assert script.signature_fault(theirs, lambda A, B, bias=None, more=None: None) == ""
    assert "served (x, B, bias)" in script.signature_fault(theirs, lambda x, B, bias=None: None)
    assert "served (B, A, bias)" in script.signature_fault(theirs, lambda B, A, bias=None: None)
    assert script.signature_fault(theirs, lambda A, B, bias: None) == "without a default: bias"


def test_the_class_has_the_arguments_of_aiter():
    """TunedGemm.mm takes inp and weights, and is one frame, as gemm_a16w16 is."""
    gemm = TunedGemm()
    rest = ["bias", "otype", "scale_a", "scale_b", "scale_c"]

    assert list(inspect.signature(gemm.mm).parameters)[:7] == ["inp", "weights", *rest]
    assert gemm.mm.__code__.co_filename.startswith("<tunedgemm hot function")


def test_reasons_are_found_by_module_and_name():
    """The first pattern counts; at AITER's top level the name alone decides."""
    assert unserved.reason("aiter.ops.opus.bmm_op", "anything").startswith("opus")
    assert unserved.reason("aiter.ops.gemm_op_a8w8", "gemm_a8w8_tune") == "`tunedgemm tune`"
    assert "gfx1250" in unserved.reason("aiter", "gemm_a4w4o4")
    assert unserved.reason("aiter", "paged_attention_v1") == ""
    assert unserved.is_internal("gemm_a8w8_fake") and not unserved.is_internal("gemm_a8w8")
