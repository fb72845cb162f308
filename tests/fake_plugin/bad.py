"""Plugins that break the contract, each in one way.

Each is an entry point of the distribution in the neighbouring folder.
"""

from tunedgemm.plugin import Device, Launcher, Shape, Solution, Unsupported, hookimpl


class Plain:
    """Hooks that a backend needs, of which each subclass breaks one."""

    OPS = ("a16w16",)
    libtype = "plain"

    @hookimpl
    def supports(self, shape: Shape, device: Device):
        return True

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
        return True


class Defaults(Plain):
    @hookimpl
    def supports(self, shape, device=None):
        return True


class Stars(Plain):
    @hookimpl
    def supports(self, *arguments):
        return True


class Hookless:
    OPS = ("a16w16",)


class Launchless(Plain):
    bind = None


class Opless(Plain):
    OPS = ()


class Future(Plain):
    CONTRACT = 99


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
            return True
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
        return None if shape.m > 1 else True

    @hookimpl
    def heuristic_fallback(self):
        return "kernel"

    @hookimpl
    def bind(self):
        return 42

    def library_version(self, device):
        return 12


misspelt, other_arguments, defaults, stars, hookless, launchless = (
    Misspelt(),
    OtherArguments(),
    Defaults(),
    Stars(),
    Hookless(),
    Launchless(),
)
opless, future, foreign, not_solutions = Opless(), Future(), Foreign(), NotSolutions()
raising, refusing, vague = Raising(), Refusing(), Vague()
