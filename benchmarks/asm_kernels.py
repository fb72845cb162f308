"""Count what the plugin `asm` generates: registers, LDS, occupancy, and a step along K against the
MFMA bound.

    python benchmarks/asm_kernels.py -o benchmarks/results/asm-kernels

Needs no GPU and no assembler; nothing is timed. ``--check`` compares the folder's page with what it
would write.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from harness import add_check, parser_of
from tunedgemm_asm.gcn.cost import Cost, cost_of
from tunedgemm_asm.gcn.kernel import stream_of
from tunedgemm_asm.gcn.loop import DONE, LOOP
from tunedgemm_asm.gcn.names import WAVES
from tunedgemm_asm.gcn.names import KernelConfig as Plan
from tunedgemm_asm.gcn.resources import TARGETS
from tunedgemm_asm.gcn.space import enumerate_configs as plans
from tunedgemm_asm.gcn.stream import Op

_HEAD = """# The kernels that the plugin asm generates

Written by `benchmarks/asm_kernels.py`, which counts instructions; nothing here was timed, and no kernel has run on a GPU.

- tile: rows of x by rows of the weight; waves: of the four of a workgroup along M and N; ahead: steps of 64 elements of K whose loads are
  on their way while one is multiplied.
- v, a, s: vector registers, accumulators, scalars; LDS: bytes of a workgroup; waves/SIMD: as many fit, by registers and LDS.
- A wave's instructions in a step: products (MFMA), LDS, memory, scalar; other: waits, wait states, barriers, branches.
- Cycles of a step: MFMA, for which the matrix unit of a SIMD is busy with one wave's products; issue, four for each of a wave's
  instructions; LDS, of all four waves' reads and writes, none of which meet in a bank. In a cycle {banks}.
  What is largest bounds the loop where a workgroup is alone on its compute unit; with several waves on a SIMD, MFMA and LDS cycles of each
  add up, and the issue of one overlaps the products of another.
- LDS's rates of reading are AMD's
  ([FP8 GEMM on CDNA 4](https://rocm.blogs.amd.com/software-tools-optimization/cdna4-gemm-kernels/README.html), table 1): four bytes of each
  bank, 32 in CDNA 3 and 64 in CDNA 4. That writes did not become faster with the banks is assumed.
- alone: cycles of a step where one workgroup has the compute unit, by a model that issues a wave's instructions in order, one in four
  cycles: answers of LDS come {lds} cycles after its turn, those of memory {memory} cycles after theirs, and loads take 64 bytes a cycle;
  all four waves do the same at the same time. Share: MFMA cycles of them. A second workgroup fills what is left.

Tiles with few rows or columns are bound by LDS, by loads and by answers; but they are for few rows of x, where memory is slower than all of
them: a step's bytes, (rows of x + rows of the weight) * 128, cost more than its products.

Kernels that split K have the same loop.
"""
_FIELDS = (
    *("kernel", "tile", "waves", "ahead", "v", "a", "s", "LDS", "waves/SIMD", "MFMA", "LDS", "memory", "scalar", "other"),
    *("MFMA", "issue", "LDS", "alone", "share"),
)
_OTHER = ("wait", "barrier", "branch")


#: The model's cycles: until an instruction's successor, answers of LDS and of memory, bytes that a
#: compute unit's loads take in one.
ISSUE, LDS_ANSWERS, MEMORY_ANSWERS, LOADED = 4, 64, 800, 64
#: Passes through the loop; the second half of them counts.
PASSES = 12
_COUNTS = re.compile(r"(vmcnt|lgkmcnt)\((\d+)\)")


def alone(plan: Plan) -> float:
    """Return the cycles of a step of a workgroup that has its compute unit for itself, by the model
    that the page describes.
    """
    stream, _ = stream_of(plan)
    body = [item for item in stream[stream.index(LOOP) : stream.index(DONE)] if isinstance(item, Op) and item.unit != "branch"]
    target, kilobyte = plan.target, WAVES << 10
    lds = {"ds_read_b128": kilobyte / (4 * target.lds_banks), "ds_write_b128": kilobyte / 128}
    now = units = lds_free = memory_free = 0.0
    pending: dict[str, list[float]] = {"vmcnt": [], "lgkmcnt": []}
    ends = []
    for _ in range(PASSES):
        for item in body:
            now += ISSUE
            if item.unit == "mfma":
                now = max(now, units)
                units = now + target.cycles
            elif item.unit == "lds":
                lds_free = max(now, lds_free) + lds[item.name]
                pending["lgkmcnt"].append(lds_free + LDS_ANSWERS)
            elif item.unit == "vmem":
                memory_free = max(now, memory_free) + kilobyte / LOADED
                pending["vmcnt"].append(memory_free + MEMORY_ANSWERS)
            for counter, left in _COUNTS.findall(item.mods) if item.unit == "wait" else ():
                while len(pending[counter]) > int(left):
                    now = max(now, pending[counter].pop(0))
        ends.append(now)
    later = PASSES // 2
    return (ends[-1] - ends[later - 1]) / (PASSES - later) / plan.unrolled


def line(taken: Cost) -> str:
    """Return one kernel's row."""
    plan, step = taken.plan, taken.step
    cycles = (taken.product_cycles, taken.issue_cycles, taken.lds_cycles)
    values = (
        f"`{plan.name}`", f"{plan.tile_m} x {plan.tile_n}", f"{plan.waves_m} x {plan.waves_n}", plan.prefetch,
        taken.vectors, taken.sums, taken.scalars, plan.lds_bytes, taken.waves,
        *(f"{step[unit]:.0f}" for unit in ("mfma", "lds", "vmem", "salu")), f"{sum(step.get(unit, 0) for unit in _OTHER):.1f}",
        *cycles, f"{(taken_alone := alone(plan)):.0f}", f"{min(cycles[0] / taken_alone, 1):.0%}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, values))} |"


def page() -> str:
    """Return the page."""
    banks = ", ".join(f"{gfx} reads {4 * target.lds_banks} bytes" for gfx, target in TARGETS.items()) + ", both write 128"
    parts = [_HEAD.format(banks=banks, lds=LDS_ANSWERS, memory=MEMORY_ANSWERS)]
    for gfx, target in TARGETS.items():
        parts.append(f"## {gfx}\n\n`{target.product}`, {target.cycles} cycles; {target.lds_bytes >> 10} KiB of LDS.\n")
        rule = "|".join(["---"] * len(_FIELDS))
        rows = [line(cost_of(plan)) for plan in plans(gfx) if not plan.split]
        parts.append("\n".join([f"| {' | '.join(_FIELDS)} |", f"|{rule}|", *rows, ""]))
    return "\n".join(parts)


def main(words: list[str] | None = None) -> int:
    """Write the page, or compare it."""
    parser = parser_of(__doc__)
    add_check(parser)
    arguments = parser.parse_args(words)
    if arguments.check and not arguments.output:
        parser.error("--check: needs the folder of the page; name it with -o")
    text, out = page(), (arguments.output or Path()) / "README.md"
    if arguments.check:
        same = out.is_file() and out.read_text() == text
        print(f"{out}: {'up to date' if same else 'differs; write it again'}")
        return int(not same)
    if arguments.output:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
