"""Compile a kernel of DeepGEMM, in a process without a device.

It reads one JSON object: ``installation``, ``home``, ``product``, ``kernel`` and ``sms``. A call on
the host's memory compiles the kernel, then fails for lack of a GPU. The errors are printed as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tunedgemm_deepgemm.library import Installation, Toolkit, open_copy
from tunedgemm_deepgemm.names import parse_name
from tunedgemm_deepgemm.product import Product, apply, arguments_of, keywords_of, operands_of


def main() -> None:
    """Answer the question of standard input on standard output.

    Raises:
        ImportError: the library does not load.
    """
    question: dict[str, Any] = json.load(sys.stdin)
    texts = question["installation"]
    installation = Installation(Path(texts["folder"]), Path(texts["extension"]), texts["version"], texts["owner"])
    module = open_copy(installation, Toolkit(Path(question["home"], "bin", "nvcc")))
    import torch

    product, kernel = Product(**question["product"]), parse_name(question["kernel"])
    apply(module, kernel, question["sms"])
    function, errors = getattr(module, product.function), []
    # Row-major scales are first transposed by a kernel of the library, so that one fails first.
    for form in dict.fromkeys((product, product.aligned())):
        out = form.output(torch.device("cpu"))
        try:
            function(*arguments_of(form)(operands_of(form, out.device), out), **keywords_of(kernel))
        except RuntimeError as error:
            errors.append(str(error))
    print(json.dumps(errors))  # noqa: T201  the answer to the parent
