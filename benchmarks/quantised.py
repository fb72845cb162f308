"""Write configurations of checkpoints with quantised weights, which engines fill with random ones.

    python benchmarks/quantised.py CONFIG_DIR --forms int4 mxfp8 nvfp4 --layers 12 -o DIR

Each form of each model is a folder with its ``config.json``, for `tunedgemm tune --model_dir` and
`engine_speed.py`. `engines.fill` draws the weights by
`fill_packed`, whose values have the deviation of the unquantised ones.

This file does not import torch at its top, as `engines.py`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any


def _integers(symmetric: bool) -> dict[str, Any]:
    """Return int4 of compressed-tensors, by groups of 128."""
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 128, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    fields = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return {**fields, "ignore": ["lm_head"], "config_groups": {"group_0": group}}


#: vLLM asks a checkpoint's files for the quantised layers unless its configuration names them.
_LAYERS = [f"self_attn.{each}_proj" for each in "qkvo"] + [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
#: Form -> ``quantization_config``.
FORMS: dict[str, dict[str, Any]] = {
    "int4": _integers(True),
    "int4_zp": _integers(False),
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
        "modules_in_block_to_quantize": [_LAYERS],
    },
    "awq": {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    },
    "mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
}  # fmt: skip
#: Standard deviations of uniform codes: int4 less eight, e2m1.
_OF_INT4, _OF_E2M1 = 4.61, 2.93
#: Each 4-bit zero point is eight; the e4m3 scales of nvfp4 are 64.
_ZEROS, _E4M3 = -0x77777778, 64.0
_WEIGHTS, _SCALES = ("qweight", "weight_packed", "weight"), ("scales", "weight_scale")
_POINTS, _FACTORS = ("qzeros", "weight_zero_point"), {"weight_scale_2": 1, "weight_global_scale": -1}


def written(folder: Path, form: str, layers: int, out: Path) -> Path:
    """Write the configuration of a model in a form; return its folder.

    Args:
        folder: has the model's ``config.json``.
        form: a key of `FORMS`.
        layers: number of layers, 0 for all.
        out: folder of the new folder.
    """
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": FORMS[form]}
    config |= {"num_hidden_layers": layers} if layers else {}
    made = out / f"{folder.name}-{form}"
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return made


def exponent(factor: float) -> int:
    """Return the e8m0 byte that is nearest to a factor."""
    return 127 + round(math.log2(factor))


def fill_packed(module: Any, generator: Any) -> bool:
    """Draw packed weights of a loaded layer, and set its scales; return whether it has such weights.

    Args:
        module: the layer.
        generator: draws the codes, on the layer's device.
    """
    import torch

    tensors = {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}
    weight = next((tensors[name] for name in _WEIGHTS if name in tensors and tensors[name].dtype in (torch.int32, torch.uint8)), None)
    if weight is None:
        return False
    is_int4 = weight.dtype is torch.int32
    deviation = getattr(module, "input_size_per_partition", weight.shape[-1]) ** -0.5
    low, high = (-(1 << 31), 1 << 31) if is_int4 else (0, 256)
    weight.copy_(torch.randint(low, high, weight.shape, generator=generator, device=weight.device))
    factor = deviation / (_OF_INT4 if is_int4 else _OF_E2M1)
    for name in [name for name in _SCALES if name in tensors]:
        kinds = {torch.uint8: exponent(factor), torch.float8_e4m3fn: _E4M3}
        tensors[name].fill_(kinds.get(tensors[name].dtype, factor))
    for name in [name for name in _POINTS if name in tensors]:
        tensors[name].fill_(_ZEROS)
    for name in [name for name in _FACTORS if name in tensors]:  # compressed-tensors' divides
        tensors[name].fill_((factor / _E4M3) ** _FACTORS[name])
    return True


def main(words: list[str] | None = None) -> None:
    """Write the folders, and print their paths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", type=Path, nargs="+", metavar="CONFIG_DIR", help="folders with config.json")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["int4", "mxfp8", "nvfp4"], help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=12, help="layers of each model; 0 for all (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, default=Path(), help="folder of the new folders")
    arguments = parser.parse_args(words)
    for folder in arguments.models:
        for form in arguments.forms:
            print(written(folder, form, arguments.layers, arguments.output))


if __name__ == "__main__":
    main()
