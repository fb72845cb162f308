"""Executor ``ray``: device tuners on the GPUs of a Ray cluster."""

from tunedgemm_ray.executor import device_tuners

__all__ = ["device_tuners"]
