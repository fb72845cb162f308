"""Stand for AITER's list of opus's kernels."""

from dataclasses import dataclass, field


@dataclass
class OpusGemmInstance:
    tag: str
    tile: tuple[int, int, int]
    rest: str = ""
    output_dtypes: list[str] = field(default_factory=lambda: ["fp32_t"])

    @property
    def name(self) -> str:
        return f"opus_gemm_{self.tag}512x{'x'.join(map(str, self.tile))}_2x4_16x16x32_0x0x0{self.rest}"


_BOTH = ["fp32_t", "bf16_t"]
kernels_list = {
    2: OpusGemmInstance("a8w8_", (128, 128, 128)),
    4: OpusGemmInstance("", (256, 256, 64), output_dtypes=_BOTH),
    9: OpusGemmInstance("", (128, 128, 32), output_dtypes=_BOTH),
    200: OpusGemmInstance("flatmm_splitk_", (64, 64, 64), "_wgpcu2"),
    204: OpusGemmInstance("flatmm_splitk_", (32, 128, 64), "_wgpcu2_nooob"),
    303: OpusGemmInstance("persistent_", (128, 128, 64), output_dtypes=_BOTH),
    11000: OpusGemmInstance("gfx942_a8w8_bs_bpreshuf_sb_tailm_v16_", (128, 128, 128)),
}
HEURISTIC_DEFAULT_KIDS_BY_ARCH = {"gfx950": frozenset({4, 9, 200, 204})}
