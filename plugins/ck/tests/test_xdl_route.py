"""Check on the host the kernel that pads experts to whole blocks."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "tunedgemm_ck" / "xdl" / "sources"
EMULATED = Path(__file__).with_name("emulated")

_DRIVER = """
#include "gpu.h"
#include "route.h"
using namespace tunedgemm::ck_moe;
extern "C" int64_t most(int64_t pairs, int64_t experts, int64_t tile) { return most_blocks(pairs, experts, tile); }
extern "C" void padded(const int32_t* order, const int32_t* offset, const float* weight, int32_t* rows, float* weights, int32_t* experts,
                       int32_t* valid, int count, int tokens, int topk, int tile) {
  emulate(count, pad_threads, [&] { pad(order, offset, weight, {rows, weights, experts, valid}, tokens, topk, tile); });
}
"""


@pytest.fixture(scope="module")
def route(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compile ``route.h`` for the CPU."""
    if not shutil.which("c++"):
        pytest.skip("c++ not found")
    folder = tmp_path_factory.mktemp("route")
    (folder / "one.cpp").write_text(_DRIVER)
    include = [f"-I{EMULATED}", f"-I{SOURCES}"]
    command = ["c++", "-O1", "-std=c++20", "-shared", "-fPIC", *include, str(folder / "one.cpp"), "-o", str(folder / "one.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "one.so"))


def sorted_pairs(ids: list[int], experts: int) -> tuple[list[int], list[int]]:
    """Return (order, offset) of a stable sort of pairs by expert; ids beyond are omitted."""
    order = [pair for expert in range(experts) for pair, chosen in enumerate(ids) if chosen == expert]
    return order, [sum(0 <= chosen < expert for chosen in ids) for expert in range(experts + 1)]


def test_experts_are_padded_to_whole_blocks(route: ctypes.CDLL) -> None:
    """Each pair has a row with its weight in a block of its expert; other rows are padding."""
    for chosen in ["any", "one", "none", "outside"]:
        for tokens, topk, experts, tile in [(1, 2, 4, 16), (33, 3, 5, 16), (200, 2, 300, 32), (64, 1, 3, 64), (7, 4, 9, 128)]:
            draw = random.Random(tokens * tile)
            ranges = {
                "any": (0, experts - 1),
                "one": (experts // 2, experts // 2),
                "none": (experts, experts),
                "outside": (-2, experts + 2),
            }
            ids = [draw.randint(*ranges[chosen]) for _ in range(tokens * topk)]
            weight = [draw.random() for _ in ids]
            order, offset = sorted_pairs(ids, experts)
            route.most.restype = ctypes.c_int64
            most = route.most(ctypes.c_int64(len(ids)), ctypes.c_int64(experts), ctypes.c_int64(tile))
            rows, weights, of_block = (ctypes.c_int32 * (most * tile))(), (ctypes.c_float * (most * tile))(), (ctypes.c_int32 * most)()
            valid = ctypes.c_int32(-1)
            arrays = (
                (ctypes.c_int32 * max(len(order), 1))(*order),
                (ctypes.c_int32 * len(offset))(*offset),
                (ctypes.c_float * len(weight))(*weight),
            )
            route.padded(*arrays, rows, weights, of_block, ctypes.byref(valid), experts, tokens, topk, tile)

            expected: list[tuple[int, int, float]] = []
            for expert in range(experts):
                mine = order[offset[expert] : offset[expert + 1]]
                expected += [(expert, pair // topk | pair % topk << 24, weight[pair]) for pair in mine]
                expected += [(expert, tokens, 0.0)] * (-len(mine) % tile)
            assert valid.value == len(expected) <= most * tile
            assert [of_block[row // tile] for row in range(valid.value)] == [expert for expert, _, _ in expected]
            assert list(rows[: valid.value]) == [row for _, row, _ in expected]
            assert list(weights[: valid.value]) == pytest.approx([value for _, _, value in expected], rel=1e-6)
