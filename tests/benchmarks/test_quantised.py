"""benchmarks/quantised.py: configurations that are read as weights alone, and their drawn weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tunedgemm.ops.formats.weight_only import Weight, decode
from tunedgemm.ops.weight_formats import FORMATS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
N, K = 64, 1024


@pytest.fixture
def script(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Load benchmarks/quantised.py."""
    return as_module(BENCHMARKS / "quantised.py")


def test_each_form_is_a_folder_of_its_model(script: ModuleType, tmp_path: Path, capsys: Any) -> None:
    """A form has the model's sizes, its number of layers, and what vLLM reads the format from."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps({"hidden_size": 512, "num_hidden_layers": 32}))
    script.main([str(tmp_path / "small"), "--forms", *script.FORMS, "-o", str(tmp_path / "out")])
    folders = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [folder.name for folder in folders] == [f"small-{form}" for form in script.FORMS]
    for folder, stated in zip(folders, script.FORMS.values(), strict=True):
        config = json.loads((folder / "config.json").read_text())
        assert config == {"hidden_size": 512, "num_hidden_layers": 12, "quantization_config": stated}


#: Format -> names, sizes and dtypes of a layer's parameters in vLLM, before its kernels: weight,
#: scales, zero points or the global scale.
LAYERS: dict[str, list[tuple[str, tuple[int, ...], torch.dtype]]] = {
    "gptq_int4": [("qweight", (K // 8, N), torch.int32), ("scales", (K // 128, N), torch.bfloat16)],
    "awq_int4": [
        ("qweight", (K, N // 8), torch.int32), ("scales", (K // 128, N), torch.bfloat16), ("qzeros", (K // 128, N // 8), torch.int32),
    ],
    "ct_int4_zp": [
        ("weight_packed", (N, K // 8), torch.int32), ("weight_scale", (N, K // 128), torch.bfloat16),
        ("weight_zero_point", (N // 8, K // 128), torch.int32),
    ],
    "mxfp4": [("weight_packed", (N, K // 2), torch.uint8), ("weight_scale", (N, K // 32), torch.uint8)],
    "nvfp4": [
        ("weight", (N, K // 2), torch.uint8), ("weight_scale", (N, K // 16), torch.float8_e4m3fn), ("weight_scale_2", (2,), torch.float32),
    ],
}  # fmt: skip


@pytest.mark.parametrize("w_format", LAYERS)
def test_drawn_weights_have_the_deviation_of_unquantised_ones(script: ModuleType, w_format: str) -> None:
    """The decoded weight has a mean near zero and a deviation near the root of 1 / K."""
    layer = torch.nn.Module()
    for name, sizes, dtype in LAYERS[w_format]:
        layer.register_parameter(name, torch.nn.Parameter(torch.zeros(sizes, dtype=dtype), requires_grad=False))
    layer.input_size_per_partition = K
    assert script.fill_packed(layer, torch.Generator().manual_seed(0))
    values = [parameter.data for parameter in layer.parameters()]
    is_nvfp4, form = w_format == "nvfp4", FORMATS[w_format]
    stored = Weight(values[0], values[1], None if is_nvfp4 or len(values) < 3 else values[2])
    weight = decode(form, stored) * (float(values[2][0]) if is_nvfp4 else 1)
    assert weight.shape == (N, K) and abs(float(weight.mean())) < 0.2 * K**-0.5
    assert 0.7 < float(weight.std()) * K**0.5 < 1.4


def test_the_global_scale_of_compressed_tensors_divides(script: ModuleType) -> None:
    """It is the reciprocal of ModelOpt's, and plain weights are left to `engines.fill`."""
    layer = torch.nn.Module()
    for name, value in (("weight_packed", torch.zeros(N, K // 2, dtype=torch.uint8)), ("weight_global_scale", torch.zeros(1))):
        layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    assert script.fill_packed(layer, torch.Generator()) and float(layer.weight_global_scale) > 100
    plain = torch.nn.Linear(8, 8)
    assert not script.fill_packed(plain, torch.Generator())
