"""``tunedgemm explain``: which solution serves a shape, and why not the others."""

from __future__ import annotations

import argparse

from tunedgemm.command import Command
from tunedgemm.errors import UserError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sizes", metavar="M,N,K", help="sizes, as 16,1280,8192")
    parser.add_argument("--op", default="a16w16", help="op family (default: %(default)s)")
    parser.add_argument("--dtype", default="bf16", help="dtype of the activations (default: %(default)s)")
    parser.add_argument("--outdtype", default="", help="dtype of the output; default: the activations'")
    parser.add_argument("--bias", action="store_true", help="with a bias vector")
    parser.add_argument("--layout", default="row", help="layout of the weight (default: %(default)s)")
    parser.add_argument("--device", default="", metavar="GFX:CU", help="another device, as gfx942:304; default: the present one")


def _run(arguments: argparse.Namespace) -> int:
    from tunedgemm.device import Device
    from tunedgemm.dispatch import Dispatcher
    from tunedgemm.ops import op_named
    from tunedgemm.shape import Shape

    op = op_named(arguments.op)
    try:
        m, n, k = (int(text) for text in arguments.sizes.split(","))
    except ValueError:
        raise UserError(f"expected three sizes as M,N,K, got {arguments.sizes!r}") from None
    device = None
    if arguments.device:
        gfx, _, units = arguments.device.partition(":")
        try:
            device = Device(gfx, int(units))
        except ValueError:
            raise UserError(f"expected GFX:CU such as gfx942:304, got {arguments.device!r}") from None
    epilogue = "bias" if arguments.bias else "none"
    shape = Shape(op.name, m, n, k, arguments.dtype, arguments.outdtype, epilogue, layout=arguments.layout)
    print(Dispatcher(op).explain(shape, device))
    return 0


command = Command("explain", "say which solution serves a shape, and why not the others", _add_arguments, _run)
