"""Map AITER's names to the template parameters of one stage of fmoe with CK and back."""

from __future__ import annotations

import functools
import re

import attrs
from tunedgemm.plugin import PluginError

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

_PATTERN = (
    r"moe_ck2stages_gemm(?P<stage>[12])_(?P<tile>\d{1,4}x\d{1,4}x\d{1,4}x\d{1,4})_(?P<waves>\dx\d)_(?P<epilogue>[A-Za-z0-9]+)"
    r"_v(?P<pipeline>[1-5])_Nswizzle(?P<swizzle>[01])_Quant(?P<quant>\d)_MulRoutedWeight(?P<weighted>[01])(_(?P<act>[a-z]+))?"
    r"_(?P<dtypes>[A-Z0-9]+_[A-Z0-9]+_[A-Z0-9]+)"
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
        tile, _, pipeline = self.tile.rpartition("_")
        switches = f"Nswizzle{int(self.swizzle)}_Quant{self.quant}_MulRoutedWeight{int(self.weighted)}"
        words = [f"moe_ck2stages_gemm{self.stage}", tile, self.epilogue, pipeline, switches, self.act, *self.dtypes]
        return "_".join(filter(None, words))


@functools.lru_cache(maxsize=4096)
def parse_moe(name: str) -> MoeInstance:
    """Return the stage with this name; `MoeInstance.name` is the inverse.

    Raises:
        PluginError: no stage has that name; the message names the unknown part.
    """
    match = re.fullmatch(_PATTERN, name)
    if not match:
        raise PluginError(f"ck fmoe has no kernel {name!r}: names look like {EXAMPLE}")
    texts = match.groupdict()
    threads, m, n, k = map(int, texts["tile"].split("x"))
    return MoeInstance(
        stage=int(texts["stage"]),
        threads=threads,
        m=m,
        n=n,
        k=k,
        waves=tuple(map(int, texts["waves"].split("x"))),  # type: ignore[arg-type]
        epilogue=texts["epilogue"],
        pipeline=int(texts["pipeline"]),
        swizzle=texts["swizzle"] == "1",
        quant=int(texts["quant"]),
        weighted=texts["weighted"] == "1",
        act=texts["act"] or "",
        dtypes=tuple(texts["dtypes"].split("_")),  # type: ignore[arg-type]
    )
