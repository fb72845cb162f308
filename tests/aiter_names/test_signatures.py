"""Functions with AITER's names and parameters, generated from a table of products."""

from __future__ import annotations

import functools
import importlib
import inspect
import traceback

import pytest
import torch
from tunedgemm.errors import OperandError
from tunedgemm_aiter_names.signatures import functions

X, W = torch.randn(4, 64).bfloat16(), torch.randn(16, 64).bfloat16()


def scaled(x, w, dtype, *, factor=1.0):
    """Multiply two matrices and a factor."""
    return (x @ w.T * factor).to(dtype)


def made(product, parameters):
    """Return AITER's function of one product."""
    return functions("tunedgemm.of_aiter", {product: {"gemm_named": parameters}})["gemm_named"]


def test_arguments_reach_the_product_by_their_meaning():
    """Spellings of one meaning reach one argument; the output sets the dtype; others do nothing."""
    function, half = made(scaled, "B, A, Out=None, dtype=None, splitK=0"), made(functools.partial(scaled, factor=0.5), "XQ, WQ, y")
    out = torch.empty(4, 16)

    assert torch.equal(function(W, X, splitK=3), X @ W.T)
    assert function(A=X, B=W, Out=out) is out and torch.equal(out, (X @ W.T).float())
    assert function(W, X, None, torch.float64).dtype == torch.float64
    assert torch.equal(half(X, W, out), (X @ W.T * 0.5).float())
    with pytest.raises(OperandError, match=r"output must be \[4, 16\] \(got \[4, 4\]\)"):
        half(X, W, out[:, :4])


def test_a_generated_function_reads_as_a_written_one():
    """Name, signature, docstring, traceback and the error of a wrong call are AITER's function's."""
    function = made(functools.partial(scaled, factor=2.0), "A, B, out=None, kernelName=''")

    assert (function.__name__, function.__qualname__, function.__module__) == ("gemm_named", "gemm_named", "tunedgemm.of_aiter")
    assert str(inspect.signature(function)) == "(A, B, out=None, kernelName='')"
    assert function.__doc__ == scaled.__doc__
    with pytest.raises(TypeError, match=r"gemm_named\(\) missing 1 required positional argument: 'B'"):
        function(X)
    with pytest.raises(RuntimeError) as failed:
        function(X, X[:, :2])
    frame = traceback.extract_tb(failed.tb)[1]
    assert frame.name == "gemm_named" and frame.line == "return written(out, product(x=A, w=B, dtype=output_dtype(out, None)))"


def test_a_row_without_an_argument_of_its_product_is_refused():
    """AITER's parameters must have what the product needs."""
    with pytest.raises(ValueError, match=r"gemm_named\(XQ, y\): lacks arguments of its product \(needs w\)"):
        made(scaled, "XQ, y")


@pytest.mark.parametrize("name", ["triton_basic.gemm_a16w16", "triton_fused.ff_a16w16_nogate", "gemm.gemm_a16w16_asm"])
def test_generated_functions_are_traced(name):
    """torch.compile traces a function of each module into one graph."""
    home, _, function = name.partition(".")
    call = getattr(importlib.import_module(f"tunedgemm_aiter_names.{home}"), function)
    last = {"ff_a16w16_nogate": W, "gemm_a16w16_asm": torch.empty(4, 16).bfloat16()}.get(function)
    compiled = torch.compile(lambda x: call(x, W, last), backend="eager", fullgraph=True)

    assert torch.equal(compiled(X), call(X, W, last))
