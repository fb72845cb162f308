"""Generate the text of one kernel: directives, parameter and body."""

from __future__ import annotations

from tunedgemm_asm.ptx.abi import declaration
from tunedgemm_asm.ptx.barriers import meet_cluster, start_barriers
from tunedgemm_asm.ptx.consumer import consume
from tunedgemm_asm.ptx.frame import open_frame
from tunedgemm_asm.ptx.names import COLUMNS, Variant
from tunedgemm_asm.ptx.producer import produce

#: Symbol of every kernel; a module has one kernel.
ENTRY = "tunedgemm_ptx"
#: First PTX version with sm_90a, and the architecture with wgmma.
VERSION, TARGET = "8.0", "sm_90a"


def text_of(variant: Variant) -> str:
    """Return the text of a kernel."""
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
        meet_cluster(f, "release")  # a CTA must not exit while another writes into it or arrives at its barriers
    t.op("ret")
    return "\n".join([*_head(variant), *t.declarations(), *t.lines, "}", ""])


def _head(variant: Variant) -> list[str]:
    config = variant.config
    cluster = [f".reqnctapercluster {config.cluster}, 1, 1"] if config.cluster > 1 else []
    order = ", of x transposed" * variant.transposed + " and padded" * variant.padded
    scales = "" if variant.scale == "none" else f", scales by {variant.scale}{order}"
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
