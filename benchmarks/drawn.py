"""Draw products by chance, for untuned calls: of models without rows, and of any size.

    # four lists
    python benchmarks/drawn.py --op a8w8 --parts 4 -o folder
    python benchmarks/speed.py --op a8w8 --shapes folder/a8w8-0.csv --arms vllm

The numbers of a seed are the same on every machine. All M are equally often in each kind of
products. Weights that a table of the package has rows of are left out.
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

from harness import FIELDS, parser_of
from shapes import layers
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.folders import MODELS as LISTS
from tunedgemm.table.folders import SHIPPED
from tunedgemm.table.untuned import Untuned, write_untuned

MS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096)
TPS = (1, 2, 4, 8)
NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
#: Model -> its `NAMES`.
MODELS = {
    "command-r": (8192, 22528, 64, 64, 128, 256000),
    "command-r-plus": (12288, 33792, 96, 8, 128, 256000),
    "gemma-2-27b": (4608, 36864, 32, 16, 128, 256000),
    "gemma-2-9b": (3584, 14336, 16, 8, 256, 256000),
    "gemma-3-12b": (3840, 15360, 16, 8, 256, 262208),
    "gemma-3-27b": (5376, 21504, 32, 16, 128, 262208),
    "glm-4-9b": (4096, 13696, 32, 2, 128, 151552),
    "granite-3-8b": (4096, 12800, 32, 8, 128, 49155),
    "internlm-2.5-20b": (6144, 16384, 48, 8, 128, 92544),
    "llama-2-13b": (5120, 13824, 40, 40, 128, 32000),
    "llama-3.2-3b": (3072, 8192, 24, 8, 128, 128256),
    "mistral-large-2": (12288, 28672, 96, 8, 128, 32768),
    "mistral-nemo": (5120, 14336, 32, 8, 128, 131072),
    "mistral-small-3": (5120, 32768, 32, 8, 128, 131072),
    "olmo-2-32b": (5120, 27648, 40, 8, 128, 100352),
    "phi-3-mini": (3072, 8192, 32, 32, 96, 32064),
    "phi-4": (5120, 17920, 40, 10, 128, 100352),
    "qwen-2.5-14b": (5120, 13824, 40, 8, 128, 152064),
    "qwen-2.5-72b": (8192, 29568, 64, 8, 128, 152064),
    "qwen-2.5-7b": (3584, 18944, 28, 4, 128, 152064),
    "qwen-3-14b": (5120, 17408, 40, 8, 128, 151936),
    "qwen-3-8b": (4096, 12288, 32, 8, 128, 151936),
    "yi-34b": (7168, 20480, 56, 8, 128, 64000),
}
#: Sizes of N and of K of random weights, drawn evenly by their logarithms.
RANDOM_N, RANDOM_K = (64, 262144), (64, 65536)
#: Multiples of all sizes, and of K by block; and most multiplications of a product, elements of a
#: weight, and elements of an output.
STEP, BLOCK = 64, 128
MOST_WORK, MOST_WEIGHT, MOST_OUT = 10**13, 1 << 31, 1 << 30

Weight = tuple[int, int]


def of_models(step_k: int) -> list[Weight]:
    """Return (N, K) of all projections of the models, cut for each number of ranks that divides them."""
    found: set[Weight] = set()
    for numbers in MODELS.values():
        settings = dict(zip(NAMES, numbers, strict=True))
        for tp in TPS:
            if all(size % tp == 0 for size in (settings["intermediate_size"], settings["num_attention_heads"])):
                found |= {(layer.n, layer.k) for layer in layers(settings, tp)}
    return sorted((n, k) for n, k in found if n % STEP == 0 and k % step_k == 0)


def with_rows(op: str) -> set[Weight]:
    """Return (N, K) of the rows of the package's tables of an op."""
    found: set[Weight] = set()
    for file in sorted((SHIPPED / LISTS).glob("*_tuned_gemm.csv")):
        lines = file.read_text().splitlines()
        if f"# op: {op}" in lines:
            found |= {(int(row["N"]), int(row["K"])) for row in csv.DictReader(line for line in lines if not line.startswith("#"))}
    return found


def _size(chance: random.Random, sizes: tuple[int, int], step: int) -> int:
    """Return a multiple of *step* in a range, evenly by logarithms."""
    least, most = max(sizes[0], step), sizes[1]
    return min(most, round(least * (most / least) ** chance.random() / step) * step)


def drawn(op: str, models: int, others: int, seed: int) -> list[Shape]:
    """Return so many products of models and of random sizes, each once, M in turns."""
    chance, step_k = random.Random(f"{op} {seed}"), BLOCK if FIELDS[op].get("scale") == "block" else STEP
    known, weights = with_rows(op), of_models(step_k)
    chosen: dict[Shape, None] = {}
    for count, is_random in ((models, False), (others, True)):
        for index in range(count):
            m, before = MS[index % len(MS)], len(chosen)
            while len(chosen) == before:
                n, k = (_size(chance, RANDOM_N, STEP), _size(chance, RANDOM_K, step_k)) if is_random else chance.choice(weights)
                if (n, k) not in known and m * n * k <= MOST_WORK and n * k <= MOST_WEIGHT and m * n <= MOST_OUT:
                    chosen[Shape(op, m, n, k, **FIELDS[op])] = None  # type: ignore[arg-type]
    shapes = list(chosen)
    chance.shuffle(shapes)
    return shapes


def main(words: list[str] | None = None) -> int:
    """Write the lists, one a part."""
    parser = parser_of(__doc__)
    parser.add_argument("--op", default="a16w16", choices=("a16w16", "a8w8", "a8w8_blockscale"), help="default: %(default)s")
    parser.add_argument("--models", type=int, default=300, help="products of models (default: %(default)s)")
    parser.add_argument("--random", type=int, default=100, help="products of random sizes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--parts", type=int, default=1, help="lists that have all products together (default: %(default)s)")
    arguments = parser.parse_args(words)
    shapes = drawn(arguments.op, arguments.models, arguments.random, arguments.seed)
    folder = arguments.output or Path()
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(arguments.parts):
        target, listed = folder / f"{arguments.op}-{part}.csv", shapes[part :: arguments.parts]
        write_untuned(target, op_named(arguments.op), [Untuned(shape) for shape in listed])
        print(f"{target}: {len(listed)} shapes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
