"""Check the kernels around fmoe's products on the host, with products as loops."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import tunedgemm_ck
from tunedgemm.plugin import Shape
from tunedgemm.testing.launching import output_fault
from tunedgemm.tools.tables import op_named
from tunedgemm_ck.native import MOE_POINTERS
from tunedgemm_ck.stages import sizes_of

pytestmark = pytest.mark.nightly

SOURCES = Path(tunedgemm_ck.__file__).with_name("sources")
EMULATED = Path(__file__).with_name("emulated")
KINDS = {"No": "none", "per_Tensor": "tensor", "per_Token": "row", "per_1x128": "block"}
_LAUNCH = re.compile(r"(\w+(?:<[^<>;]*>)?)<<<(.+?), kThreads, 0, stream>>>\((.*?)\);", re.DOTALL)


def shape(sizes: tuple[int, int, int, int, int], kind: str = "No", q_dtype: str = "bf16", act: str = "silu", **fields: Any) -> Shape:
    """Return a shape of (tokens, model_dim, inter_dim, experts, topk), gated by default."""
    m, n, k, experts, topk = sizes
    flags = {name: fields.pop(name, default) for name, default in (("g1u1", True), ("doweight_stage1", False))}
    extra = {"expert": experts, "topk": topk, "act": act, "q_dtype_a": q_dtype, "q_dtype_w": q_dtype, "q_type": kind, **flags}
    return Shape("fmoe", m, n, k, extra=extra, **fields)


#: Rows longer and shorter than one pass of a block's threads; more pairs than threads, one pair.
SHAPES = [
    shape((1, 64, 32, 8, 2)),
    shape((150, 32, 16, 5, 3), act="gelu", g1u1=False, doweight_stage1=True),
    shape((9, 2304, 16, 4, 2), act="swiglu", dtype="fp16", q_dtype="fp16", outdtype="fp16"),
    shape((7, 64, 32, 3, 1), "per_Tensor", "fp8_e4m3fn", outdtype="fp16"),
    shape((300, 32, 16, 4, 2), "per_Tensor", "int8", act="gelu", doweight_stage1=True),
    shape((5, 2304, 16, 4, 2), "per_Token", "fp8_e4m3fn", dtype="fp16", outdtype="bf16"),
    shape((12, 64, 32, 4, 2), "per_Token", "int8", g1u1=False),
    shape((12, 64, 32, 4, 2), "per_Token", "fp8_e4m3fnuz", act="swiglu"),
    shape((6, 320, 192, 4, 2), "per_1x128", "fp8_e4m3fn"),
    shape((3, 2304, 64, 2, 1), "per_1x128", "fp8_e4m3fnuz", act="gelu", doweight_stage1=True),
]


def emulated(one: Shape, folder: Path) -> ctypes.CDLL:
    """Compile the kernels of a shape's class with the host's compiler."""
    if not shutil.which("c++"):
        pytest.skip("C++ compiler not found")
    kernels, launches = _LAUNCH.subn(r"emulate(\2, kThreads, [&] { \1(\3); });", (SOURCES / "moe_kernels.h").read_text())
    assert launches == 4, "each kernel is launched at one place"
    include = "".join(f'#include "{path}"\n' for path in (EMULATED / "gpu.h", SOURCES / "moe_call.h", SOURCES / "moe.h"))
    source = folder / "stages.cpp"
    source.write_text(include + kernels + (EMULATED / "stages.cpp").read_text())
    defined = {
        "HIDDEN": one.dtype,
        "QUANTISED": str(one["q_dtype_w"]).removeprefix("fp8_"),
        "OUTPUT": one.outdtype,
        "KIND": KINDS[str(one["q_type"])],
        "ACT": one["act"],
        "GATED": str(one["g1u1"]).lower(),
        "WEIGHT_FIRST": str(one["doweight_stage1"]).lower(),
    }
    macros = [f"-D{name}={value}" for name, value in defined.items()]
    command = ["c++", "-O2", "-std=c++17", "-shared", "-fPIC", "-fsanitize=undefined", "-fno-sanitize-recover", *macros]
    subprocess.run([*command, "-o", str(folder / "stages.so"), str(source)], check=True)
    return ctypes.CDLL(str(folder / "stages.so"))


def computed(library: ctypes.CDLL, one: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
    """Return the output of both stages in memory that was full of NaN."""
    given = [0 if each is None else each.data_ptr() for each in (*operands, *[None] * 4)[:9]]
    sizes = sizes_of(one, 0)
    words = ctypes.c_uint64 * (MOE_POINTERS + len(sizes))
    library.needed.restype = ctypes.c_long
    workspace = torch.full((library.needed(words(*[0] * MOE_POINTERS, *sizes)),), 0xFF, dtype=torch.uint8)
    out = torch.full((one.m, one.n), float("nan"), dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[one.outdtype])
    library.both(words(*given, out.data_ptr(), workspace.data_ptr(), *sizes))
    return out


def fault(one: Shape, operands: tuple[Any, ...], out: torch.Tensor) -> str:
    """Return an output's fault by the op's tolerance, or ""."""
    return output_fault(one, out, op_named("fmoe").reference(one, operands))


@pytest.mark.slow
@pytest.mark.parametrize("one", SHAPES, ids=str)
def test_routing_quantisation_activation_and_sum_are_those_of_the_op(one, tmp_path):
    """Every routing gives the op's result, with the same bits twice."""
    library, op = emulated(one, tmp_path), op_named("fmoe")
    random = op.make_inputs(one, torch.device("cpu"), 0)
    crowded, partly = random[4].clone(), random[4].clone()
    crowded[:, 0] = int(one["expert"]) - 1
    partly[::2, 0], partly[1::3, -1], partly[-1] = -1, int(one["expert"]), 1 << 30
    for ids in (random[4], crowded, partly):
        operands = (*random[:4], ids, *random[5:])
        out = computed(library, one, operands)
        assert not fault(one, operands, out)
        assert torch.equal(computed(library, one, operands), out)
    assert not out[-1].any()
    if one["q_type"] == "per_Tensor":
        operands = (*random, torch.tensor([0.03]), torch.tensor([0.03]))
        assert not fault(one, operands, computed(library, one, operands))


@pytest.mark.slow
def test_a_row_that_is_not_finite_spoils_no_other(tmp_path):
    """An infinity in one token leaves the other rows finite where rows have separate scales."""
    one = shape((6, 64, 32, 4, 2), "per_Token", "fp8_e4m3fn")
    library, operands = emulated(one, tmp_path), op_named("fmoe").make_inputs(one, torch.device("cpu"), 0)
    operands[0][3, 5] = float("inf")
    out = computed(library, one, operands)
    assert out[3].isnan().all()
    assert out[[0, 1, 2, 4, 5]].isfinite().all()
