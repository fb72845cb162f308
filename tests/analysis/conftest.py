"""Shared fixtures of the tests of analyses."""

from __future__ import annotations

import random

import pytest
from tunedgemm.tuner.trial import Samples


@pytest.fixture
def planted_bench():
    """Return a function that makes a bench of planted times, by what the kernels that run add to *ran*."""

    def planted(ran: list[str], times: dict[str, float], noise: float):
        def bench(op, shape, device):
            operands, chance = op.make_inputs(shape, device.torch_device, 0), random.Random(shape.m)

            def sample(launchers, rounds):
                answers = {}
                for solution, launcher in launchers.items():
                    ran.clear()
                    launcher.call(*operands)
                    us = times[ran[-1] if ran else "torch"]
                    answers[solution] = Samples(tuple(us * chance.gauss(1.0, noise) for _ in range(rounds)))
                return answers

            return sample

        return bench

    return planted
