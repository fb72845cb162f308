"""What is left to do with the experts' outputs."""

from __future__ import annotations


class TopKWeightAndReduceNoOP:
    """Nothing: they are weighted and summed."""
