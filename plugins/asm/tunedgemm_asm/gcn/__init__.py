"""A generator of AMDGCN text: bf16 GEMM kernels for gfx942 and gfx950, built from named parts. None has run on hardware.

`config` says what a kernel is made of, `parts` write its instructions, `waits` and `hazards` derive what must stand between them,
`kernel` makes the text, `assembler` the code object and `pack` the folder that the loader reads.
"""
