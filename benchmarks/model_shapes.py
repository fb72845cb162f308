"""Compare what a forward pass multiplies with the shapes that tunedgemm reads from ``config.json``.

    # full width, few layers, real numbers
    python benchmarks/model_shapes.py --models DIR -o folder
    # a tiny model split by transformers
    python benchmarks/model_shapes.py --one DIR --tp N
    # all architectures that transformers knows, on the meta device
    python benchmarks/model_shapes.py --architectures

Each model runs in a separate process. The tests run tiny models through the same functions.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from harness import head, parser_of, save
from torch.utils._python_dispatch import TorchDispatchMode
from tunedgemm.dtype import short_dtype
from tunedgemm.workload.models import Layer, layers_of_model
from tunedgemm.workload.models.source import build, config_of
from tunedgemm.workload.models.walk import generic

#: product -> the place of its operand [K, N]; the other, [M, K], stands before
_WEIGHT_AT = {"mm": 1, "addmm": 2, "bmm": 1, "baddbmm": 2, "_grouped_mm": 1}
#: those of the pass that is watched
TOKENS = 5
#: what gives the same weight in another dtype or place
_COPIES = ("_to_copy", "clone", "index", "index_select", "contiguous")


@attrs.frozen
class Product:
    """``out[M, n] = x[M, k] @ weight[n, k].T`` as it was seen.

    Attributes:
        name: of the parameter, with ``*`` for numbers and without a last ``weight``.
        bias: whether it was added in the same call.
        topk: of experts, those that a token went to; else 0.
    """

    name: str
    n: int
    k: int
    dtype: str
    bias: bool = False
    topk: int = 0


class Products(TorchDispatchMode):
    """Recorder of every product by a parameter of a module; products of two activations are left
    out.

    Attributes:
        calls, rows: of each product, over the whole pass.
        places: the full names of its parameters.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.calls: Counter[Product] = Counter()
        self.rows: Counter[Product] = Counter()
        self.places: defaultdict[Product, set[str]] = defaultdict(set)
        self._kept: list[torch.Tensor] = []  # a copy whose memory is free again would lend its place to another tensor
        self._names: dict[int, str] = {}
        embeddings = {name for name, part in module.named_modules() if isinstance(part, torch.nn.Embedding)}
        every = list(module.named_parameters(remove_duplicate=False))
        for name, parameter in sorted(every, key=lambda item: item[0].rpartition(".")[0] not in embeddings):
            self._names[_storage(parameter)] = name.removesuffix(".weight")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        word = function.overloadpacket.__name__
        if word in _WEIGHT_AT:
            self._note(args, _WEIGHT_AT[word], biased=word == "addmm")
        elif word in _COPIES and isinstance(out, torch.Tensor) and (name := self._name(args[0])):
            self._names[_storage(out)] = name
            self._kept.append(out)
        return out

    def _name(self, tensor: Any) -> str:
        return self._names.get(_storage(tensor), "") if isinstance(tensor, torch.Tensor) else ""

    def _note(self, args: Any, place: int, *, biased: bool) -> None:
        x, weight = args[place - 1], args[place]
        name = self._name(weight)
        if name:
            n, k = weight.shape[-1], weight.shape[-2]
        else:
            name, (n, k) = self._name(x), x.shape[-2:]  # the weight may stand first: weight[N, K] @ x[K, M]
            x = weight.mT
        if name:
            product = Product(generic(name), n, k, short_dtype(weight.dtype), biased)
            self.calls[product] += 1
            self.rows[product] += x.shape[-2]
            self.places[product].add(name)


