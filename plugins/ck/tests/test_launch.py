"""Check that a bound solution computes its op, and that a serving process compiles nothing."""

from __future__ import annotations

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Launcher, LaunchError, PluginError, Shape, Solution, Unsupported, device_of
from tunedgemm.testing.launching import plain_weight
from tunedgemm.tools.tables import op_named
from tunedgemm_ck import backend_of, launch, native, toolchain

CPU = device_of(-1)
SHAPES = [
    Shape("a16w16", 5, 48, 64),
    Shape("a16w16", 3, 17, 66, dtype="fp16", outdtype="fp32", epilogue="bias"),
    Shape("a8w8", 4, 32, 128, dtype="fp8_e4m3fn", outdtype="bf16", scale="row", epilogue="bias", bias_dtype="fp32"),
    Shape("a8w8", 4, 32, 64, dtype="int8", outdtype="fp16", scale="tensor"),
    Shape("a8w8_blockscale", 3, 160, 256, dtype="fp8_e4m3fn", outdtype="bf16", scale="block"),
    Shape("batched_bf16", 3, 24, 32, extra={"B": 3}, epilogue="bias"),
    Shape("batched_a8w8", 3, 24, 32, dtype="int8", outdtype="bf16", scale="row", extra={"B": 2}),
]
ONE = Solution("standin", "tile64", split_k=1)


@pytest.fixture
def allowed(monkeypatch):
    """Allow compilation in this process."""
    monkeypatch.setenv("TUNEDGEMM_CK_COMPILE", "1")


def _routed(m, kind="No", q_dtype="bf16", act="silu", **fields):
    """Return a shape of fmoe with few experts."""
    flags = {"g1u1": True, "doweight_stage1": False} | {name: fields.pop(name) for name in ("g1u1", "doweight_stage1") if name in fields}
    extra = {"expert": 5, "topk": 2, "act": act, "q_dtype_a": q_dtype, "q_dtype_w": q_dtype, "q_type": kind, **flags}
    return Shape("fmoe", m, 64, 32, extra=extra, **fields)


ROUTED = [
    _routed(7),
    _routed(3, act="gelu", g1u1=False, doweight_stage1=True),
    _routed(5, act="swiglu", dtype="fp16", outdtype="bf16", layout="aiter16x16"),
    _routed(7, "per_Tensor", "fp8_e4m3fnuz"),
    _routed(7, "per_Token", "int8"),
    _routed(7, "per_1x128", "fp8_e4m3fn"),
]


def test_two_stages_compute_fmoe(fakes, allowed, backend):
    """The second stage finds what the first wrote; ids beyond the experts are ignored."""
    for shape in ROUTED:
        op = op_named("fmoe")
        operands = list(op.make_inputs(shape, torch.device("cpu"), 0))
        operands[4][0, 0], operands[4][1, 1], operands[4][2] = -1, 5, 7
        launcher = backend.bind(attrs.evolve(ONE, kernel_name="tile64+tile128"), shape, CPU)
        assert isinstance(launcher, Launcher), launcher
        out, wanted = launcher.call(*weights_as_bytes(operands)), op.reference(shape, tuple(operands))
        assert str(out.dtype).removeprefix("torch.") == {"bf16": "bfloat16", "fp16": "float16"}[shape.outdtype]
        assert not wanted[2].any()
        torch.testing.assert_close(out.double(), wanted.double(), rtol=2**-6, atol=2**-5)


def weights_as_bytes(operands):
    """Return operands as the core passes them: a shuffled weight is a plain tensor."""
    return [plain_weight(operand) if place in (1, 2) else operand for place, operand in enumerate(operands)]


def test_static_scales_reach_both_stages(fakes, allowed, backend):
    """a1_scale and a2_scale change the result as in the reference."""
    shape, op = _routed(6, "per_Tensor", "fp8_e4m3fn"), op_named("fmoe")
    operands = op.make_inputs(shape, torch.device("cpu"), 0)
    launcher = backend.bind(attrs.evolve(ONE, kernel_name="tile64+tile64"), shape, CPU)
    one, other = torch.tensor([0.05]), torch.tensor([0.3])
    for static in ((one, None), (None, other), (one, other), (None, None)):
        out, wanted = launcher.call(*operands, *static), op.reference(shape, (*operands, *static))
        torch.testing.assert_close(out.double(), wanted.double(), rtol=2**-6, atol=2**-5)


