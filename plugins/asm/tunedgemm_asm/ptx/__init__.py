"""A generator of PTX: GEMM kernels for Hopper (sm_90a) of 16- and 8-bit operands, built from named parts.

`config` says what a kernel is made of, `kernel` makes the text of one variant of it from the parts (`order`, `stream`, `barriers`,
`producer`, `consumer`, `promotion`, `splitk`, `scales`, `epilogue`), `assembler` the code; `tensormap` describes operands to the copy
engine, `shares` divides steps among blocks, `solutions` lists what serves a shape, `launch` calls it.

The facts are those of NVIDIA's PTX ISA: "Asynchronous Warpgroup Level Matrix Instructions" (descriptors and fragments),
"cp.async.bulk.tensor", "mbarrier", "setmaxnreg" and "Cluster Dimension Directives".
"""
