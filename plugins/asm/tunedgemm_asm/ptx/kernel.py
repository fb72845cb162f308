"""The text of one kernel: directives, parameters, and the body from its parts."""

from __future__ import annotations

from tunedgemm_asm.ptx.abi import declaration
from tunedgemm_asm.ptx.barriers import meet_cluster, start_barriers
from tunedgemm_asm.ptx.consumer import consume
from tunedgemm_asm.ptx.frame import open_frame
from tunedgemm_asm.ptx.names import COLUMNS, Variant
from tunedgemm_asm.ptx.producer import produce

#: The symbol of every kernel; a module has one.
ENTRY = "tunedgemm_ptx"
#: The first version of the language that has sm_90a, and the architecture with matrix instructions by warp groups.
VERSION, TARGET = "8.0", "sm_90a"


def text_of(variant: Variant) -> str:
    """A kernel as an assembler or the driver takes it."""
    f, config = open_frame(variant), variant.config
    t = f.text
    start_barriers(f)
    consumers = t.label("CONSUMER")
    t.op("bra", consumers, when=t.to("pred", "setp.ne.u32", f.group, 0))
    produce(f)
    t.place(consumers)
    consume(f)
    t.place(f.end)
    if config.cluster > 1:
        meet_cluster(f, "release")  # no block may end while another still writes into it or arrives at its barriers
    t.op("ret")
    return "\n".join([*_head(variant), *t.declarations(), *t.lines, "}", ""])


def _head(variant: Variant) -> list[str]:
    config = variant.config
    cluster = [f".reqnctapercluster {config.cluster}, 1, 1"] if config.cluster > 1 else []
    scales = "" if variant.scale == "none" else f", scales by {variant.scale}{', of x transposed' * variant.transposed}"
    scales += f", weight in {COLUMNS}" * variant.columns
    return [
        f"// {config.name}: {variant.dtype} to {variant.outdtype}, bias {variant.bias or 'none'}{scales}",
        f".version {VERSION}",
        f".target {TARGET}",
        ".address_size 64",
        ".extern .shared .align 1024 .b8 stages[];",
        f".visible .entry {ENTRY}({declaration(variant.scale, config.panels > 0)})",
        f".reqntid {config.threads}, 1, 1",
        *cluster,
        f".maxnreg {config.entry_registers}",
        "{",
    ]
