"""library: Humming absent, broken and of other versions, and what its import may do."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.plugin import Device, PluginError, Shape, Solution
from tunedgemm_humming import humming, library

EXTRA: Any = {"w_format": "gptq_int4", "w_group": 128}
SHAPE = Shape("a16wn", 16, 256, 512, scale="block", layout="marlin", extra=EXTRA)
#: Nothing is launched there: Humming does not load.
PRESENT = Device("sm_90", 132, "nvidia-h200", index=0)
TEXTS = {
    "__init__": "",
    "device": "class current_device: _value = None",
    "kernel": "class HummingKernel:\n    num_ctas_per_sm = 2\n"
    "    def __init__(self, **config): self.estimated_smem_size = config['smem']\n",
    "ops/__init__": "def launch_kernel(*, configs, inputs, weight, weight_scale, weight_scale_2, zero_point, outputs, locks): pass\n"
    "def register_kernel(path): return '7', path",
    "ops/utils": "def init_humming_launcher(): pass",
    "tune": "def get_heuristics_config(layer_config, shape_m, gemm_type, device): return {'num_stages': shape_m}",
}

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a Humming made of texts; forget all about it afterwards."""
    mine = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "humming"}

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "humming"]:
            del sys.modules[name]
        for function in (library.installation, library.import_fault, library._loaded):
            function.cache_clear()
        importlib.invalidate_caches()

    def write(version: str = "0.1.20", **texts: str) -> Path:
        info = tmp_path / f"humming_kernels-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: humming-kernels\nVersion: {version}\n")
        for stem, text in {**TEXTS, **texts}.items():
            file = tmp_path / "humming" / f"{stem}.py"
            file.parent.mkdir(exist_ok=True, parents=True)
            file.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        forget()
        return tmp_path

    forget()
    yield write
    forget()
    sys.modules.update(mine)


def refusal() -> str:
    """Return why Humming cannot be used: from `supports` for a present device, else from the import."""
    if answer := humming.refusal(SHAPE, PRESENT):
        return str(answer)
    with pytest.raises(PluginError) as caught:
        library.load()
    return str(caught.value)


def test_absent(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """`supports` names the package to install; `bind` says the same, and the version is empty."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert refusal() == "humming-kernels: not installed; pip install 'humming-kernels[cu13]'"
    assert str(humming.bind(Solution("humming", "any"), SHAPE, PRESENT)) == refusal()
    assert (humming.library_version(PRESENT), humming.details(PRESENT)) == ("", (refusal(),))


def test_other_versions(install: Install) -> None:
    """An older version is refused from its metadata; one with other functions, when it loads."""
    install("0.1.9", __init__="raise AssertionError('imported')")
    assert refusal().startswith("humming-kernels: needs 0.1.20 or later (got 0.1.9)")
    assert "humming" not in sys.modules


def test_a_version_with_other_functions(install: Install) -> None:
    """A later version without what a launch passes is refused by name."""
    install("0.2.0", **{"ops/__init__": TEXTS["ops/__init__"].replace("weight_scale_2, ", "").replace("locks", "lock")})
    assert "humming 0.2.0: not a version that this plugin knows: launch_kernel lacks weight_scale_2, locks" in refusal()


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ({"kernel": "raise ImportError('no cuda.bindings')"}, "does not load: ImportError: no cuda.bindings"),
        ({"ops/utils": "import os; os.abort()"}, "does not load: loading it ends the process by SIGABRT"),
    ],
    ids=["lacks-a-package", "aborts"],
)
def test_broken(install: Install, texts: dict[str, str], reason: str) -> None:
    """The process survives any import: `supports` of a present device has the reason."""
    install(**texts)
    assert reason in refusal()
    assert humming.refusal(SHAPE, Device("sm_90", 132)) is None  # absent: nothing is loaded


def test_what_is_called(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import starts no compiler; without a device, Hopper is described for the time of a call."""
    quiet = "import os; os.environ['SEEN'] = os.environ['HUMMING_DISABLE_PARALLEL_BUILD']"
    ours = "\nfrom humming import device\nclass HummingKernel(HummingKernel):\n    @property\n"
    ours += "    def kernel_filename(self): return f'sm_{device.current_device._value.sm_version}'\n"
    install(__init__=quiet, kernel=TEXTS["kernel"] + ours)
    monkeypatch.setenv("SEEN", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    loaded = library.load()
    assert os.environ["SEEN"] == "1" and "HUMMING_DISABLE_PARALLEL_BUILD" not in os.environ
    assert loaded.register("a.cubin") == 7 and loaded.choose({}, 5, 0) == {"num_stages": 5}
    assert loaded.build({"smem": 0}) == "sm_90"
    assert sys.modules["humming.device"].current_device._value is None
    loaded.check({"smem": (114 << 10) - 1024})
    with pytest.raises(ValueError, match="shared memory of a multiprocessor must be at least 233474 bytes"):
        loaded.check({"smem": (114 << 10) - 1023})
