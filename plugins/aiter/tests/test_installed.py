"""The installed AITER: absent, older, broken, hidden or replaced, each with its reason."""

from __future__ import annotations

import shutil
import subprocess
import sys
import types
from pathlib import Path

import attrs
import pytest
import tunedgemm_aiter
from tunedgemm.plugin import Device, PluginError, Shape, Solution, Unsupported, device_of
from tunedgemm.testing.stand_in import installed as installed_in
from tunedgemm_aiter import installed

HGEMM = (
    "flydsl_gemm2_abf16_wbf16_bf16_t16x64x64_split_k1_block_m_warp1_block_n_warp1_block_k_warp1"
    "_async_copyTrue_b_to_ldsTrue_b_preshuffleFalse_c_to_ldsFalse_gfx950"
)
SHAPE, CPU = Shape("a16w16", 4, 64, 128), device_of(-1)
FLYDSL = ("aiter.tuned_gemm", "flydsl_gemm")


def backend():
    """Return the backend over the stand-in."""
    import fake_aiter

    return fake_aiter.flydsl


@pytest.fixture
def copied(stand_in, tmp_path):
    """Install a copy of the stand-in, which a test may change, before the other."""
    folder = tmp_path / "site"
    shutil.copytree(stand_in, folder)
    with installed_in(folder):
        yield folder


@pytest.mark.parametrize("libtype", ["flydsl", "opus", "gluon", "aiter"])
def test_absent(libtype):
    """Without AITER nothing is listed or bound; the reason names the version that the kernel needs."""
    plugin = getattr(tunedgemm_aiter, libtype)
    op = plugin.ops[0]
    device = Device("gfx950", 256)
    assert installed.find() is None and plugin.library_version(device) == "" and plugin.details(device) == ("AITER is not installed",)
    shape = (
        SHAPE
        if op == "a16w16"
        else Shape(op, 4, 64, 128, layout="aiter16x16", extra={"q_dtype_a": "bf16", "q_dtype_w": "bf16", "q_type": "No", "act": "silu"})
    )
    assert list(plugin.solutions(shape, device)) == []
    name = {"flydsl": HGEMM, "opus": "opus_gemm_512x128x256x64_2x4_16x16x32_0x0x0"}.get(libtype, "auto")
    reason = plugin.lacks(Solution(libtype, name), shape, Device("gfx1250", 256) if libtype == "gluon" else device)
    assert reason.startswith("AITER is not installed; this kernel needs amd-aiter 0.1."), reason
    with pytest.raises(PluginError, match="AITER is not installed"):
        installed.function(*FLYDSL)


def test_a_present_device_needs_aiter(stand_in):
    """The first answer about a present device says whether AITER is installed; one about another does not."""
    import fake_aiter

    assert not fake_aiter.flydsl.refusal(SHAPE, CPU)
    sys.path.remove(str(stand_in))
    refused = fake_aiter.flydsl.refusal(SHAPE, CPU)
    assert str(refused) == "AITER is not installed; a16w16 needs amd-aiter 0.1.16 or newer"
    assert not tunedgemm_aiter.flydsl.refusal(SHAPE, Device("gfx950", 256))


def test_present(stand_in):
    """Its version and folder are read without importing it."""
    assert backend().library_version(CPU) == "AITER 0.1.21"
    assert backend().details(CPU) == (f"AITER 0.1.21 ({stand_in / 'aiter'})",)
    assert backend().lacks(Solution("fakeflydsl", HGEMM), SHAPE, CPU) == ""
    assert "aiter" not in sys.modules


