"""Look into a worker of vLLM for `engine_bits.py`: its kernels, and the bits of its linear layers.

`Worker` extends vLLM's own worker class. As a script this file is a process of plain PyTorch. It
reads the layers from its input, multiplies the same x by the same weights with tunedgemm's
functions, and prints the digests.

This file imports neither torch nor tunedgemm at its top: an engine alone must not load tunedgemm.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from engines import fill

#: Columns, and rows of a weight, that share a scale by block; largest number of e4m3.
BLOCK, LARGEST = 128, 448.0
#: Words of a digest that are summed at once; its multipliers.
PART, ODDS = 1 << 24, (0x9E3779B97F4A7C1, 1, 0x5BD1E995)


def digest(tensor: Any) -> str:
    """Return a digest of a tensor's bits, computed on its device."""
    import torch

    data, sums, done = tensor.contiguous().view(torch.uint8).flatten(), [0, 0], 0
    words = data.view(torch.int32) if data.numel() % 4 == 0 else data
    for part in words.split(PART):
        numbers, places = part.long(), torch.arange(done + 1, done + len(part) + 1, device=part.device)
        sums = [total + int(((numbers + odd) * (places * ODDS[0] + odd)).sum()) for total, odd in zip(sums, ODDS[1:], strict=True)]
        done += len(part)
    return "".join(f"{total & (1 << 64) - 1:016x}" for total in sums)  # modulo 2^64, so the order of the sums does not matter


def rows_of_x(most: int, k: int, device: Any) -> Any:
    """Draw rows of x that 8 bits hold exactly: each block's largest number makes its scale one."""
    import torch

    seeded = torch.Generator(device).manual_seed(k)
    x = (torch.randn(most, k, generator=seeded, device=device) * 100).clamp(-LARGEST, LARGEST)
    x = x.to(torch.float8_e4m3fn).to(torch.bfloat16)
    x[:, ::BLOCK] = LARGEST
    return x


def bits(sizes: list[int], x: Any, multiply: Callable[[Any], Any]) -> dict[str, list[str]]:
    """Return digests for each number of rows of x: of the output, and of its first row."""
    outputs = ((m, multiply(x[:m])) for m in sizes)
    return {str(m): [digest(out), digest(out[:1])] for m, out in outputs}


def scale_of(layer: Any) -> tuple[str, Any]:
    """Return the name and the scales of a layer's weight, or "" and None."""
    names = [name for name in ("weight_scale_inv", "weight_scale") if getattr(layer, name, None) is not None]
    return (names[0], getattr(layer, names[0])) if names else ("", None)


class Worker:
    """Methods that vLLM's worker gets; the engine calls them by ``collective_rpc``."""

    def begin_kernels(self) -> None:
        """Begin to record the kernels that run."""
        import torch

        self._kernels_seen = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        torch.cuda.synchronize()
        self._kernels_seen.start()

    def end_kernels(self) -> dict[str, tuple[int, float]]:
        """Return the kernels that ran: name -> launches and microseconds."""
        import torch

        torch.cuda.synchronize()
        self._kernels_seen.stop()
        seen = self._kernels_seen.key_averages()
        return {event.key: (event.count, float(event.self_device_time_total)) for event in seen if event.self_device_time_total}

    def bits_of_layers(self, sizes: list[int]) -> list[dict[str, Any]]:
        """Return the layers, each with its sizes, scales, and digests of its weight and outputs."""
        import torch

        rows, drawn = [], dict[int, Any]()
        with torch.inference_mode():
            for name, layer in self.get_model().named_modules():  # type: ignore[attr-defined]
                weight, method = getattr(layer, "weight", None), getattr(layer, "quant_method", None)
                is_matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2 and hasattr(method, "apply")
                if not is_matrix or type(layer).__name__ == "VocabParallelEmbedding":
                    continue
                weight = weight if weight.is_contiguous() else weight.t()  # vLLM keeps some in the other order
                (n, k), (scale_name, scale) = weight.shape, scale_of(layer)
                x = drawn.setdefault(k, rows_of_x(max(sizes), k, weight.device))
                found = bits(sizes, x, lambda rows, layer=layer: layer.quant_method.apply(layer, rows, None))  # type: ignore[misc]
                scales = [scale_name, list(scale.shape)] if scale is not None else ["", []]
                rows.append({"name": name, "N": n, "K": k, "scale": scales, "weight": digest(weight), "bits": found})
        return rows


def layer_of(row: dict[str, Any], device: Any) -> Any:
    """Return a layer with the weight, and its scales, that `engines.fill` gives vLLM's layer of that name."""
    import torch

    name, shape = row["scale"]
    dtype = torch.float8_e4m3fn if name else torch.bfloat16
    layer = SimpleNamespace(weight=torch.empty(row["N"], row["K"], dtype=dtype, device=device))
    if name:
        setattr(layer, name, torch.empty(shape, dtype=torch.float32, device=device))
    fill(SimpleNamespace(named_modules=lambda: [(row["name"], layer)]))
    return layer


def multiply(layer: Any, x: Any) -> Any:
    """Multiply as a training loop does, by tunedgemm's functions."""
    import torch
    import tunedgemm

    _, scale = scale_of(layer)
    if scale is None:
        return tunedgemm.linear(x, layer.weight, None)
    m, k = x.shape
    narrow = x.to(torch.float8_e4m3fn)
    if scale.numel() in (1, layer.weight.shape[0]):
        of_x = torch.ones(m if scale.numel() > 1 else 1, 1, device=x.device)
        return tunedgemm.gemm_a8w8(narrow, layer.weight, of_x, scale.reshape(-1, 1))
    in_order = torch.ones(-(-k // BLOCK), -(-m // 4) * 4, device=x.device).t()[:m]  # as vLLM quantises for DeepGEMM
    return tunedgemm.gemm_a8w8_blockscale(narrow, layer.weight, in_order, scale)


def main() -> None:
    """Read layers and numbers of rows, and print the digests of their weights and outputs."""
    import torch

    asked, device = json.load(sys.stdin), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    answers, drawn = [], dict[int, Any]()
    with torch.inference_mode():
        for row in asked["layers"]:
            layer, k = layer_of(row, device), row["K"]
            x = drawn.setdefault(k, rows_of_x(max(asked["sizes"]), k, device))
            found = bits(asked["sizes"], x, lambda rows, layer=layer: multiply(layer, rows))  # type: ignore[misc]
            answers.append({"name": row["name"], "weight": digest(layer.weight), "bits": found})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
