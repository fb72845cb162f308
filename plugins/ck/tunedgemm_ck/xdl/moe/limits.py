"""Check which shapes and architectures CK's two stages of fmoe support, as data.

They answer for absent devices too.
"""

from __future__ import annotations

import functools

import attrs
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES, unusual_experts

from tunedgemm_ck.names import Stages
from tunedgemm_ck.xdl.limits import DTYPES
from tunedgemm_ck.xdl.moe.cut import RENDERED_ACTIVATIONS, RENDERED_EPILOGUES, lds, unrenderable
from tunedgemm_ck.xdl.moe.names import BLOCK, MoeInstance

#: Kind of the quantisation to AITER's number in the names.
QUANTS = {"No": 0, "per_Tensor": 1, "per_Token": 2, "per_1x128": BLOCK}
#: Dtype to AITER's word in the names; both kinds of fp8 are F8.
WORDS = {"bf16": "B16", "fp16": "F16", "fp8_e4m3fn": "F8", "fp8_e4m3fnuz": "F8", "int8": "I8"}

#: Architectures with atomic addition of bf16, which stage 2 needs: CDNA 3 and later, as for fp8.
GFX = ARCHITECTURES.having(matrix="mfma", fp8=("fp8_e4m3fn", "fp8_e4m3fnuz"))

#: CK counts the elements of all experts' weights together in 32 signed bits. Tokens have 24 bits
#: and a token's experts 7, since both share a word. 2^24 rows of 256 threads exceed a grid.
MOST, MOST_ROWS, MOST_TOPK = 1 << 31, 1 << 24, 128


def unfit(instance: Stages, split: int, shape: Shape, device: Device) -> str | None:
    """Return why a pair of instances cannot serve a shape on a device, or None."""
    if split:
        return f"splitK of fmoe must be 0 (got {split})"
    for number, stage in enumerate((instance.first, instance.second), 1):
        assert isinstance(stage, MoeInstance)
        if stage.stage != number:
            return f"{stage.name} is of stage {stage.stage}, not {number}"
        if reason := unfit_stage(stage, shape, device):
            return f"stage {number}: {reason}"
    return None


@functools.lru_cache(maxsize=4096)
def unsupported(shape: Shape, device: Device) -> str | None:
    """Return why CK has no stages for a shape's dtypes, scales, layout and sizes on a device, or
    None.
    """
    kind, q_dtype, topk = str(shape["q_type"]), str(shape["q_dtype_w"]), int(shape["topk"])
    pairs, weights = shape.m * topk, int(shape["expert"]) * shape.n * shape.k * 2
    checks = (
        (device.gfx in GFX, f"{' or '.join(GFX)} (got {device.gfx})"),
        (not (unusual := unusual_experts(shape)), f"factors of one dtype, without {unusual}"),
        (kind in QUANTS, f"QuantType {', '.join(QUANTS)} (got {kind})"),
        (device.gfx not in DTYPES or q_dtype in DTYPES[device.gfx], f"dtypes that {device.gfx} multiplies (got {q_dtype})"),
        (kind != "per_1x128" or q_dtype.startswith("fp8"), f"blocks of fp8 (got {q_dtype})"),
        (shape.layout == "aiter16x16", f"weights in layout aiter16x16 (got {shape.layout}; see shuffle_weight)"),
        (bool(shape["g1u1"]), "gated experts (got use_g1u1 0)"),
        (
            str(shape["act"]) in RENDERED_ACTIVATIONS,
            f"{' or '.join(RENDERED_ACTIVATIONS)} (got {shape['act']}, which CK's headers of 2025 lack)",
        ),
        (pairs < MOST_ROWS and topk < MOST_TOPK, f"less than {MOST_ROWS} pairs of a token and an expert, topk below {MOST_TOPK}"),
        (weights < MOST, f"less than {MOST} elements of all experts' weights (got {weights})"),
        (2 * weights // int(shape["expert"]) < MOST, f"weights of an expert of less than {MOST} bytes"),
        (2 * max(shape.m * shape.n, (pairs + topk) * shape.k) < MOST, f"hidden states and an intermediate of less than {MOST} bytes"),
    )
    return "; ".join(f"ck fmoe needs {wanted}" for right, wanted in checks if not right) or None


@functools.lru_cache(maxsize=16384)
def unfit_stage(of: MoeInstance, shape: Shape, device: Device) -> str | None:
    """Return why a stage's instance cannot serve a supported shape, or None."""
    return unrenderable(of) or _other(of, shape) or _sizes(of, shape, device)


def _other(of: MoeInstance, shape: Shape) -> str | None:
    """Return which part of the name belongs to another problem than the shape's, or None."""
    expected = attrs.evolve(instance_of(of.tile, shape, "", of.stage), epilogue=of.epilogue)
    return None if of == expected else f"it is an instance for {_described(of)}, not for {_described(expected)}"


def _described(of: MoeInstance) -> str:
    weights = ", weights of the routing" * of.weighted
    return f"Quant{of.quant} {'_'.join(of.dtypes)}{of.act and ' ' + of.act}{weights}"


def _sizes(of: MoeInstance, shape: Shape, device: Device) -> str | None:
    n, k = (shape.k, shape.n) if of.stage == 1 else (shape.n, shape.k)
    names = ("inter_dim", "model_dim") if of.stage == 1 else ("model_dim", "inter_dim")
    if n % of.n or k % of.k:
        return f"{names[0]} and {names[1]} must be multiples of {of.n} and {of.k}: sizes are not padded (got {n} and {k})"
    if device.gfx == "gfx950" and of.dtypes[0] == "F8" and of.k < 128:
        return f"{of.tile}: gfx950 multiplies 128 elements of fp8 at a time"
    if lds(of) > ARCHITECTURES[device.gfx].shared_bytes:
        return f"{of.tile}: {lds(of)} bytes of LDS exceed the {ARCHITECTURES[device.gfx].shared_bytes} of {device.gfx}"
    return None


def instance_of(tile: str, shape: Shape, gfx: str, stage: int) -> MoeInstance:
    """Return the instance of a tile, written as `MoeInstance.tile`, for the problem of a shape."""
    sizes, waves, pipeline = tile.split("_")
    threads, m, n, k = map(int, sizes.split("x"))
    quant, first = QUANTS[str(shape["q_type"])], stage == 1
    word = WORDS[str(shape["q_dtype_w"])]
    weighted = bool(shape["doweight_stage1"]) == first
    plain = "TypeCastExpertWeight" if weighted else "TypeCast"
    scaled = "MulABScale" if first else "MulABScaleExpertWeight"
    epilogue = RENDERED_EPILOGUES[quant][0] if quant == BLOCK else "TypeCast" if gfx == "gfx950" else scaled if quant else plain
    return MoeInstance(
        stage=stage,
        threads=threads,
        m=m,
        n=n,
        k=k,
        waves=tuple(map(int, waves.split("x"))),  # type: ignore[arg-type]
        epilogue=epilogue,
        pipeline=int(pipeline.removeprefix("v")),
        swizzle=False,
        quant=quant,
        weighted=weighted,
        act=str(shape["act"]) if first else "",
        dtypes=(word, word, WORDS[shape.dtype if first else shape.outdtype]),
    )