def test_importing_and_listing_absent_devices_load_nothing():
    """Neither torch nor AITER is loaded by importing the plugin and asking about an absent device."""
    code = """
import sys, tunedgemm_aiter
from tunedgemm.plugin import Device, Shape
device = Device("gfx950", 256)
for plugin in (tunedgemm_aiter.flydsl, tunedgemm_aiter.opus, tunedgemm_aiter.gluon):
    plugin.refusal(Shape("a16w16", 4, 64, 128), device), list(plugin.solutions(Shape("a16w16", 4, 64, 128), device))
print(sorted({"torch", "aiter", "flydsl"} & {*sys.modules}))
"""
    folder = str(Path(__file__).with_name("installed"))
    environment = {"PYTHONPATH": ":".join([folder, *filter(None, sys.path)]), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"


def test_an_older_version_names_what_it_lacks(copied):
    """The reason has the file, the text that it lacks, and the version that has it."""
    file = copied / "aiter" / "ops" / "flydsl" / "gemm_kernels.py"
    file.write_text(file.read_text().replace("block_k_warp", "other"))
    reason = backend().lacks(Solution("fakeflydsl", HGEMM), SHAPE, CPU)
    assert reason.startswith(f"AITER 0.1.21 ({copied / 'aiter'}) lacks 'block_k_warp' in ops/flydsl/gemm_kernels.py")
    assert reason.endswith("needs amd-aiter 0.1.16 or newer")
    assert backend().bind(Solution("fakeflydsl", HGEMM), SHAPE, CPU).reason == reason


def test_without_flydsl(copied, stand_in, monkeypatch):
    """FlyDSL's kernels need its compiler."""
    monkeypatch.setattr(installed, "has_flydsl", lambda: False)
    assert backend().lacks(Solution("fakeflydsl", HGEMM), SHAPE, CPU).endswith("the package flydsl, which is not installed")


def test_a_flydsl_newer_than_aiter(copied, stand_in):
    """AITER's commit e4048607 imports a name that flydsl moved in 0.4."""
    imports = "def f():\n    from flydsl.utils.smem_allocator import SMEM_CAPACITY_MAP\n"
    (copied / "aiter" / "ops" / "flydsl" / "utils.py").write_text(imports)
    memory = copied / "flydsl" / "utils" / "smem_allocator.py"
    memory.parent.mkdir()
    memory.write_text('"""SMEM_CAPACITY_MAP is in flydsl.runtime.device."""\n')
    assert "lacks since 0.4" in backend().lacks(Solution("fakeflydsl", HGEMM), SHAPE, CPU)
    memory.write_text("import os\nSMEM_CAPACITY_MAP = {}\n")
    assert backend().lacks(Solution("fakeflydsl", HGEMM), SHAPE, CPU) == ""


@pytest.mark.parametrize(
    ("code", "reason"),
    [("raise ImportError('undefined symbol: _ZN3c10')", "undefined symbol: _ZN3c10"), ("import os; os.abort()", "SIGABRT")],
)
def test_a_broken_one_is_a_refusal(copied, code, reason):
    """An import that raises or ends the process does so in a child; this process goes on."""
    (copied / "aiter" / "__init__.py").write_text(code)
    refused = backend().bind(Solution("fakeflydsl", HGEMM), SHAPE, CPU)
    assert isinstance(refused, Unsupported)
    assert "cannot be imported" in refused.reason and reason in refused.reason
    assert "aiter" not in sys.modules


def test_a_kernel_that_aiter_refuses_is_a_refusal(stand_in):
    """bind calls once: AITER's exception is the reason."""
    import fake_aiter

    missing = Solution("fakeopus", "opus_gemm_persistent_512x128x128x64_2x4_16x16x32_0x0x0")
    refused = fake_aiter.opus.bind(missing, SHAPE, CPU)
    assert "Kernel id 303 not found" in refused.reason
    unknown = Solution("fakeopus", "opus_gemm_512x192x128x64_2x4_16x16x32_0x0x0")
    assert "has no opus kernel" in fake_aiter.opus.lacks(unknown, SHAPE, CPU)


def test_names_that_tunedgemm_serves_are_not_aiters(stand_in, monkeypatch):
    """A module under the name of AITER hides it: its functions would call the plugin again."""
    other = types.ModuleType("aiter")
    other.__file__ = str(stand_in / "elsewhere" / "__init__.py")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "aiter", other)
        assert installed.find() is not None
        with pytest.raises(PluginError, match="is not AITER's"):
            installed.function(*FLYDSL)
    assert installed.function(*FLYDSL).__module__ == "aiter.tuned_gemm"


