"""fmoe: a solution is two instances, one a stage."""