def _storage(tensor: torch.Tensor) -> int:
    """Return what all views of one memory have in common, also on the meta device."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage()._cdata)


def expected(layers: tuple[Layer, ...]) -> Counter[Product]:
    """Return the products of layers, unfused; of experts those of one layer each, once."""
    counts: Counter[Product] = Counter()
    for layer in layers:
        if layer.experts is None:
            counts[Product(layer.name, layer.n, layer.k, layer.dtype, layer.bias)] += layer.count
        else:
            for n, k in ((layer.k * (2 if layer.experts.gated else 1), layer.n), (layer.n, layer.k)):
                counts[Product(layer.name, n, k, layer.dtype, topk=layer.experts.topk)] += layer.count
    return counts


def seen(products: Products, layers: tuple[Layer, ...], tokens: int) -> Counter[Product]:
    """Return what was recorded; of experts, how many layers have them and to how many a token went."""
    banks = [layer.name for layer in layers if layer.experts is not None]
    counts: Counter[Product] = Counter()
    of_banks: defaultdict[tuple[str, int, int, str], list[Product]] = defaultdict(list)
    for product, calls in products.calls.items():
        bank = next((name for name in banks if product.name.startswith(f"{name}.")), "")
        if bank:
            of_banks[bank, product.n, product.k, product.dtype].append(product)
        else:
            counts[product] += calls
    for (bank, n, k, dtype), parts in of_banks.items():
        depth = bank.count(".") + 1
        places = {".".join(name.split(".")[:depth]) for part in parts for name in products.places[part]}
        rows = sum(products.rows[part] for part in parts)
        sides = len({part.name for part in parts})  # 2 where gate and up are separate weights
        counts[Product(bank, n * sides, k, dtype, topk=rows // sides // tokens // len(places))] += len(places)
    return counts


def disagreements(products: Products, layers: tuple[Layer, ...], tokens: int) -> list[str]:
    """Return a line for each product whose count differs between the two sides."""
    real, ours = seen(products, layers, tokens), expected(layers)
    return [
        f"{product}: multiplied {real[product]} times, listed {ours[product]}"
        for product in sorted({*real, *ours}, key=attrs.astuple)
        if real[product] != ours[product]
    ]


def shrunk(raw: dict[str, Any], layers: int = 2) -> dict[str, Any]:
    """Return settings of full width with few layers and as many experts as a token goes to.

    One of the layers is dense if the model has dense ones.
    """
    small = copy.deepcopy(raw)
    small.pop("quantization_config", None)  # the products of transformers, which those of quantised layers stand for
    small["num_hidden_layers"] = layers
    if "first_k_dense_replace" in small:
        small["first_k_dense_replace"] = 1
    if "n_routed_experts" in small:
        small |= {"n_routed_experts": small["num_experts_per_tok"], "n_group": 1, "topk_group": 1}
    return small


def ran(folder: Path, tokens: int = TOKENS, also: Callable[[torch.nn.Module], object] | None = None) -> tuple[Products, int]:
    """Return the products of one forward pass of a folder's model, with real numbers, and its
    parameter count.

    Args:
        also: runs what tokens alone do not reach, such as an encoder of images.
    """
    source = build(folder, config_of(folder))
    module = source.module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.data.fill_(0.01)
    for buffer in module.buffers():
        buffer.zero_()
    products = Products(module)
    inputs = {"input_ids": torch.arange(tokens).reshape(1, tokens)}
    if source.module.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad(), products:
        module(**inputs, use_cache=False)
        if also is not None:
            also(module)
    return products, sum(parameter.numel() for parameter in module.parameters())


def check(folder: Path) -> dict[str, Any]:
    """Return one model's row of the table."""
    raw = shrunk(json.loads((folder / "config.json").read_text()))
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "config.json").write_text(json.dumps(raw))
        layers = layers_of_model(Path(work), fuse=False).layers
        products, parameters = ran(Path(work))
    return {
        "model": folder.name,
        "layers": raw["num_hidden_layers"],
        "parameters": parameters,
        "products": sum(products.calls.values()),
        "kinds": len(products.calls),
        "wrong": disagreements(products, layers, TOKENS),
    }


