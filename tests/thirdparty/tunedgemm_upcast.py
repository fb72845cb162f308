"""The first example of contract 1, as a third party writes it."""

from tunedgemm.plugin import Backend, Launcher, Shape, Solution, Unsupported, hookimpl
from tunedgemm.tools.launching import torch_dtype


class Upcast:
    @hookimpl
    def supports(self, shape: Shape) -> Unsupported | None:
        if shape.layout != "row" or shape.scale != "none":
            return Unsupported("takes plain [N, K] weights without scales")
        return None

    @hookimpl
    def enumerate_solutions(self):
        yield Solution("upcast", "mm_v1", batch_invariant=False)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape) -> Launcher | Unsupported:
        if solution.kernel_name != "mm_v1":
            return Unsupported(f"no kernel {solution.kernel_name!r}")
        dtype = torch_dtype(shape.outdtype)

        def call(x, weight, bias=None):
            out = x.float() @ weight.float().t()
            return (out if bias is None else out + bias).to(dtype)

        return Launcher(call)


upcast = Backend("upcast", Upcast(), contract=1, ops=("a16w16",))
