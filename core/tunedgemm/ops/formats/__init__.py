"""Operand formats: quantisation, shuffled weights, raw contents. Unlike ops, these load torch."""
