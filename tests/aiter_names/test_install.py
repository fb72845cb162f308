"""AITER's call sites run unchanged where `tunedgemm.integrations.aiter.install` serves its modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch
import tunedgemm
import tunedgemm_aiter_names as served
from tunedgemm.errors import OperandError, UserError
from tunedgemm_aiter_names import dtypes, names

FP8 = torch.float8_e4m3fn


#: Import statements of serving engines for AITER's products and quantisation, and calls in their
#: form.
ENGINE = """
import tunedgemm.integrations.aiter
tunedgemm.integrations.aiter.install()

import importlib.util
import torch
assert importlib.util.find_spec("aiter") is not None

import aiter
from aiter import ActivationType, QuantType, dtypes
from aiter import gemm_a4w4, gemm_a8w8, gemm_a8w8_blockscale, gemm_a8w8_blockscale_bpreshuffle, gemm_a8w8_bpreshuffle, gemm_a8w8_CK
from aiter import get_hip_quant
from aiter.fused_moe import fused_moe
from aiter.ops.shuffle import shuffle_weight
from aiter.ops.triton.gemm_a16w16 import gemm_a16w16 as of_triton
from aiter.tuned_gemm import TunedGemm, gemm_a16w16, tgemm
from aiter.utility import fp4_utils

torch.manual_seed(0)
x, weight = torch.randn(4, 256).bfloat16(), torch.randn(128, 256).bfloat16()
plain = torch.nn.functional.linear(x, weight)


def near(out, part):
    assert out.dtype == dtypes.bf16 and out.shape == plain.shape
    assert (out - plain).norm() < part * plain.norm()


near(tgemm.mm(x, weight.detach(), None, otype=x.dtype), 0.01)
near(TunedGemm().mm(x, shuffle_weight(weight, (16, 16))), 0.01)
near(of_triton(x, weight, None), 0.01)
near(gemm_a16w16(x, weight), 0.01)

rows = get_hip_quant(QuantType.per_Token)
xq, x_scale = rows(x, quant_dtype=dtypes.fp8)
wq, w_scale = rows(weight, quant_dtype=dtypes.fp8)
near(gemm_a8w8_CK(xq, wq, x_scale, w_scale, None, dtypes.bf16), 0.1)
kept = torch.nn.Parameter(wq, requires_grad=False)
kept.data = shuffle_weight(wq, layout=(16, 16))  # which takes the bytes, not the type
near(gemm_a8w8_bpreshuffle(xq, kept, x_scale, w_scale, None, x.dtype), 0.1)

blocks = aiter.get_hip_quant(aiter.QuantType.per_1x128)
xq, x_scale = blocks(x, quant_dtype=aiter.dtypes.fp8)
wq, w_scale = weight.to(dtypes.fp8), torch.ones(1, 2)
near(gemm_a8w8_blockscale(xq, wq, x_scale, w_scale, dtype=x.dtype), 0.1)
xq, x_scale = blocks(x, quant_dtype=aiter.dtypes.fp8, transpose_scale=True)
near(gemm_a8w8_blockscale_bpreshuffle(xq, shuffle_weight(wq).plain, x_scale, w_scale, dtype=x.dtype), 0.1)

fours = aiter.get_triton_quant(QuantType.per_1x32)
xq, x_scale = fours(x, shuffle=True)
wq, w_scale = fours(weight, shuffle=True)
near(gemm_a4w4(xq, shuffle_weight(wq), x_scale, w_scale, dtype=dtypes.bf16), 0.4)
print("served")
"""


def test_imports_and_calls_of_engines_run_unchanged(child):
    """In a child process the import statements and calls of serving engines give right products."""
    assert child(ENGINE) == "served"


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, found in names.SERVED.items() for name in found])
def test_every_name_is_there(aiter, module, name):
    """Each name of each module that is served can be imported and is listed."""
    found = importlib.import_module(module)

    assert getattr(found, name) is not None
    assert name in dir(found)


def test_every_function_of_ours_that_aiter_has_is_served(aiter):
    """Every public function of our ops that AITER has is served."""
    from tunedgemm.ops import functions

    ours_alone = {"gemm_a16wn", "gemm_a8w8_mxfp8", "gemm_a4w4_nvfp4"}
    assert set(functions()) - ours_alone <= {name for home in names.SERVED.values() for name in home}


def test_missing_names_are_named(aiter):
    """An unserved name or module of AITER is an error that says so, as attribute and import."""
    with pytest.raises(AttributeError, match=r"aiter\.paged_attention_v1: tunedgemm, which serves 'aiter' here, has no counterpart"):
        _ = aiter.paged_attention_v1
    with pytest.raises(ImportError, match=r"paged_attention_v1.*tunedgemm"):
        exec("from aiter import paged_attention_v1")
    with pytest.raises(ModuleNotFoundError, match=r"aiter\.mla"):
        importlib.import_module("aiter.mla")
    assert not hasattr(aiter, "rms_norm")


def test_uninstall_leaves_nothing():
    """After uninstall aiter cannot be imported; a second install or uninstall changes nothing."""
    served.install()
    first = sys.modules["aiter"]
    served.install()
    assert sys.modules["aiter"] is first
    served.uninstall()
    served.uninstall()

    assert not [name for name in sys.modules if name.split(".")[0] == "aiter"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("aiter")


def test_an_installed_aiter_is_hidden_only_by_force(tmp_path, monkeypatch):
    """Where AITER is installed it is an error; with force it is hidden until uninstall."""
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="AITER is installed"):
        served.install()
    real = importlib.import_module("aiter")
    try:
        with pytest.raises(UserError, match="AITER is installed"):
            served.install()
        served.install(force=True)
        assert not hasattr(importlib.import_module("aiter"), "real")
        served.uninstall()
        assert importlib.import_module("aiter") is real
    finally:
        del sys.modules["aiter"]


def test_the_asm_plugin_takes_it_for_no_installation(aiter):
    """A search for AITER's files by its package finds no folder."""
    assert importlib.util.find_spec("aiter").submodule_search_locations == []


