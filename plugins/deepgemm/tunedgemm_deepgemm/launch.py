"""Turn a solution and a shape into a launcher that calls a private copy of the library."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
from tunedgemm.plugin import Device, Launcher, LaunchError, PluginError, Shape, Solution, Unsupported
from tunedgemm.tools.launching import (
    ForkSafeLock,
    device_context,
    driver_interface,
    environment_with,
    loaded_driver,
    on_device,
    switched_on,
    torch_dtype,
)

from tunedgemm_deepgemm.build import COMPILE, MissingError, Target, check_compiled, ensure_compiled, short
from tunedgemm_deepgemm.experts.call import call_of
from tunedgemm_deepgemm.experts.plan import plan_of
from tunedgemm_deepgemm.library import Access, Installation, variables
from tunedgemm_deepgemm.names import EXPERTS, Kernel, resolve
from tunedgemm_deepgemm.product import GROUPED, Product, apply, arguments_of, keywords_of, operands_of, products_of

if TYPE_CHECKING:
    import torch

#: The library's message where a thread has no context, and the driver's status.
_NO_CONTEXT, _STATUS = re.compile(r"CUDA driver error \(.*\): 201 \("), 201


@attrs.frozen(eq=False)
class Copy:
    """A private copy of the library, for one device.

    Attributes:
        module: the extension.
        lock: held while a call sets and uses its settings.
        applied: the settings that it has, if known.
        initialised: whether it has read its variables.
    """

    module: Any
    lock: ForkSafeLock = attrs.field(factory=ForkSafeLock)
    applied: list[Kernel | None] = attrs.field(factory=lambda: [None])
    initialised: list[bool] = attrs.field(factory=lambda: [False])


_copies: dict[tuple[Any, ...], Copy] = {}
_opening = ForkSafeLock()


def targets_of(access: Access, solution: Solution, shape: Shape, device: Device) -> tuple[Target, ...]:
    """Return everything that a solution's kernels depend on, in the order of its products.

    Raises:
        PluginError: no library or compiler was found, or the solution does not serve the shape.
    """
    kernel = resolve(solution, shape, device)
    return tuple(Target(access.find(), access.toolkit(), product, kernel, device) for product in products_of(shape, kernel))


def prepare(access: Access, solution: Solution, shape: Shape, device: Device) -> None:
    """Compile into the artifact cache, without a device.

    Raises:
        PluginError: no library or compiler was found.
        LaunchError: the kernel does not compile.
    """
    try:
        kernel = resolve(solution, shape, device)
    except PluginError:  # bind reports it
        return
    if shape.m:
        for target in targets_of(access, solution, shape, device):
            ensure_compiled(access, target)
        if shape.op == EXPERTS:
            access.steps.prepare(plan_of(shape, kernel), device)


def refusal(access: Access, solution: Solution, shape: Shape, device: Device) -> str:
    """Return why `bind` would refuse a solution, or an empty text."""
    try:
        targets = targets_of(access, solution, shape, device)
        if shape.m and not switched_on(COMPILE):
            for target in targets:
                check_compiled(target)
            if shape.op == EXPERTS and not access.steps.are_compiled(plan_of(shape, targets[0].kernel), device):
                raise MissingError(f"deepgemm: steps of {shape} are not compiled; tune the shape on this machine, or set {COMPILE}=1")
    except (PluginError, OSError) as error:  # the latter: a cache that is not private
        return str(error)
    return ""


def bind(access: Access, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
    """Return the launcher of a solution for exactly this shape.

    Args:
        access: finds, compiles and opens the library.
        device: device whose limits apply; its index is -1 where host memory emulates it.

    Raises:
        PluginError: the library does not load.
        LaunchError: the kernel does not compile or load.
    """
    if reason := refusal(access, solution, shape, device):
        return Unsupported(reason)
    targets, where = targets_of(access, solution, shape, device), device.torch_device
    if not shape.m:
        return Launcher(_empty(shape, where))
    prepare(access, solution, shape, device)
    copy = _copy_of(access, targets[0])
    if shape.op == EXPERTS and (missing := [name for name in GROUPED if not hasattr(copy.module, name)]):
        return Unsupported(f"deepgemm: {_named(targets[0].installation)} lacks {', '.join(missing)}; install a newer one")
    calls = []
    with copy.lock, contextlib.nullcontext() if copy.initialised[0] else environment_with(variables(targets[0].toolkit)):
        for target in targets:
            call = on_device(_product(target.product, _launch(copy, target), where), device.index)
            call(*operands_of(target.product, where))  # loads the kernel, which no graph may capture
            calls.append(call)
        copy.initialised[0] = True
    if shape.op != EXPERTS:
        return Launcher(call, workspace_bytes=target.product.copied_bytes)
    plan = plan_of(shape, target.kernel)
    call = call_of(shape, plan, access.steps.load(plan, device), calls, where)
    return Launcher(on_device(call, device.index), workspace_bytes=plan.nbytes)


def _copy_of(access: Access, target: Target) -> Copy:
    """Return the device's copy of the library, opened once in this process.

    Raises:
        PluginError: it does not load.
    """
    key = access, target.installation.identity, target.toolkit.identity, target.device.index
    with _opening:
        if key not in _copies:
            with environment_with(variables(target.toolkit)), device_context(target.device.index):
                try:
                    copy = Copy(access.open(target.installation, target.toolkit))
                except ImportError as error:
                    raise PluginError(f"deepgemm: {_named(target.installation)} does not load: {error}") from error
                copy.module.get_num_sms()  # reads the variables, and the current device
            _copies[key] = copy
        return _copies[key]


def _named(installation: Installation) -> str:
    return f"deep_gemm {installation.version} in {installation.folder}"


def _launch(copy: Copy, target: Target) -> Callable[..., None]:
    """Return the library's function with a kernel's settings, as a function of its arguments."""
    import torch

    lock, applied, module, kernel, sms = copy.lock, copy.applied, copy.module, target.kernel, target.device.cu_num
    function, keywords, name = getattr(module, target.product.function), keywords_of(kernel), f"deepgemm {kernel.name}"
    index, no_memory = target.device.index, torch.OutOfMemoryError

    def launch(*arguments: Any) -> None:
        with lock:
            if applied[0] is not kernel:
                applied[0] = None
                apply(module, kernel, sms)
                applied[0] = kernel
            function(*arguments, **keywords)

    def mended(*arguments: Any) -> None:
        try:
            launch(*arguments)
        except no_memory:
            raise
        except RuntimeError as error:
            if index < 0 or not _NO_CONTEXT.search(str(error)):
                raise LaunchError(f"{name}: {short(str(error))}") from error
            loaded_driver(driver_interface("deepgemm", "nvidia")).mend("launch", _STATUS, index)
            launch(*arguments)

    return mended


def _product(product: Product, launch: Callable[..., None], where: torch.device) -> Callable[..., Any]:
    """Return a call of the op's operands that allocates the output; a product of experts is given one."""
    import torch

    empty, dtype, n, arguments = torch.empty, product.torch_output, product.n, arguments_of(product)
    plain, grouped = (product.m, n), bool(product.experts)

    def call(*operands: Any) -> Any:
        x = operands[0]
        out = operands[5] if grouped else empty(plain, dtype=dtype, device=where)
        launch(*arguments(operands, out))
        return out if grouped or x.dim() == 2 else out.view(*x.shape[:-1], n)

    return call


def _empty(shape: Shape, where: torch.device) -> Callable[..., Any]:
    """Return a call for operands without rows."""
    import torch

    empty, dtype, n = torch.empty, torch_dtype(shape.outdtype), shape.n

    def call(x: Any, *_: Any) -> Any:
        return empty((*x.shape[:-1], n), dtype=dtype, device=where)

    return call
