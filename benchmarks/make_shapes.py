"""Write shapes.csv: the products of four models, as serving engines run them, from the models' config.json files.

Columns: model, tp, layer, N, K, M, subsets. One row a (model, tp, layer, M); ``subsets`` is a list joined by semicolons.
Projections that engines fuse are one product here: q, k and v; gate and up; DeepSeek's two down-projections of attention.
Column-parallel ones are cut along N and row-parallel ones along K. README.md beside this file says the rest.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs

COLUMNS = ("model", "tp", "layer", "N", "K", "M", "subsets")
TPS = (1, 8)
MS = (1, 16, 64, 256, 1024, 4096)
DECODE_MS = (1, 2, 4, 8, 16, 32, 48, 64)

#: model (the folder's name) -> its short name in subsets
SHORT = {"deepseek-v3": "dsv3", "llama-3.1-8b": "llama8b", "llama-3.3-70b": "llama70b", "qwen3-32b": "qwen32b"}

#: (model, tp) -> its layers in the subset `decode`; with `EXTRA` 24 pairs of N and K
DECODE = {
    ("deepseek-v3", 1): ("fused_qkv_a_proj", "q_b_proj", "router_gate"),
    ("deepseek-v3", 8): ("q_b_proj", "o_proj", "gate_up_proj"),
    ("llama-3.1-8b", 1): ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    ("llama-3.3-70b", 1): ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    ("llama-3.3-70b", 8): ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"),
    ("qwen3-32b", 8): ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}

#: (model, tp) -> its layers in the subset `bands`, and the M of that: 20 products from few rows to many
BANDS = {("deepseek-v3", 1): ("fused_qkv_a_proj",), ("llama-3.1-8b", 1): ("o_proj",), ("llama-3.3-70b", 8): ("qkv_proj", "gate_up_proj")}
BAND_MS = (1, 16, 64, 1024, 4096)

#: A square product that none of the models has, kept because published figures for it exist.
EXTRA = (5120, 5120)

#: Engines pad the vocabulary to a multiple of this before they cut it.
VOCABULARY_PAD = 64


@attrs.frozen
class Layer:
    """One projection of a model on one rank: ``out[M, n] = x[M, k] @ weight[n, k].T``."""

    name: str
    n: int
    k: int


def layers(settings: dict, tp: int) -> Iterator[Layer]:
    """The projections of one rank out of *tp*, in the order in which a token meets them."""
    hidden, wide = settings["hidden_size"], settings["intermediate_size"]
    attention = _latent_attention if "kv_lora_rank" in settings else _attention
    yield from attention(settings, tp)
    yield Layer("gate_up_proj", 2 * _cut(wide, tp), hidden)
    yield Layer("down_proj", hidden, _cut(wide, tp))
    if "n_shared_experts" in settings:
        shared = settings["moe_intermediate_size"] * settings["n_shared_experts"]
        yield Layer("shared_gate_up_proj", 2 * _cut(shared, tp), hidden)
        yield Layer("shared_down_proj", hidden, _cut(shared, tp))
        yield Layer("router_gate", settings["n_routed_experts"], hidden)
    padded = -(-settings["vocab_size"] // VOCABULARY_PAD) * VOCABULARY_PAD
    yield Layer("lm_head", _cut(padded, tp), hidden)


def _attention(settings: dict, tp: int) -> Iterator[Layer]:
    """Grouped-query attention; with fewer key-value heads than ranks, each rank keeps a copy of one."""
    hidden, heads, head = settings["hidden_size"], settings["num_attention_heads"], settings["head_dim"]
    kept = max(1, settings["num_key_value_heads"] // tp)
    yield Layer("qkv_proj", (_cut(heads, tp) + 2 * kept) * head, hidden)
    yield Layer("o_proj", hidden, _cut(heads, tp) * head)


def _latent_attention(settings: dict, tp: int) -> Iterator[Layer]:
    """DeepSeek's latent attention: the projections into the latent space are replicated, those out of it cut by heads."""
    hidden, heads = settings["hidden_size"], _cut(settings["num_attention_heads"], tp)
    query, latent = settings["q_lora_rank"], settings["kv_lora_rank"]
    plain, rotary, value = settings["qk_nope_head_dim"], settings["qk_rope_head_dim"], settings["v_head_dim"]
    yield Layer("fused_qkv_a_proj", query + latent + rotary, hidden)
    yield Layer("q_b_proj", heads * (plain + rotary), query)
    yield Layer("kv_b_proj", heads * (plain + value), latent)
    yield Layer("o_proj", hidden, heads * value)


def _cut(size: int, tp: int) -> int:
    if size % tp:
        raise ValueError(f"{size} cannot be cut into {tp} equal parts")
    return size // tp


def rows(models: dict[str, dict]) -> Iterator[tuple[str | int, ...]]:
    """All rows of shapes.csv, *models* being folder name -> contents of config.json."""
    for model, short in SHORT.items():
        for tp in TPS:
            for layer in layers(models[model], tp):
                decode = layer.name in DECODE.get((model, tp), ())
                for m in sorted({*MS, *(DECODE_MS if decode else ())}):
                    names = ["decode"] if decode and m in DECODE_MS else []
                    names += [f"{short}-tp{tp}"] if m in MS else []
                    names += ["layers"] if m in MS and layer.name != "lm_head" else []
                    names += ["bands"] if m in BAND_MS and layer.name in BANDS.get((model, tp), ()) else []
                    yield model, tp, layer.name, layer.n, layer.k, m, ";".join(names)
    for m in DECODE_MS:
        yield "extra", 1, "extra", *EXTRA, m, "decode"


def table(models: dict[str, dict]) -> str:
    """The text of shapes.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows(models))
    return text.getvalue()


def main() -> int:
    """Read the models' settings and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="folder with <model>/config.json for " + ", ".join(SHORT))
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_name("shapes.csv"))
    arguments = parser.parse_args()
    paths = {model: arguments.models / model / "config.json" for model in SHORT}
    if absent := [str(path) for path in paths.values() if not path.is_file()]:
        print(f"missing: {', '.join(absent)}", file=sys.stderr)
        return 1
    models = {model: json.loads(path.read_text()) for model, path in paths.items()}
    arguments.output.write_text(table(models))
    print(f"{arguments.output}: {sum(1 for _ in rows(models))} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
