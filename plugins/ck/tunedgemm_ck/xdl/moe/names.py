"""Map AITER's names to the template parameters of one stage of fmoe with CK and back."""

from __future__ import annotations

import functools

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.tables import KernelName

from tunedgemm_ck.xdl.names import WAVE

#: Epilogues of a stage; each word names the factors that it applies.
EPILOGUES = (
    "TypeCast",
    "TypeCastExpertWeight",
    "MulABScale",
    "MulABScaleExpertWeight",
    "MulABScaleExpertWeightA8W8blkscale",
    "MulABScaleExpertWeightA8W8blkscaleSplitk",
    "MulABScaleShuffled",
    "MulABScaleExpertWeightShuffled",
    "MulABScaleWint4",
    "MulABScaleExpertWeightWin4",
)

#: AITER's number of scales of 1x128 of the activations and 128x128 of the weights.
BLOCK = 4

#: Activations of the first stage.
ACTIVATIONS = ("gelu", "silu", "swiglu")

#: AITER's words for dtypes of operands.
DTYPE_WORDS = {"B16": "bf16", "F16": "fp16", "F8": "fp8", "I8": "int8", "I4": "int4", "FP4X2": "fp4x2"}

_NAME = KernelName(
    "moe_ck2stages_gemm{stage}_{threads}x{m}x{n}x{k}_{waves:x2}_{epilogue:word}_v{pipeline}"
    "_Nswizzle{swizzle}_Quant{quant}_MulRoutedWeight{weighted}[_{act:word}]_{x:word}_{weight:word}_{out:word}",
    *("x", "weight", "out"),
)
EXAMPLE = "moe_ck2stages_gemm1_256x32x64x128_1x4_MulABScale_v1_Nswizzle0_Quant2_MulRoutedWeight0_silu_F8_F8_B16"


@attrs.frozen(cache_hash=True)
class MoeInstance:
    """Template parameters of one stage.

    Attributes:
        stage: 1, up to the activation, or 2.
        threads: of a block.
        m, n, k: of a block's tile.
        waves: of a block along M and N.
        epilogue: of `EPILOGUES`.
        pipeline: version of CK's block pipeline.
        swizzle: whether blocks run along N first.
        quant: AITER's number of the kind of scales: 0 none, 1 tensor, 2 token, 3 1x32, 4 1x128.
        weighted: whether this stage multiplies by the routing's weights.
        act: activation of the first stage, "" of the second.
        dtypes: of the activations, the weight and the output, in AITER's words.

    Raises:
        PluginError: the parameters are inconsistent; the message names the part.
    """

    stage: int
    threads: int
    m: int
    n: int
    k: int
    waves: tuple[int, int]
    epilogue: str
    pipeline: int
    swizzle: bool
    quant: int
    weighted: bool
    act: str
    dtypes: tuple[str, str, str]

    def __attrs_post_init__(self) -> None:
        waves_m, waves_n = self.waves
        sizes = (self.threads, self.m, self.n, self.k)
        checks = (
            ("tile", min(sizes) > 0, f"threads, M, N and K must be positive (got {'x'.join(map(str, sizes))})"),
            ("epilogue", self.epilogue in EPILOGUES, f"must be one of {', '.join(EPILOGUES)} (got {self.epilogue!r})"),
            ("activation", self.act in (ACTIVATIONS if self.stage == 1 else ("",)), f"stage {self.stage} does not have {self.act!r}"),
            (
                "dtypes",
                all(dtype in DTYPE_WORDS for dtype in self.dtypes),
                f"must be {', '.join(DTYPE_WORDS)} (got {', '.join(self.dtypes)})",
            ),
            ("waves", waves_m * waves_n * WAVE == self.threads, f"must have {self.threads} threads (got {waves_m}x{waves_n} waves)"),
        )
        for part, right, wrong in checks:
            if not right:
                raise PluginError(f"ck fmoe: {part}: {wrong}")

    @property
    def bytes(self) -> int:
        """Return the bytes of an element of the activations; of fp4x2, of a pair of values."""
        return 2 if self.dtypes[0] in ("B16", "F16") else 1

    @property
    def tile(self) -> str:
        """Return threads, tile, waves and pipeline: the part of the name that no problem
        determines.
        """
        return f"{self.threads}x{self.m}x{self.n}x{self.k}_{self.waves[0]}x{self.waves[1]}_v{self.pipeline}"

    @property
    def name(self) -> str:
        """Return ``kernelName1`` or ``kernelName2``."""
        return _NAME.write(self, *self.dtypes)


@functools.lru_cache(maxsize=4096)
def parse_moe(name: str) -> MoeInstance:
    """Return the stage with this name; `MoeInstance.name` is the inverse.

    Raises:
        PluginError: no stage has that name; the message names the unknown part.
    """
    fields = _NAME.parse(name)
    if (
        fields is None
        or fields["stage"] not in (1, 2)
        or fields["pipeline"] not in range(1, 6)
        or max(fields["swizzle"], fields["weighted"]) > 1
    ):
        raise PluginError(f"ck fmoe has no kernel {name!r}: names look like {EXAMPLE}")
    dtypes = (fields.pop("x"), fields.pop("weight"), fields.pop("out"))
    switches = {switch: bool(fields.pop(switch)) for switch in ("swizzle", "weighted")}
    return MoeInstance(**{"act": "", **fields, **switches}, dtypes=dtypes)
