"""Register the backend ``triton``: GEMM kernels in Triton, for NVIDIA and AMD.

Importing this package loads neither torch nor Triton.
"""

from __future__ import annotations

from tunedgemm.plugin import Backend

from tunedgemm_triton import hooks
from tunedgemm_triton.families import FAMILIES, PLATFORMS
from tunedgemm_triton.jsonfiles.space import OPTION

triton = Backend(
    "triton",
    hooks,
    contract=1,
    ops=tuple(FAMILIES),
    platforms=PLATFORMS,
    options=(OPTION,),
    scale_orders=("m_major", "m_major_padded"),
    variables=("TUNEDGEMM_TRITON_JSON",),
)
