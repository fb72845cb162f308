"""Generate the text of one kernel: instructions, kernel descriptor and metadata."""

from __future__ import annotations

from tunedgemm_asm_gcn.epilogue import store_tile
from tunedgemm_asm_gcn.frame import ABI, Frame, frame_of
from tunedgemm_asm_gcn.hazards import with_nops
from tunedgemm_asm_gcn.loop import loop, start
from tunedgemm_asm_gcn.names import KernelConfig
from tunedgemm_asm_gcn.prologue import (
    choose_tile,
    clear_accumulators,
    describe_operand,
    load_arguments,
    narrow_lane,
    place_loads,
    place_reads,
    place_shuffled,
    place_waves,
    share_of_k,
)
from tunedgemm_asm_gcn.resources import THREADS
from tunedgemm_asm_gcn.splitk import share_tile
from tunedgemm_asm_gcn.stream import Item
from tunedgemm_asm_gcn.waits import with_waits

#: Scalars reserved in addition: VCC, flat scratch and XNACK.
_RESERVED_SCALARS = 6


def stream_of(config: KernelConfig) -> tuple[list[Item], Frame]:
    """Return the instructions of a kernel with all waits and wait states, and its registers."""
    f = frame_of(config)
    parts = [
        *load_arguments(f),
        *place_waves(f),
        *choose_tile(f),
        *share_of_k(f),
        *describe_operand(f, "a"),
        *describe_operand(f, "b"),
        *place_loads(f),
        *narrow_lane(f),
        *(place_shuffled(f) if config.shuffled else []),
        *place_reads(f),
        *start(f),
        *clear_accumulators(f),
        *loop(f),
        *(share_tile(f) if config.split else []),
        *store_tile(f),
    ]
    return with_nops(with_waits(parts), config.target), f


def text_of(config: KernelConfig) -> str:
    """Return the text of a kernel for an assembler."""
    stream, f = stream_of(config)
    body = "\n".join(str(item) for item in stream)
    return "\n".join([_HEAD.format(gfx=config.gfx, name=config.name), body, _tail(f), ""])


def vectors(f: Frame) -> int:
    """Return the vector registers below the accumulators, a multiple of four."""
    return -(-f.given.taken["v"] // 4) * 4


_HEAD = """    .amdgcn_target "amdgcn-amd-amdhsa--{gfx}"
    .amdhsa_code_object_version 5
    .text
    .protected {name}
    .globl {name}
    .p2align 8
    .type {name},@function
{name}:"""


def _tail(f: Frame) -> str:
    name, accumulators = f.config.name, f.accumulators.count
    descriptor = {
        "group_segment_fixed_size": f.config.lds_bytes,
        "private_segment_fixed_size": 0,
        "kernarg_size": ABI.size,
        "user_sgpr_count": 2,
        "user_sgpr_kernarg_segment_ptr": 1,
        "system_sgpr_workgroup_id_x": 1,
        "system_sgpr_workgroup_id_y": 0,
        "system_sgpr_workgroup_id_z": 1,
        "system_vgpr_workitem_id": 0,
        "next_free_vgpr": vectors(f) + accumulators,
        "next_free_sgpr": f.given.taken["s"],
        "accum_offset": vectors(f),
        "reserve_vcc": 1,
        "float_denorm_mode_32": 3,
        "float_denorm_mode_16_64": 3,
        "dx10_clamp": 1,
        "ieee_mode": 1,
        "tg_split": 0,
    }
    kinds = {"pointer": "global_buffer\n        .address_space: global"}
    arguments = "\n".join(
        f"      - .name: !str {field.name}\n        .offset: {field.offset}\n        .size: {field.bytes}\n"
        f"        .value_kind: {kinds.get(field.kind, 'by_value')}"
        for field in ABI.fields
    )
    return "\n".join(
        [
            f"    .size {name}, .-{name}",
            '    .section .rodata,"a",@progbits',
            "    .p2align 6, 0x0",
            f"    .amdhsa_kernel {name}",
            *(f"        .amdhsa_{key} {value}" for key, value in descriptor.items()),
            "    .end_amdhsa_kernel",
            "    .amdgpu_metadata",
            "---",
            "amdhsa.version: [1, 2]",
            f"amdhsa.target: amdgcn-amd-amdhsa--{f.config.gfx}",
            "amdhsa.kernels:",
            f"  - .name: {name}",
            f"    .symbol: {name}.kd",
            f"    .kernarg_segment_size: {ABI.size}",
            "    .kernarg_segment_align: 8",
            f"    .group_segment_fixed_size: {f.config.lds_bytes}",
            "    .private_segment_fixed_size: 0",
            "    .wavefront_size: 64",
            f"    .sgpr_count: {f.given.taken['s'] + _RESERVED_SCALARS}",
            f"    .vgpr_count: {vectors(f) + accumulators}",
            f"    .agpr_count: {accumulators}",
            "    .sgpr_spill_count: 0",
            "    .vgpr_spill_count: 0",
            f"    .max_flat_workgroup_size: {THREADS}",
            "    .uses_dynamic_stack: false",
            "    .args:",
            arguments,
            "...",
            "    .end_amdgpu_metadata",
        ]
    )