def test_stages_are_compiled_once_for_all_pairs(fakes, backend):
    """Two first and two second instances make four solutions of four objects."""
    shape = ROUTED[0]
    listed = list(backend.solutions(shape, Device("sm_90", 132)))
    assert [each.kernel_name for each in listed] == ["tile64+tile64", "tile64+tile128", "tile128+tile64", "tile128+tile128"]
    for solution in listed:
        backend.prepare(solution, shape, CPU)
    assert len(fakes.compilations) == 4
    backend.prepare(listed[0], attrs.evolve(shape, extra={**dict(shape.extra), "act": "gelu"}), CPU)
    assert len(fakes.compilations) == 5


def test_without_a_toolchain_built_pairs_are_listed(fakes, backend, monkeypatch, tmp_path):
    """Without a toolchain only pairs of two built stages are listed."""
    shape, h200 = ROUTED[0], Device("sm_90", 132)
    backend.prepare(Solution("standin", "tile64+tile128", split_k=1), shape, h200)
    backend.prepare(Solution("standin", "tile64+tile64", split_k=1), shape, h200)
    monkeypatch.setenv("CUDACXX", str(tmp_path / "none"))
    assert [each.kernel_name for each in backend.solutions(shape, h200)] == ["tile64+tile64", "tile64+tile128"]


