"""The first example of contract 1, frozen: it must load for as long as contract 1 is supported."""

from tunedgemm.plugin import Launcher, Shape, Solution, Unsupported, device_of, hookimpl, ops, torch_dtype  # noqa: F401

OPS = ("a16w16",)


@hookimpl
def supports(shape: Shape) -> bool | Unsupported:
    if shape.layout != "row" or shape.scale != "none":
        return Unsupported("takes plain [N, K] weights without scales")
    return True


@hookimpl
def enumerate_solutions(shape: Shape):
    yield Solution("upcast", "mm_v1", batch_invariant=False)


@hookimpl
def bind(solution: Solution, shape: Shape) -> Launcher | Unsupported:
    if solution.kernel_name != "mm_v1":
        return Unsupported(f"no kernel {solution.kernel_name!r}")
    dtype = torch_dtype(shape.outdtype)

    def call(x, weight, bias=None):
        out = x.float() @ weight.float().t()
        return (out if bias is None else out + bias).to(dtype)

    return Launcher(call)