def test_fp8_is_that_of_the_device(aiter, request):
    """dtypes.fp8 is fnuz on MI300 and fn elsewhere."""
    assert aiter.dtypes.fp8 is FP8
    request.getfixturevalue("mi300")
    assert dtypes.fp8 is torch.float8_e4m3fnuz


@pytest.mark.parametrize("kind", ["per_Tensor", "per_Token", "per_1x128", "per_1x32"])
def test_quantising_functions_take_hips_arguments(aiter, kind):
    """A kind's function gives the result of the package's function; numbers of valid rows change nothing."""
    x = torch.randn(6, 256).bfloat16()
    plain = {
        "per_Tensor": lambda: tunedgemm.per_tensor_quant(x, quant_dtype=FP8),
        "per_Token": lambda: tunedgemm.pertoken_quant(x, quant_dtype=FP8),
        "per_1x128": lambda: tunedgemm.per_1x128_quant(x, FP8),
        "per_1x32": lambda: tunedgemm.per_1x32_f4_quant(x),
    }[kind]()
    dtype = None if kind == "per_1x32" else FP8
    member = aiter.QuantType[kind]

    for function in (aiter.get_hip_quant(member), aiter.get_triton_quant(member)):
        q, scale = function(x, quant_dtype=dtype, num_rows=torch.tensor([4]))
        assert torch.equal(q.view(torch.uint8), plain[0].view(torch.uint8))
        assert torch.equal(scale.view(torch.uint8), plain[1].view(torch.uint8))
    q, scale = aiter.get_torch_quant(member)(x, **({} if dtype is None else {"quant_dtype": dtype}))
    assert torch.equal(q.view(torch.uint8), plain[0].view(torch.uint8))
    assert torch.equal(scale.view(torch.uint8), plain[1].view(torch.uint8))


def test_kinds_without_a_function(aiter):
    """No returns x unchanged; an unknown kind is an error that lists the known ones."""
    x = torch.randn(2, 4)

    assert aiter.get_hip_quant(aiter.QuantType.No)(x) == (x, None)
    with pytest.raises(UserError, match=r"per_256x128.*known: No, per_Tensor"):
        aiter.get_hip_quant("per_256x128")(x)
    with pytest.raises(OperandError, match="one float32 scale for 128"):
        aiter.get_hip_quant(aiter.QuantType.per_1x128)(torch.randn(2, 128), group_size=32)


def test_quantising_functions_write_their_outputs(aiter):
    """The functions with an output write what the others return."""
    x, smooth = torch.randn(6, 256).bfloat16(), torch.rand(256) + 0.5
    out, row, one = torch.empty(6, 256, dtype=FP8), torch.empty(6, 1), torch.empty(1)

    def is_written(expected, scale):
        return torch.equal(out.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])

    aiter.dynamic_per_token_scaled_quant(out, x, row)
    assert is_written(tunedgemm.pertoken_quant(x, quant_dtype=FP8), row)
    aiter.smoothquant_fwd(out, x, smooth, row)
    assert is_written(tunedgemm.pertoken_quant(x, None, smooth, quant_dtype=FP8), row)
    aiter.dynamic_per_tensor_quant(out, x, one)
    assert is_written(tunedgemm.per_tensor_quant(x, quant_dtype=FP8), one)
    aiter.static_per_tensor_quant(out, x, 2 * one)
    assert is_written(tunedgemm.per_tensor_quant(x, 2 * one, quant_dtype=FP8), 2 * one)
    with pytest.raises(OperandError, match="scale_ub and shuffle_scale are not supported"):
        aiter.dynamic_per_token_scaled_quant(out, x, row, scale_ub=one)


def test_a_star_takes_every_name(aiter):
    """``from aiter.fused_moe_bf16_asm import *`` brings all of its names, although none is loaded yet."""
    scope: dict[str, object] = {}
    exec("from aiter.fused_moe_bf16_asm import *\nfrom aiter import *", scope)
    assert {*names.SERVED["aiter.fused_moe_bf16_asm"], "gemm_a8w8", "QuantType"} <= set(scope)
    assert not {"hipb_mm", "__getattr__"} & set(scope)


def test_scales_of_mxfp4_rounded_to_even(aiter):
    """dynamic_mxfp4_quant of both modules rounds amax to the nearest fp4: as bytes, and typed."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    of_bytes = importlib.import_module("aiter.ops.triton.quant").dynamic_mxfp4_quant
    typed = importlib.import_module("aiter.utility.fp4_utils").dynamic_mxfp4_quant
    q, scale = (part.view(torch.uint8) for part in tunedgemm.per_1x32_f4_quant(x, round_mode=2))

    assert all(map(torch.equal, of_bytes(x), (q, scale)))
    assert torch.equal(typed(x)[0].view(torch.uint8), q) and typed(x)[1].dtype == torch.float8_e8m0fnu
    assert torch.equal(tunedgemm.unshuffle_scale(typed(x, shuffle=True)[1], 64, 8).view(torch.uint8), scale)
    with pytest.raises(UserError, match="scaling_mode must be 'even'"):
        of_bytes(x, "odd")
