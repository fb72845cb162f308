"""plugin and tools: the menus of a plugin's author, frozen by number."""

from pathlib import Path

import pytest
from tunedgemm import plugin
from tunedgemm.tools import files, launching, tables

#: Names that `CONTRACT` = 1 promises, by menu.
MENUS = {
    plugin: """
Backend CONTRACT Columns Command Device LaunchError Launcher Op Option OutOfResources Platform PluginError Shape Solution
Tolerance TunedGemmError Unsupported UserError device_of hookimpl
""",
    launching: """
ARCHITECTURES CallPlan Driver DriverInterface FORMATS ForkSafeLock KernelFunction Launch LaunchPlan MapDescription PRODUCT Rates
TensorMap WeightFormat Work X_THEN_W call_of device_context driver_interface dtype_bits environment_with first_usable
format_of kind_of launch_of load_fault load_function loaded_driver mapped_files may_guess on_device parse_dtype predict_us
read_rates scale_order scale_strides scratch semaphores short_dtype stand_ins sum_order switched_on torch_dtype torch_launcher
unit_peak_over unusual_experts warn_once workspace
""",
    files: """
SignatureError artifact cache_folder check_signature expanded folder_of_entry home_folder open_regular private_folder
read_regular read_trusted replace_file signature_required
""",
    tables: """
KernelName Options Outcome Planned Progress Row Table console named_file op_named op_of_file ops read_log read_rows
shape_of_texts shuffle_weight stated_cells summary tune upsert
""",
}


@pytest.mark.parametrize(("menu", "words"), MENUS.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_the_menus_are_complete(menu, words):
    """Each menu offers its promised names and no others, none of them twice, and the contract stays short."""
    assert set(menu.__all__) == set(words.split()) and len(menu.__all__) == len(words.split())
    assert all(getattr(menu, name, None) is not None for name in menu.__all__)
    assert plugin.CONTRACT == 1 and len(plugin.__all__) <= 20
    assert all(set(menu.__all__).isdisjoint(other.__all__) for other in MENUS if other is not menu)


def test_tune_is_late(child):
    """The tuner is loaded on first use, not with the menus."""
    loaded = "'tunedgemm.tuner' in sys.modules"
    source = f"import sys\nfrom tunedgemm.tools import files, launching, tables\nprint({loaded})\nprint(tables.tune.__name__, {loaded})"
    assert child(source).splitlines() == ["False", "tune True"]


@pytest.mark.parametrize("menu", MENUS)
def test_other_names_are_attribute_errors(menu):
    """A name outside the menus raises AttributeError."""
    with pytest.raises(AttributeError, match="no attribute 'Registry'"):
        getattr(menu, "Registry")  # noqa: B009  what an author writes as an attribute


#: What a user does with a backend, from capture to a call, and its author's tests.
USE = """
import os, pathlib, pytest, sys, torch, tunedgemm
from tunedgemm.cli import main
from tunedgemm.dispatch.settings import Settings
folder, (x, weight) = pathlib.Path(sys.argv[1]), (torch.randn(4, 64), torch.randn(32, 64))
os.environ["TUNEDGEMM_HOME"] = str(folder)
tunedgemm.TunedGemm(settings=Settings(capture=True)).gemm_a16w16(x, weight)
os.environ["AITER_CONFIG_GEMM_BF16"] = table = str(folder / "tuned.csv")
captured = str(folder / "bf16_untuned_gemm.csv")
assert main(["tune", "-i", captured, "-o", table, "--libtype", "upcast", "--iters", "3", "--warmup", "1"]) == 0
assert main(["table", "check", table]) == 0 and main(["explain", "4,32,64", "--dtype", "fp32"]) == 0
torch.testing.assert_close(tunedgemm.TunedGemm().gemm_a16w16(x, weight), x @ weight.t())
(folder / "test_upcast.py").write_text(sys.argv[2])
assert pytest.main(["-q", "-p", "no:cacheprovider", str(folder / "test_upcast.py")]) == 0
"""
TEST = """
from tunedgemm.testing.conformance import BackendConformance

class TestUpcast(BackendConformance):
    libtype = "upcast"
"""


def test_a_third_partys_backend_of_one_record_works(child, tmp_path):
    """Sixty lines suffice for capture, tune, tables, explain, calls and the conformance suite."""
    folder = Path(__file__).with_name("thirdparty")
    assert len((folder / "tunedgemm_upcast.py").read_text().splitlines()) <= 60
    output = child(f"import sys; sys.argv[1:] = {str(tmp_path)!r}, {TEST!r}\n{USE}", folder)
    assert "upcast:mm_v1" in output and "passed" in output
