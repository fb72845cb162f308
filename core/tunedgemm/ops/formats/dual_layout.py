"""Keep a plain weight and a shuffled copy that is updated when the weight changes.

torch counts in-place writes in a tensor's version counter. The copy records the version and the
address of its weight, and is renewed when they differ. `DualLayoutWeight` also detects writes that
torch does not count, and has no copy during training.
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

#: Reference count of a storage that only one parameter owns: the parameter and its Python object.
_SOLE = 2
#: Methods that precede uncounted writes; collectives call `is_complex` on the tensors they write.
_BEFORE_WRITES = ("is_complex", "untyped_storage", "storage", "numpy", "__array__", "__dlpack__", "share_memory_", "set_")


@attrs.frozen(eq=False)
class Orders:
    """A weight in plain and shuffled order, at one version of its memory.

    Attributes:
        plain: the weight as a plain tensor, whose attributes are three times as fast. It shares
            memory and version with the parameter.
        shuffled: the copy; None without one.
        version, address: version and address of *plain* before the copy was made.
    """

    plain: torch.Tensor
    shuffled: ShuffledWeight | None
    version: int
    address: int


class DualLayoutWeight(torch.nn.Parameter):
    """A plain parameter that drops its shuffled copy before possibly uncounted writes.

    Attributes:
        orders: the weight and its copy; None until `copied` renews the copy.
        handed_out: whether other code may hold its memory and write to it uncounted. True for
            instances that other code creates.
    """

    orders: Orders | None = None
    handed_out = True

    def drop(self) -> None:
        """Drop the copy, because other code gets the memory."""
        self.handed_out, self.orders = True, None

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Return a detached view, writes to which are counted, unlike those to torch's `data`."""
        self.drop()
        return torch.Tensor.detach(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Replace the memory, as in torch."""
        self.drop()
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        if value is not self and is_foreign(self):
            make_single(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a change of ``requires_grad`` drops the copy.

        Fused optimisers may write to it uncounted. Dynamo would recurse on a property instead.
        """
        if name == "requires_grad" and value != self.requires_grad:
            self.drop()
        super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> DualLayoutWeight:  # type: ignore[override]
        """Set `requires_grad`."""
        self.requires_grad = requires_grad
        return self

    def detach(self) -> torch.Tensor:  # type: ignore[override]
        """Return a view, as for a state_dict; writes to it count, to its `data` and arrays do not."""
        self.orders = None
        return torch.Tensor.detach(self)

    def as_plain(self) -> torch.Tensor:
        """Return the memory as a plain tensor without gradient."""
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
        """Pickle as an ordinary parameter; `copy.copy` shares the memory."""
        self.drop()
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


def _dropping(name: str) -> Callable[..., Any]:
    """Wrap a tensor method to drop the copy first."""
    method = getattr(torch.nn.Parameter, name)

    @functools.wraps(method)
    def dropping(self: DualLayoutWeight, *arguments: Any, **named: Any) -> Any:
        self.drop()
        return method(self, *arguments, **named)

    return dropping


for _name in _BEFORE_WRITES:
    setattr(DualLayoutWeight, _name, _dropping(_name))

#: Tensor types with values in plain order.
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, DualLayoutWeight)


@torch.no_grad()
def copied(weight: Any, layout: str) -> Orders:
    """Give a parameter two layouts, shuffle a copy, and return its orders.

    Other threads use the plain weight until the copy is complete. Without counted writes or a
    fitting layout, the weight has no copy.
    """
    weight.__class__ = DualLayoutWeight
    weight.orders = None  # frees the old copy first
    with torch.inference_mode(False):
        plain = weight.detach()
        orders = weight.orders = Orders(plain, None, plain._version, plain.data_ptr())
        if uncounted(plain):
            return orders
        try:
            shuffled = shuffle_weight(plain, layout)
        except OperandError:  # sizes or dtype have changed since the layout was chosen
            return orders
    if plain.is_cuda:  # other threads may read the copy on other streams
        torch.cuda.current_stream(plain.device).synchronize()
    shuffled.made_of = None  # `orders` records it
    complete = attrs.evolve(orders, shuffled=shuffled)
    if weight.orders is orders:  # nothing was written meanwhile
        weight.orders = complete
    return complete


def uncopied(weight: torch.nn.Parameter) -> Orders:
    """Return the orders of a weight without a copy."""
    return Orders(torch.Tensor.data.__get__(weight), None, 0, 0)  # type: ignore[attr-defined]


def is_kept_elsewhere(weight: Any) -> bool:
    """Check whether another tensor may share a parameter's memory but not its version counter."""
    dual, foreign = type(weight) is DualLayoutWeight, is_foreign(weight)
    if foreign and not dual:
        return True
    if foreign or not dual or weight.handed_out:
        if dual:
            weight.orders = None  # others share the memory
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
    """Return why torch does not count writes to a weight; "" if it does."""
    if weight.is_inference():
        return "it was made in inference mode, where torch counts no writes; load the model outside"
    return "other processes may write to its shared memory" if not weight.is_cuda and weight.is_shared() else ""


def is_foreign(weight: torch.Tensor) -> bool:
    """Check whether a weight's memory is not torch's, or is shared with an array."""
    return not torch.Tensor.untyped_storage(weight).resizable()


def is_sole_holder(weight: torch.Tensor) -> bool:
    """Check that no other tensor shares a weight's memory."""
    storage = torch.Tensor.untyped_storage(weight)  # past a dual-layout weight's own, which drops its copy
    owners: int = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return owners <= _SOLE


def tensors_alive() -> Mapping[int, list[torch.Tensor]]:
    """Return all live tensors by the address of their storage object."""
    alive: dict[int, list[torch.Tensor]] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            try:
                alive.setdefault(thing.untyped_storage()._cdata, []).append(thing)
            except (RuntimeError, NotImplementedError):  # no memory
                continue
    return alive


def has_uncounted_alias(weight: torch.Tensor, aliases: Iterable[torch.Tensor]) -> bool:
    """Check whether a tensor that shares a weight's memory has another version counter."""
    with torch.autograd._unsafe_preserve_version_counter(weight):  # type: ignore[attr-defined]
        for alias in aliases:
            before = -1 if alias.is_inference() else alias._version
            torch.autograd.graph.increment_version(weight)
            if alias.is_inference() or alias._version == before:
                return True
    return False
