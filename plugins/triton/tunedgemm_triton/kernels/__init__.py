"""Triton kernels, one file a family.

Importing a family imports Triton; importing this folder does not.
"""
