"""Generate AMDGCN text: bf16 GEMM kernels for gfx942 and gfx950. None has run on hardware.

`names` defines a kernel's configuration and `space` lists all of them. `prologue`, `loop`, `splitk`
and `epilogue` write its instructions; `waits` and `hazards` derive the waits between them. `kernel`
makes the text, and `build` the code objects and the pack.
"""