def sharded(folder: Path, tp: int) -> dict[str, Any]:
    """Return the row of rank 0 of *tp* for a tiny model that transformers splits by its own plan, a
    process each, over gloo.
    """
    with tempfile.TemporaryDirectory() as work:
        module = build(folder, config_of(folder)).module.to_empty(device="cpu")
        for parameter in module.parameters():
            parameter.data.fill_(0.01)
        module.save_pretrained(work)
        ranks = [multiprocessing.get_context("fork").Process(target=_rank, args=(work, rank, tp)) for rank in range(tp)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        result = Path(work) / "row.json"
        if not result.exists():
            raise RuntimeError(f"{folder}: the ranks ended with {[rank.exitcode for rank in ranks]}")
        return {"model": folder.name, **json.loads(result.read_text())}


def _rank(work: str, rank: int, tp: int) -> None:
    """Load one rank's part and run a pass; rank 0 writes what disagrees."""
    import torch.distributed as dist
    import transformers
    from transformers.distributed import DistributedConfig

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(tp)}
    dist.init_process_group("gloo", init_method=f"file://{work}/meeting", rank=rank, world_size=tp)
    module = transformers.AutoModelForCausalLM.from_pretrained(work, dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_size=tp))
    products = Products(module)
    with torch.no_grad(), products:
        module(input_ids=torch.arange(TOKENS).reshape(1, TOKENS), use_cache=False)
    if rank == 0:
        wrong = disagreements(products, layers_of_model(Path(work), tp, fuse=False).layers, TOKENS)
        row = {"kinds": len(products.calls), "products": sum(products.calls.values()), "wrong": wrong}
        (Path(work) / "row.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


class _Guessing(Products):
    """Recorder on the meta device, which answers when a model asks for a number."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ == "_local_scalar_dense" and args[0].is_meta:
            return args[0].dtype is torch.bool or 1
        return super().__torch_dispatch__(function, types, args, kwargs)


def architectures() -> int:
    """Print a line for each of transformers' architectures for text, or images and text, with its
    default settings, and what disagrees.

    Products of parts that tokens alone do not reach are left out of the comparison.
    """
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    transformers.utils.logging.set_verbosity_error()
    text, images = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    counts: Counter[str] = Counter()
    for name in sorted({*text, *images, *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}):
        try:
            raw = {**configuration_auto.CONFIG_MAPPING[name]().to_dict(), "model_type": name}
            verdict, wrong = _architecture(raw)
        except Exception as error:  # any class of transformers, with settings that are never used
            verdict, wrong = f"not built: {type(error).__name__}: {' '.join(str(error).split())[:160]}", []
        counts[verdict.partition(":")[0]] += 1
        print(f"{name}: {verdict}", *wrong, sep="\n    ", flush=True)
    print(dict(counts))
    return 0


def _architecture(raw: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the verdict on one architecture, and what disagrees."""
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "config.json").write_text(json.dumps(raw, default=str))
        layers = layers_of_model(Path(work), fuse=False).layers
        module = build(Path(work), config_of(Path(work))).module
    inputs = {"input_ids": torch.zeros(1, TOKENS, dtype=torch.long, device="meta")}
    if module.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    products = _Guessing(module)
    try:
        with torch.no_grad(), products:
            module(**inputs)
    except Exception as error:  # wants images, or cannot run without numbers
        return f"not run: {type(error).__name__}: {' '.join(str(error).split())[:160]}", []
    wrong = [line for line in disagreements(products, layers, TOKENS) if "multiplied 0 times" not in line]
    return ("differs" if wrong else "agrees"), wrong


def main(words: list[str] | None = None) -> int:
    """Print the table; exit 1 if a product disagrees."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=Path, help="a folder of models' folders")
    parser.add_argument("--one", type=Path, help="one model's folder: its row as JSON")
    parser.add_argument("--tp", type=int, default=1, help="with --one: ranks to split a tiny model over")
    parser.add_argument("--architectures", action="store_true", help="all of transformers' architectures, on the meta device")
    asked = parser.parse_args(words)
    if asked.architectures:
        return architectures()
    if asked.one:
        print(json.dumps(check(asked.one) if asked.tp == 1 else sharded(asked.one, asked.tp)))
        return 0
    if not asked.models:
        parser.error("one of --models, --one and --architectures is required")
    rows = []
    for folder in sorted(path.parent for path in asked.models.glob("*/config.json")):
        done = subprocess.run([sys.executable, __file__, "--one", folder], capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        rows[-1]["disagree"] = "; ".join(rows[-1].pop("wrong")) or "none"
        print(*(f"{name} {value}" for name, value in rows[-1].items()), sep=", ", flush=True)
    save(asked.output, head("model_shapes", rows=rows))
    return int(any(row["disagree"] != "none" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
