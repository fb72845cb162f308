"""Stand for AITER's 16-bit product in Triton, by gluon on gfx1250."""
