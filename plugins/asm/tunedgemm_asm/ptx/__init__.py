"""Generate PTX: GEMM kernels for Hopper (sm_90a) with 16- and 8-bit operands.

`names` defines a kernel's configuration, `limits` the shapes that it supports and `resources` what
an SM holds. `kernel` assembles the text of one variant from `order`, `stream`, `barriers`,
`producer`, `consumer`, `promotion`, `splitk`, `scales` and `epilogue`. `build` turns text into
code, `tensormap` describes operands to TMA, `shares` divides steps for stream-K, `space` lists
solutions, `launch` binds them.

Sources: NVIDIA's PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (descriptors and
fragments), "cp.async.bulk.tensor", "mbarrier", "setmaxnreg" and "Cluster Dimension Directives".
"""
