"""Launcher: the bound function that runs one solution on one shape; what dispatch caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen
class Launcher:
    """A solution bound to one shape on one device, ready to run.

    Attributes:
        call: takes the op's operands by position, trailing absent ones left out, with any leading dimensions,
            and returns a new output tensor [..., N]. Operands are contiguous and 16-byte aligned. A launcher that a plugin's
            `bind` returns gets a shuffled weight as a plain tensor of its bytes. Output and workspace come from
            ``torch.empty``. Safe to call from several threads and streams.
        graph_safe: whether `call` may be captured in a CUDA or HIP graph.
        workspace_bytes: scratch memory that one call takes beside its output.
    """

    call: Callable[..., Any] = attrs.field(validator=attrs.validators.is_callable())
    graph_safe: bool = True
    workspace_bytes: int = 0
