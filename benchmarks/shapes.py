"""Write shapes.csv, the products of four models as serving engines run them, or an untuned file of
some of its shapes.

    # shapes.csv, from DIR/<model>/config.json
    python benchmarks/shapes.py --models DIR
    # folder/a8w8-shapes.csv, for `tunedgemm tune -i`
    python benchmarks/shapes.py --shapes decode --op a8w8 -o folder

Columns of shapes.csv: model, tp, layer, N, K, M, subsets. One row a (model, tp, layer, M);
``subsets`` is a list joined by semicolons. Projections that engines fuse are one product here: q, k
and v; gate and up; DeepSeek's two down-projections of attention. Column-parallel ones are cut along
N and row-parallel ones along K. README.md of this folder describes the subsets.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
from harness import SHAPES, add_shapes, parser_of, shapes_of
from tunedgemm.ops import op_named
from tunedgemm.table.untuned import Untuned, write_untuned

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

#: (model, tp) -> its layers in the subset `bands`, and the M of that: 20 products from few rows to
#: many
BANDS = {("deepseek-v3", 1): ("fused_qkv_a_proj",), ("llama-3.1-8b", 1): ("o_proj",), ("llama-3.3-70b", 8): ("qkv_proj", "gate_up_proj")}
BAND_MS = (1, 16, 64, 1024, 4096)

#: A square product that none of the models has, kept because published figures for it exist.
EXTRA = (5120, 5120)

#: Engines pad the vocabulary to a multiple of this before they cut it.
VOCABULARY_PAD = 64


@attrs.frozen
class Layer:
    """Projection of a model on one rank: ``out[M, n] = x[M, k] @ weight[n, k].T``."""

    name: str
    n: int
    k: int


def layers(settings: dict, tp: int) -> Iterator[Layer]:
    """Yield the projections of one rank out of *tp*, in the order in which a token meets them."""
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
    """Yield those of grouped-query attention; with fewer key-value heads than ranks, each rank
    keeps a copy of one.
    """
    hidden, heads, head = settings["hidden_size"], settings["num_attention_heads"], settings["head_dim"]
    kept = max(1, settings["num_key_value_heads"] // tp)
    yield Layer("qkv_proj", (_cut(heads, tp) + 2 * kept) * head, hidden)
    yield Layer("o_proj", hidden, _cut(heads, tp) * head)


def _latent_attention(settings: dict, tp: int) -> Iterator[Layer]:
    """Yield those of DeepSeek's latent attention: the projections into the latent space are
    replicated, those out of it cut by heads.
    """
    hidden, heads = settings["hidden_size"], _cut(settings["num_attention_heads"], tp)
    query, latent = settings["q_lora_rank"], settings["kv_lora_rank"]
    plain, rotary, value = settings["qk_nope_head_dim"], settings["qk_rope_head_dim"], settings["v_head_dim"]
    yield Layer("fused_qkv_a_proj", query + latent + rotary, hidden)
    yield Layer("q_b_proj", heads * (plain + rotary), query)
    yield Layer("kv_b_proj", heads * (plain + value), latent)
    yield Layer("o_proj", hidden, heads * value)


def _cut(size: int, tp: int) -> int:
    if size % tp:
        raise ValueError(f"size: {tp} does not divide it (got {size})")
    return size // tp


def rows(models: dict[str, dict]) -> Iterator[tuple[str | int, ...]]:
    """Yield all rows of shapes.csv; *models* is folder name -> contents of config.json."""
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
    """Return the text of shapes.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows(models))
    return text.getvalue()


def main(words: list[str] | None = None) -> int:
    """Write the table of the models, or an untuned file of some shapes."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=Path, help="folder with <model>/config.json for " + ", ".join(SHORT))
    add_shapes(parser, "", op=True)
    arguments = parser.parse_args(words)
    if arguments.models:
        return write_table(arguments.models, (arguments.output or SHAPES.parent) / SHAPES.name)
    if not arguments.shapes:
        parser.error("one of --models and --shapes is required")
    shapes = sorted((shape for _, shape in shapes_of(arguments.shapes, arguments.op)), key=lambda shape: (shape.m, shape.n, shape.k))
    target = (arguments.output or Path()) / f"{arguments.op}-shapes.csv"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_untuned(target, op_named(arguments.op), [Untuned(shape) for shape in shapes])
    print(f"{target}: {len(shapes)} shapes")
    return 0


def write_table(folder: Path, target: Path) -> int:
    """Write shapes.csv from the models' settings; exit 1 if one is missing."""
    paths = {model: folder / model / "config.json" for model in SHORT}
    if absent := [str(path) for path in paths.values() if not path.is_file()]:
        print(f"--models: missing {', '.join(absent)}", file=sys.stderr)
        return 1
    models = {model: json.loads(path.read_text()) for model, path in paths.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(table(models))
    print(f"{target}: {sum(1 for _ in rows(models))} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
