"""Compile a kernel of DeepGEMM, in a process without a device.

It reads one JSON object: ``installation``, ``home``, ``product``, ``kernel`` and ``sms``. A call on
the host's memory compiles the kernel, then fails for lack of a GPU. The errors are printed as JSON.
Copies that register operations refuse tensors of the host, so theirs are labelled as on a GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

from tunedgemm_deepgemm.library import Installation, Toolkit, open_copy, registers
from tunedgemm_deepgemm.names import parse_name
from tunedgemm_deepgemm.product import Product, apply, arguments_of, keywords_of, operands_of

#: DLPack's number of CUDA devices (kDLCUDA).
_DLPACK_CUDA = 2


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

    if labelled := registers(installation.extension):
        _describe_gpu_to_torch()
    product, kernel = Product(**question["product"]), parse_name(question["kernel"])
    apply(module, kernel, question["sms"])
    function, errors = getattr(module, product.function), []
    for form in product.compiled_forms():
        out = form.output(torch.device("cpu"))
        arguments = arguments_of(form)(operands_of(form, out.device), out)
        try:
            function(*(on_gpu(arguments) if labelled else arguments), **keywords_of(kernel))
        except RuntimeError as error:
            errors.append(str(error))
    print(json.dumps(errors))  # noqa: T201  the answer to the parent


def _describe_gpu_to_torch() -> None:
    """Have torch take the described GPU for an initialised one, and allocate in the host's memory."""
    import torch

    torch.cuda._lazy_init = lambda: None
    memory = torch.cuda.memory.CUDAPluggableAllocator(os.environ["LD_PRELOAD"].partition(":")[0], "allocate", "release")
    torch.cuda.memory.change_current_allocator(memory)


def on_gpu(value: Any) -> Any:
    """Return tensors, also those in tuples, that share their memory and say that they are on a GPU."""
    import torch

    if isinstance(value, tuple):
        return tuple(on_gpu(each) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    capsule = torch._C._to_dlpack(value)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # DLTensor: the address of the data, then DLDevice, whose first field is its type.
    ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)).value = _DLPACK_CUDA
    return torch._C._from_dlpack(capsule)