def test_a_bound_solution_computes_its_op(fakes, allowed, backend):
    """Operands, scales, bias, batches and workspace reach the object."""
    for split in [1, 2]:
        for shape in SHAPES:
            op = op_named(shape.op)
            operands = op.make_inputs(shape, torch.device("cpu"), 0)
            launcher = backend.bind(attrs.evolve(ONE, split_k=split), shape, CPU)
            assert isinstance(launcher, Launcher), launcher
            assert launcher.workspace_bytes == (0 if split == 1 else 128)
            out, wanted = launcher.call(*operands), op.reference(shape, operands)
            assert str(out.dtype).removeprefix("torch.") == {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[shape.outdtype]
            torch.testing.assert_close(out.double().reshape(wanted.shape), wanted.double(), rtol=2**-7, atol=2**-6)


def test_a_serving_process_compiles_nothing(fakes, backend):
    """Binding refuses what is not built, with a remedy, and binds what `prepare` built."""
    shape = SHAPES[0]
    answer = backend.bind(ONE, shape, CPU)
    assert isinstance(answer, Unsupported)
    assert "is not built: run `tunedgemm ck prebuild TABLE`, or set TUNEDGEMM_CK_COMPILE=1 to compile here" in str(answer)
    assert fakes.compilations == []
    backend.prepare(ONE, shape, CPU)
    assert isinstance(backend.bind(ONE, shape, CPU), Launcher)
    assert len(fakes.compilations) == 1


@pytest.mark.parametrize(("said", "compilations"), [("0", 1), ("", 1), ("1", 2), ("2", 2)])
def test_aiters_rebuild_compiles_again_once(fakes, backend, monkeypatch, said, compilations):
    """AITER_REBUILD=1 recompiles at the first bind of a process."""
    monkeypatch.setattr(launch, "_rebuilt", set())
    backend.prepare(ONE, SHAPES[0], CPU)
    monkeypatch.setenv("AITER_REBUILD", said)
    for _ in range(3):
        assert isinstance(backend.bind(ONE, SHAPES[0], CPU), Launcher)
    assert len(fakes.compilations) == compilations


def test_prepare_reports_a_compile_error(fakes, backend, monkeypatch):
    """`prepare` raises a LaunchError that names the instance."""
    monkeypatch.setenv("FAKE_CK_DOES", "fail")
    with pytest.raises(LaunchError, match=r"standin tile64 for a16w16 .* no such type"):
        backend.prepare(ONE, SHAPES[0], CPU)


def test_prepare_leaves_to_bind_what_it_cannot_do(fakes, backend):
    """`prepare` ignores unknown names and unfit splits, which `bind` refuses."""
    for solution, reason in (
        (Solution("standin", "other"), "no instance 'other' of a16w16"),
        (attrs.evolve(ONE, split_k=9), "standin tile64: 9 splits are too many"),
    ):
        backend.prepare(solution, SHAPES[0], CPU)
        assert str(backend.bind(solution, SHAPES[0], CPU)) == reason
    assert fakes.compilations == []


def test_a_status_is_an_error(fakes, allowed, backend, monkeypatch):
    """A status of the runtime or of the instance raises a LaunchError."""
    shape = SHAPES[0]
    operands = op_named(shape.op).make_inputs(shape, torch.device("cpu"), 0)
    for status, says in ((700, "standin tile64: CUDA error 700"), (native.UNSUPPORTED, "standin tile64: unsupported sizes")):
        monkeypatch.setattr(native.LoadedObject, "launcher", lambda self, sizes, pointers, status=status: lambda *addresses: status)
        with pytest.raises(LaunchError, match=says):
            backend.functions["bind"](ONE, shape, CPU.limiting(backend.host)).call(*operands)


def test_sizes_that_the_instance_refuses_do_not_bind(fakes, allowed, backend, monkeypatch):
    """Sizes that the workspace function refuses do not bind."""
    monkeypatch.setattr(native.LoadedObject, "workspace_bytes", lambda self, sizes, pointers: -1)
    assert "standin tile64 does not support a16w16 M=5" in str(backend.bind(ONE, SHAPES[0], CPU))


def test_a_device_that_cannot_be_queried_is_an_error(fakes, allowed, backend, monkeypatch):
    """A runtime error is not taken for a refusal; 35 means a driver older than the runtime."""
    monkeypatch.setattr(native.LoadedObject, "workspace_bytes", lambda self, sizes, pointers: -1)
    monkeypatch.setattr(native.LoadedObject, "runtime_error", lambda self, count, pointers: 35)
    with pytest.raises(LaunchError, match="standin tile64: CUDA error 35"):
        backend.functions["bind"](ONE, SHAPES[0], CPU.limiting(backend.host))


def test_other_devices_and_ops_are_refused(backend, stand_in):
    """Refusals of devices, ops and shapes have reasons."""
    h200, mi300 = Device("sm_90", 132), Device("gfx942", 304)
    assert not backend.refusal(SHAPES[0], h200)
    assert str(backend.refusal(SHAPES[0], mi300)) == "standin supports only NVIDIA GPUs (got gfx942)"
    assert (
        str(backend_of(stand_in.family("standin", "amd"), toolchain.hip).refusal(SHAPES[0], h200))
        == "standin supports only AMD GPUs (got sm_90)"
    )
    assert "op a4w4_blockscale is not covered (covers a16w16" in str(backend.refusal(attrs.evolve(SHAPES[0], op="a4w4_blockscale"), h200))
    assert str(backend.refusal(attrs.evolve(SHAPES[0], m=0), h200)) == "an empty batch needs no kernel"
    assert str(backend.refusal(attrs.evolve(SHAPES[0], k=63), h200)) == "K is odd"


def test_the_default_space_is_small(fakes, backend, monkeypatch):
    """TUNEDGEMM_CK_SPACE=full lists every instance and refines."""
    assert [(option.flag, option.variable) for option in backend.options] == [("--ck-space", "TUNEDGEMM_CK_SPACE")]
    shape, h200 = SHAPES[0], Device("sm_90", 132)
    assert {str(each) for each in backend.solutions(shape, h200)} == {"standin:tile64 splitK=1", "standin:tile128 splitK=1"}
    assert list(backend.refine(ONE, shape, h200)) == []
    monkeypatch.setenv("TUNEDGEMM_CK_SPACE", "full")
    assert len(list(backend.solutions(shape, h200))) == 3
    assert len(list(backend.refine(ONE, shape, h200))) == 2
    monkeypatch.setenv("TUNEDGEMM_CK_SPACE", " Full ")
    assert len(list(backend.solutions(shape, h200))) == 3
    monkeypatch.setenv("TUNEDGEMM_CK_SPACE", "large")  # one warning of the process; doctor names it
    assert len(list(backend.solutions(shape, h200))) == 2


def test_split_sums_are_not_deterministic(fakes, backend):
    """A split that adds up in any order does not claim to be deterministic."""
    listed = list(backend.solutions(attrs.evolve(SHAPES[0], k=256), Device("sm_90", 132)))
    assert {each.split_k: each.deterministic for each in listed} == {1: True, 2: False}


def test_versions_and_details_show_the_toolchain(fakes, backend, monkeypatch, tmp_path):
    """Version and details show the toolchain, or what it lacks."""
    assert backend.library_version(CPU) == "CUTLASS 4.2.0 r3"
    assert backend.details(CPU)[0].startswith("toolchain: nvcc 13.0.88 (")
    monkeypatch.setenv("CUDACXX", str(tmp_path / "none"))
    assert backend.library_version(CPU) == "r3"
    assert backend.details(CPU)[0].startswith("no toolchain: nvcc not found")


def test_bind_reports_a_missing_toolchain(fakes, backend):
    """A missing toolchain is a reason, not an exception, also of an empty list."""

    def finder(problem):
        raise PluginError("nothing is installed")

    bare = attrs.evolve(backend, hooks=attrs.evolve(backend.hooks, finder=finder))
    assert str(bare.bind(ONE, SHAPES[0], CPU)) == "standin tile64 for a16w16 bf16->bf16 on sm_90 is not built: nothing is installed"
    assert (bare.solutions(SHAPES[0], CPU), bare.why_none(SHAPES[0], CPU)) == ([], "nothing is installed")
