"""Check the code around CK's kernels of fmoe on the host against the reference."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.tables import op_named
from tunedgemm_ck.names import Stages
from tunedgemm_ck.native import MOE_POINTERS, LoadedObject, load_object
from tunedgemm_ck.problem import problem_of
from tunedgemm_ck.stages import sizes_of, split_stages
from tunedgemm_ck.xdl import FAMILY

EMULATED = Path(__file__).with_name("emulated")
SOURCES = Path(__file__).parents[1] / "tunedgemm_ck" / "sources"
MI300X = Device("gfx942", 304)


_LAUNCH = re.compile(r"([\w:]+(?:<[^<>;]*>)?)<<<(.+?), ([\w:]+), 0, stream>>>\((.*?)\);", re.DOTALL)


def emulated(source: str) -> str:
    """Return a stage's source with loops in place of CK's class, and launches as calls of
    ``emulate``.
    """
    texts = [(EMULATED / "gpu.h").read_text(), *((SOURCES / name).read_text() for name in ("moe_call.h", "moe.h", "moe_kernels.h"))]
    own = source[source.index("namespace tunedgemm::problem {") :]
    said = re.findall(r"constexpr bool first = .*\nconstexpr int tile_m = .*\n", own)
    begin, end = own.index("namespace tunedgemm::stage {"), own.index("// The launch of a stage.")
    loops = "namespace tunedgemm::stage {\n" + "".join(said) + "}\n" + (EMULATED / "ck_moe.h").read_text()
    text, launches = _LAUNCH.subn(r"emulate(\2, \3, [&] { \1(\4); });", "\n".join((*texts, own[:begin], loops, own[end:])))
    assert launches == 5, "those of moe_kernels.h, and what pads experts"
    return text.replace("#pragma once", "")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedObject]:
    """Return the compiler of a stage's source for the CPU."""
    if not shutil.which("c++"):
        pytest.skip("c++ not found")
    folder = tmp_path_factory.mktemp("stages")

    @functools.cache
    def made(source: str) -> LoadedObject:
        (folder / "one.cpp").write_text(emulated(source))
        command = ["c++", "-O1", "-w", "-std=c++20", "-shared", "-fPIC", str(folder / "one.cpp"), "-o", str(folder / "one.so")]
        subprocess.run(command, check=True)
        return load_object((folder / "one.so").read_bytes())

    return made


def shape_of(sizes: tuple[int, int, int, int, int], kind: str, q_dtype: str, act: str, weighted: str) -> Shape:
    """Return a gated shape of (token, model_dim, inter_dim, expert, topk)."""
    names = ("token", "model_dim", "inter_dim", "expert", "topk")
    words = {"act_type": act, "q_type": kind, "q_dtype_a": q_dtype, "q_dtype_w": q_dtype, "doweight_stage1": weighted, "use_g1u1": "1"}
    dtype = q_dtype if kind == "No" else "bf16"
    return op_named("fmoe").columns.parse({**dict(zip(names, map(str, sizes), strict=True)), **words, "dtype": dtype})


@pytest.mark.parametrize(
    ("sizes", "kind", "q_dtype", "act", "weighted"),
    [
        ((21, 128, 64, 5, 2), "No", "bf16", "Silu", "0"),
        pytest.param((3, 64, 64, 4, 3), "No", "fp16", "Gelu", "1", marks=pytest.mark.nightly),
        pytest.param((6, 256, 64, 4, 2), "per_Tensor", "fp8_e4m3fnuz", "Silu", "0", marks=pytest.mark.nightly),
        ((6, 256, 128, 4, 2), "per_Token", "fp8_e4m3fnuz", "Gelu", "1"),
        pytest.param((2, 256, 128, 4, 2), "per_Token", "int8", "Silu", "0", marks=pytest.mark.nightly),
        ((5, 256, 256, 3, 2), "per_1x128", "fp8_e4m3fnuz", "Silu", "0"),
    ],
)
def test_both_stages_match_the_reference(
    stage: Callable[[str], LoadedObject],
    sizes: tuple[int, int, int, int, int],
    kind: str,
    q_dtype: str,
    act: str,
    weighted: str,
) -> None:
    """Both stages give the reference's output for every routing, in any workspace, twice."""
    op, shape = op_named("fmoe"), shape_of(sizes, kind, q_dtype, act, weighted)
    hidden, w1, w2, weight, ids, *scales = op.make_inputs(shape, torch.device("cpu"), 0)
    crowded = torch.full_like(ids, sizes[3] - 1)
    outside = torch.where(torch.arange(ids.numel()).reshape(ids.shape) % 3 == 1, torch.tensor(-1, dtype=torch.int32), ids)
    pair = next(iter(FAMILY.enumerate_instances(shape, MI300X, False)))[0]
    assert isinstance(pair, Stages)
    objects = [stage(FAMILY.render(*part)) for part in split_stages(pair, problem_of(shape, "gfx942"))]
    for routing in (ids, crowded, outside):
        operands = (hidden, w1, w2, weight, routing, *scales)
        expected, tolerance = op.reference(shape, operands), op.tolerance(shape)
        for out in computed(objects, shape, operands):
            error = (out.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1).clamp(min=1e-6)
            assert error.max() <= tolerance.row_error


def computed(objects: list[LoadedObject], shape: Shape, operands: tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
    """Yield the outputs of two calls that share a workspace full of other bytes."""
    counts = sizes_of(shape, 0)
    nbytes = max(stage.workspace_bytes(counts, MOE_POINTERS) for stage in objects)
    out = torch.full((shape.m, shape.n), float("nan"), dtype=operands[0].dtype)
    workspace = torch.full((nbytes + 256,), 0x7F, dtype=torch.uint8)
    inside = workspace.data_ptr() + -workspace.data_ptr() % 256
    addresses = [operand.data_ptr() for operand in operands] + [0] * (9 - len(operands))
    for _ in range(2):
        for stage in objects:
            assert stage.launcher(counts, MOE_POINTERS)(0, *addresses, out.data_ptr(), inside) == 0
        yield out
