"""Look into a worker of vLLM for `engine_bits.py`: its kernels, and the bits of its linear layers.

`Worker` extends vLLM's own worker class. As a script this file is a process of plain PyTorch. It
reads the engine's weights from files, multiplies the same x by them with tunedgemm's functions, and
prints the digests.

This file imports neither torch nor tunedgemm at its top: an engine alone must not load tunedgemm.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def kernels_of(trace: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """Return the kernels of a trace: name and resources -> launches and microseconds.

    Kernels of one entry name differ in threads, shared memory or registers. The grid does not tell
    them apart, as it follows M.
    """
    seen = dict[str, tuple[int, float]]()
    for event in trace["traceEvents"]:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        known = event["args"]
        told = [f"{word}={known[word]}" for word in ("block", "shared memory", "registers per thread") if word in known]
        name = " ".join((event["name"], *told))
        launches, us = seen.get(name, (0, 0.0))
        seen[name] = launches + 1, us + event["dur"]
    return seen


class Worker:
    """Methods that vLLM's worker gets; the engine calls them by ``collective_rpc``."""

    def begin_kernels(self) -> None:
        """Begin to record the kernels that run."""
        import torch

        self._kernels_seen = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        torch.cuda.synchronize()
        self._kernels_seen.start()

    def end_kernels(self) -> dict[str, tuple[int, float]]:
        """Return the kernels that ran, as `kernels_of` does."""
        import torch

        torch.cuda.synchronize()
        self._kernels_seen.stop()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            self._kernels_seen.export_chrome_trace(file.name)
            return kernels_of(json.loads(Path(file.name).read_text()))

    def bits_of_layers(self, sizes: list[int], folder: str) -> list[dict[str, Any]]:
        """Return the layers, each with its sizes, the name of its scales, and digests of its outputs.

        The first layer of each kind has a file in *folder* with its weight and scales.
        """
        import torch

        rows, drawn, files = [], dict[int, Any](), dict[tuple[Any, ...], str]()
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
                rows.append({"name": name, "N": n, "K": k, "scale": scale_name, "bits": found})
                if (n, k, scale_name) not in files:
                    files[n, k, scale_name] = rows[-1]["file"] = str(Path(folder, f"{len(files)}.pt"))
                    tensors = {"weight": weight, **({scale_name: scale} if scale_name else {})}
                    torch.save({key: each.data.cpu() for key, each in tensors.items()}, rows[-1]["file"])
        return rows


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
    """Read layers with files and numbers of rows, and print the digests of their outputs by name."""
    import torch

    asked, device = json.load(sys.stdin), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    answers, drawn = dict[str, Any](), dict[int, Any]()
    with torch.inference_mode():
        for row in asked["layers"]:
            layer, k = SimpleNamespace(**torch.load(row["file"], map_location=device)), row["K"]
            x = drawn.setdefault(k, rows_of_x(max(asked["sizes"]), k, device))
            answers[row["name"]] = bits(asked["sizes"], x, lambda rows, layer=layer: multiply(layer, rows))  # type: ignore[misc]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