def test_a_replaced_function_is_not_called(stand_in, monkeypatch):
    """A function of another module under AITER's name may call tunedgemm, so it is refused."""
    import aiter.tuned_gemm
    import tunedgemm

    monkeypatch.setattr(aiter.tuned_gemm, "flydsl_gemm", tunedgemm.gemm_a16w16)
    refused = backend().bind(Solution("fakeflydsl", HGEMM), SHAPE, CPU)
    assert "flydsl_gemm is replaced by a function of tunedgemm" in refused.reason


def test_aiters_dispatch_over_tunedgemm_does_not_recurse(stand_in, monkeypatch):
    """Where AITER's gemm_a16w16 is ours, our row of flydsl still runs AITER's own kernel once."""
    import aiter.tuned_gemm
    import torch
    import tunedgemm

    monkeypatch.setattr(aiter.tuned_gemm, "gemm_a16w16", tunedgemm.gemm_a16w16, raising=False)
    launcher = backend().bind(Solution("fakeflydsl", HGEMM), SHAPE, CPU)
    x, weight = torch.randn(4, 128).bfloat16(), torch.randn(64, 128).bfloat16()
    assert torch.allclose(launcher.call(x, weight).float(), x.float() @ weight.float().t(), rtol=2**-7, atol=0.1)


def test_split_kernels_stay_out_of_graphs(stand_in):
    """AITER makes counters and workspaces of splits at the first call on a stream."""
    import fake_aiter

    for split in (1, 2):
        shape = attrs.evolve(SHAPE, k=128 * split)
        launcher = backend().bind(Solution("fakeflydsl", HGEMM.replace("split_k1", f"split_k{split}"), split), shape, CPU)
        assert launcher.graph_safe == (split == 1)
    assert fake_aiter.opus.bind(Solution("fakeopus", "opus_gemm_512x128x128x32_2x4_16x16x32_0x0x0"), SHAPE, CPU).graph_safe
    split = Solution("fakeopus", "opus_gemm_flatmm_splitk_512x64x64x64_2x4_16x16x32_0x0x0_wgpcu2", 2)
    assert not fake_aiter.opus.bind(split, SHAPE, CPU).graph_safe
    import aiter.ops.opus.gemm_op_a16w16 as called

    assert called.calls == [(9, 0), (200, 2)]


def test_a_float32_output_of_flydsl_is_bf16_widened(stand_in):
    """As in AITER; such rows run, but none is listed."""
    import torch

    shape = attrs.evolve(SHAPE, outdtype="fp32")
    assert list(backend().solutions(shape, CPU)) == []
    out = backend().bind(Solution("fakeflydsl", HGEMM), shape, CPU).call(torch.randn(4, 128).bfloat16(), torch.randn(64, 128).bfloat16())
    assert out.dtype == torch.float32 and torch.equal(out, out.bfloat16().float())


def test_listing_follows_aiters_tuner(stand_in, monkeypatch):
    """Tiles above M are left out, and splits with more counters than AITER allows; the option lists all."""
    wide = [solution.kernel_name for solution in backend().solutions(SHAPE, CPU)]
    assert wide and not any("t128x" in name for name in wide)
    many = list(backend().solutions(Shape("a16w16", 4096, 128, 128), CPU))
    assert any("t128x" in solution.kernel_name for solution in many)
    assert not any("t16x" in solution.kernel_name and solution.split_k > 1 for solution in many)
    monkeypatch.setattr("tunedgemm_aiter.space._MOST", 3)
    assert len(list(backend().solutions(SHAPE, CPU))) == 3
    monkeypatch.setenv("TUNEDGEMM_AITER_SPACE", "full")
    assert [solution.kernel_name for solution in backend().solutions(SHAPE, CPU)] == wide
