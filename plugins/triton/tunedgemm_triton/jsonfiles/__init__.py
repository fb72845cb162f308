"""JSON files of tuned parameters, in the form of AITER's: their entries, buckets, names, checks and
conversion.
"""
