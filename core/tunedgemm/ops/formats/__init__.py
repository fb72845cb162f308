"""Formats of operands: quantisation, shuffled weights, raw contents. Unlike ops, these modules load torch."""
