"""One rank of a tiny model that transformers splits: ``python sharded_run.py FOLDER OUT``, with the variables of torchrun set."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

spec = importlib.util.spec_from_file_location("model_shapes", Path(__file__).parents[2] / "benchmarks" / "model_shapes.py")
real = importlib.util.module_from_spec(spec)
sys.modules["model_shapes"] = real
spec.loader.exec_module(real)


def main(folder: str, out: str) -> None:
    """Load with a plan, watch a forward pass, and write the products of rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        from transformers.distributed import DistributedConfig

        split = {"distributed_config": DistributedConfig(tp_size=dist.get_world_size())}
    except (ImportError, TypeError):  # before transformers 5
        split = {"tp_plan": "auto"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **split).eval()
    products = real.Products(model)
    ids = torch.arange(real.TOKENS).reshape(1, -1)
    with torch.no_grad(), products:
        model(input_ids=ids, use_cache=False)
    if dist.get_rank() == 0:
        seen = [
            [*real.attrs.astuple(product), calls, products.rows[product], sorted(products.places[product])]
            for product, calls in products.calls.items()
        ]
        Path(out).write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


main(*sys.argv[1:])
