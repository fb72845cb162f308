"""Plugins that break the contract, each in one way.

Each is an entry point of the distribution in the neighbouring folder.
"""

from tunedgemm.plugin import Backend, Device, Launcher, Shape, Solution, Unsupported, hookimpl


class Plain:
    """Hooks that a backend needs, of which each subclass breaks one."""

    libtype = ""

    @hookimpl
    def supports(self, shape: Shape, device: Device):
        return None

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device):
        return [Solution(self.libtype, "kernel")]

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device):
        import torch

        return Launcher(torch.nn.functional.linear)


class Misspelt(Plain):
    @hookimpl
    def enumerate_solution(self, shape):
        return []


class OtherArguments(Plain):
    @hookimpl
    def supports(self, shape, architecture):
        return None


class Defaults(Plain):
    @hookimpl
    def supports(self, shape, device=None):
        return None


class Stars(Plain):
    @hookimpl
    def supports(self, *arguments):
        return None


class Hookless:
    pass


class Unmarked(Plain):
    def lack(self, solution):
        return ""


class Launchless(Plain):
    bind = None


class Foreign(Plain):
    libtype = "torch"


class NotSolutions(Plain):
    @hookimpl
    def enumerate_solutions(self):
        return ["kernel"]


class Raising(Plain):
    """Backend that raises in every hook."""

    libtype = "fake_raising"

    @hookimpl
    def supports(self, shape: Shape):
        if shape.m == 1:
            return
        raise ZeroDivisionError("of supports")

    @hookimpl
    def enumerate_solutions(self):
        yield Solution("fake_raising", "kernel")
        raise ZeroDivisionError("of enumerate_solutions")

    @hookimpl
    def heuristic_fallback(self):
        raise ZeroDivisionError("of heuristic_fallback")

    @hookimpl
    def bind(self):
        raise ZeroDivisionError("of bind")

    @hookimpl
    def library_version(self, device):
        raise ZeroDivisionError("of library_version")


class Refusing(Plain):
    """Backend that refuses in `bind`, as a library without a kernel for the shape does."""

    libtype = "fake_refusing"

    @hookimpl
    def bind(self):
        return Unsupported("no workspace is large enough")


class Vague(Plain):
    """Backend whose answers have other types than the contract's."""

    libtype = "fake_vague"

    @hookimpl
    def supports(self, shape: Shape):
        return shape.m > 1 or None

    @hookimpl
    def heuristic_fallback(self):
        return "kernel"

    @hookimpl
    def bind(self):
        return 42

    @hookimpl
    def library_version(self, device):
        return 12


#: Names of the entry points without their prefix -> hooks, or the fields that are wrong.
BAD = {
    "misspelt": Misspelt(),
    "other_arguments": OtherArguments(),
    "defaults": Defaults(),
    "stars": Stars(),
    "hookless": Hookless(),
    "unmarked": Unmarked(),
    "launchless": Launchless(),
    "opless": {"ops": ()},
    "zeroth": {"contract": 0},
    "future": {"contract": 99},
    "misspelt_field": {"platform": ()},
    "foreign": Foreign(),
    "not_solutions": NotSolutions(),
    "raising": Raising(),
    "refusing": Refusing(),
    "vague": Vague(),
}


def __getattr__(name: str) -> object:
    if name == "module":
        return __import__("fake_plugin")
    if name == "renamed":
        return Backend("another", Plain(), ops=("a16w16",))
    if name not in BAD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    bad = BAD[name]
    fields = {"hooks": Plain(), **bad} if isinstance(bad, dict) else {"hooks": bad}
    return Backend(f"fake_{name}", **{"ops": ("a16w16",), **fields})
