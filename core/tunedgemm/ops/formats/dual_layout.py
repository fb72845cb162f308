"""Keep a plain weight in two orders: the shuffled copy follows the plain weight.

torch counts the writes to a tensor in its version. A copy holds the version and the address of the
weight that it was made of; where they differ it is made again. `DualLayoutWeight` sees writes that
torch does not count, and has no copy while it is trained.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch

from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.shuffle import ShuffledWeight, shuffle_weight

#: Owners of the memory of one parameter alone: the parameter, and Python's object of the memory.
_SOLE = 2
#: Methods by which others may write without a count. Collectives call `is_complex` of what they
#: write.
_BEFORE_WRITES = ("is_complex", "untyped_storage", "storage", "numpy", "__array__", "__dlpack__", "share_memory_", "set_")


@attrs.frozen(eq=False)
class Orders:
    """A weight in two orders, at one state of its memory.

    Attributes:
        plain: the weight as a tensor of torch's own type, whose attributes take a third of the
            time. It shares memory and version with the parameter.
        shuffled: the copy, None where the weight has none.
        version, address: those of *plain* before the copy was made.
    """

    plain: torch.Tensor
    shuffled: ShuffledWeight | None
    version: int
    address: int


class DualLayoutWeight(torch.nn.Parameter):
    """A plain parameter that drops its shuffled copy where a write may go uncounted.

    Attributes:
        orders: the weight and its copy; None until `copied` makes the copy again.
        handed_out: whether its memory was given or taken since, so that others may keep it and
            write to it without a count. True of a weight that other code makes of this class.
    """

    orders: Orders | None = None
    handed_out = True

    def drop(self) -> None:
        """Let the copy go, because others get the memory."""
        self.handed_out, self.orders = True, None

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Return a detached view. Writes to it count, unlike those to the `data` of other tensors."""
        self.drop()
        return torch.Tensor.detach(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take other memory, as torch does."""
        self.drop()
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        if value is not self and is_foreign(self):
            make_single(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a weight that begins or ends its training drops its copy.

        Kernels that torch does not know may train it. A property would be traced by Dynamo, which
        then finds itself.
        """
        if name == "requires_grad" and value != self.requires_grad:
            self.drop()
        super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> DualLayoutWeight:  # type: ignore[override]
        """Set `requires_grad`."""
        self.requires_grad = requires_grad
        return self

    def detach(self) -> torch.Tensor:  # type: ignore[override]
        """Return a view, as in a state_dict; its writes count, those to its `data` and arrays do not."""
        self.orders = None
        return torch.Tensor.detach(self)

    def as_plain(self) -> torch.Tensor:
        """Return the memory as a tensor of torch's own type, without a gradient."""
        orders = self.orders
        if orders is not None and orders.plain._version == orders.version:  # `set_` counts as a write
            return orders.plain
        plain: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return plain

    def __deepcopy__(self, memo: dict[int, Any]) -> DualLayoutWeight:
        """Clone the plain weight."""
        if id(self) not in memo:
            memo[id(self)] = type(self)(torch.Tensor.detach(self).clone(), self.requires_grad)
        copied: DualLayoutWeight = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary parameter; `copy.copy` makes one of the same memory."""
        self.drop()
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


def _dropping(name: str) -> Callable[..., Any]:
    """Wrap a method of tensors so that a dual-layout weight drops its copy first."""
    method = getattr(torch.nn.Parameter, name)

    @functools.wraps(method)
    def dropping(self: DualLayoutWeight, *arguments: Any, **named: Any) -> Any:
        self.drop()
        return method(self, *arguments, **named)

    return dropping


for _name in _BEFORE_WRITES:
    setattr(DualLayoutWeight, _name, _dropping(_name))

#: Types of tensors that hold their values in plain order.
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, DualLayoutWeight)


@torch.no_grad()
def copied(weight: Any, layout: str) -> Orders:
    """Give a parameter two layouts, copy its present values, and return its orders.

    Other threads take the plain weight until the copy is complete. Where writes are not counted, or
    the layout does not fit, the weight has no copy.
    """
    weight.__class__ = DualLayoutWeight
    weight.orders = None  # lets the old copy go before the next
    with torch.inference_mode(False):
        plain = weight.detach()
        orders = weight.orders = Orders(plain, None, plain._version, plain.data_ptr())
        if uncounted(plain):
            return orders
        try:
            shuffled = shuffle_weight(plain, layout)
        except OperandError:  # it has other sizes or another dtype than when the layout was chosen
            return orders
    if plain.is_cuda:  # other threads read the copy on other streams
        torch.cuda.current_stream(plain.device).synchronize()
    shuffled.made_of = None  # the orders hold it
    complete = attrs.evolve(orders, shuffled=shuffled)
    if weight.orders is orders:  # nothing was written meanwhile
        weight.orders = complete
    return complete


def uncopied(weight: torch.nn.Parameter) -> Orders:
    """Return the orders of a weight that has no copy for now."""
    return Orders(torch.Tensor.data.__get__(weight), None, 0, 0)  # type: ignore[attr-defined]


def is_kept_elsewhere(weight: Any) -> bool:
    """Return whether another tensor may have a parameter's memory without its count of writes."""
    dual, foreign = type(weight) is DualLayoutWeight, is_foreign(weight)
    if foreign and not dual:
        return True
    if foreign or not dual or weight.handed_out:
        if dual:
            weight.orders = None  # they have the memory, too
        weight.handed_out = False  # before the check: another thread may hand it out meanwhile
        weight.handed_out |= not is_sole_holder(weight)
    kept: bool = weight.handed_out
    return kept


def make_single(weight: Any) -> None:
    """Make a dual-layout weight an ordinary parameter again."""
    if type(weight) is DualLayoutWeight:
        weight.__dict__.pop("orders", None)
        weight.__dict__.pop("handed_out", None)
        weight.__class__ = torch.nn.Parameter  # type: ignore[assignment]


def uncounted(weight: torch.Tensor) -> str:
    """Return why torch does not count the writes to a weight, "" if it does."""
    if weight.is_inference():
        return "it was made in inference mode, where torch counts no writes; load the model outside"
    return "other processes may write to its shared memory" if not weight.is_cuda and weight.is_shared() else ""


def is_foreign(weight: torch.Tensor) -> bool:
    """Return whether torch did not allocate a weight's memory, or has given an array of it away."""
    return not torch.Tensor.untyped_storage(weight).resizable()


def is_sole_holder(weight: torch.Tensor) -> bool:
    """Return whether no other tensor has the memory of a weight."""
    storage = torch.Tensor.untyped_storage(weight)  # past a dual-layout weight's own, which drops its copy
    owners: int = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return owners <= _SOLE


def tensors_alive() -> Mapping[int, list[torch.Tensor]]:
    """Return the tensors that Python holds, by the address of their storage's object."""
    alive: dict[int, list[torch.Tensor]] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            try:
                alive.setdefault(thing.untyped_storage()._cdata, []).append(thing)
            except (RuntimeError, NotImplementedError):  # no memory
                continue
    return alive


def has_uncounted_alias(weight: torch.Tensor, aliases: Iterable[torch.Tensor]) -> bool:
    """Return whether one of the tensors of a weight's memory has another version, as `data` has."""
    with torch.autograd._unsafe_preserve_version_counter(weight):  # type: ignore[attr-defined]
        for alias in aliases:
            before = -1 if alias.is_inference() else alias._version
            torch.autograd.graph.increment_version(weight)
            if alias.is_inference() or alias._version == before:
                return True
    return False
