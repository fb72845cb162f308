"""The cost model of the Hopper kernels."""

from tunedgemm_asm.ptx.cost import step_cycles
from tunedgemm_asm.ptx.names import KernelConfig


def test_a_wgmma_takes_as_long_as_one_of_the_next_multiple_of_16_rows():
    """Tensor cores multiply rows of b in groups of 16, so 104 rows cost what 112 do."""
    of_96, of_104, of_112 = (step_cycles(KernelConfig(64, rows, 3, 1)) for rows in (96, 104, 112))
    assert of_96 < of_104 == of_112
