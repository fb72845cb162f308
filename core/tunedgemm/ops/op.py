"""Op: the description of one tensor signature. A file of this folder has one op or a family."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.errors import ShapeError
from tunedgemm.ops.domain import size_problem
from tunedgemm.ops.key import key_function
from tunedgemm.ops.padded_m import padded
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch


#: A launcher's call, or a function that takes its place.
Function = Callable[..., "torch.Tensor"]

#: The arguments of `Serving.call`: operands in the op's order, output dtype or None, op's fields.
Arguments = tuple[tuple["torch.Tensor | None", ...], "torch.dtype | None", dict[str, Any]]

#: Maps the arguments of a hot function to those of `Serving.call`, in Python that compilers trace.
ArgumentOrder = Callable[..., Arguments]


@attrs.frozen
class Tolerance:
    """Bounds of the error of an output against the reference.

    Attributes:
        atol, rtol: bounds of one element, ``|out - ref| <= atol + rtol * |ref|``; the share of
            elements outside them is AITER's error ratio.
        row_error: bound of ``norm(out - ref) / norm(ref)`` for the worst row of the output.
    """

    atol: float
    rtol: float
    row_error: float


def as_they_are(cells: Mapping[str, str]) -> Mapping[str, str]:
    """Return the cells of a row: AITER's columns are those of every op."""
    return cells


@attrs.frozen(eq=False)
class Columns:
    """The CSV format of an op's tables: AITER's columns in AITER's order.

    Attributes:
        tuned_file, untuned_file: AITER's default file names.
        variable: the environment variable that names other files.
        key: columns of the untuned file; the tuned file has gfx and cu_num before them.
        values: columns of the tuned file after its key.
        parse: one row as texts of `key` and `own`, absent columns left out, to a Shape; raises
            UserError for a wrong cell. That of an op returns the shape as calls ask for it
            (`Op.as_asked`). The text of ``gfx`` is the row's architecture, "" or absent
            the present one; ``fp8`` depends on it.
        format: a Shape to the texts of `key` and `own`; "" where a column of `own` has its default.
        own: our columns, after AITER's, for the parts of a shape that AITER's key lacks.
        read: cells of `values`, absent ones left out, to the cells that every op has. Those are
            ``libtype``, ``kernelName``, ``splitK``, ``us`` and ``err_ratio``. Needed where AITER's
            columns differ. What it does not return is read under its own name.
        write: the inverse, for the cells of a row that is written.
    """

    tuned_file: str
    untuned_file: str
    variable: str
    key: tuple[str, ...]
    values: tuple[str, ...]
    parse: Callable[[Mapping[str, str]], Shape]
    format: Callable[[Shape], dict[str, str]]
    own: tuple[str, ...] = ("layout", "scale")
    read: Callable[[Mapping[str, str]], Mapping[str, str]] = as_they_are
    write: Callable[[Mapping[str, str]], Mapping[str, str]] = as_they_are


@attrs.frozen
class Factors:
    """Operands that enter the result as a product: what scales one may be taken from the other.

    Attributes:
        activations, weights: positions in order of preference; the first in floats or e8m0 counts.
        is_linear: whether the output scales with the activations, row by row.
    """

    activations: tuple[int, ...]
    weights: tuple[int, ...]
    is_linear: bool = True


def unbiased(shape: Shape) -> Shape:
    """Return a shape without its bias: `Op.unbiased` where the bias comes last and is added last."""
    return attrs.evolve(shape, epilogue="none", bias_dtype="")


@attrs.frozen(eq=False)
class _ParseAsked:
    """`Columns.parse` of an op: the shape of a row as calls ask for it.

    Attributes:
        __wrapped__: the one that the op was made with.
        as_asked: `Op.as_asked`.
    """

    __wrapped__: Callable[[Mapping[str, str]], Shape]
    as_asked: Callable[[Shape], Shape]

    def __call__(self, cells: Mapping[str, str]) -> Shape:
        """Return the shape of a row; raises UserError for one that no call asks for."""
        return self.as_asked(self.__wrapped__(cells))


@attrs.frozen
class Op:
    """One op family.

    Attributes:
        name: the word of ``--op``, of `Shape.op` and of a backend's ``ops``.
        operands: names of the operands in a launcher's order; optional ones end in ``?`` and come
            last.
        weights: positions of the operands that a model keeps, and that are cold when a layer runs.
        columns: the format of its tables.
        shape_of: tensors and the output dtype (or None) to a Shape; raises OperandError for those
            that do not form the op. `Call` has checked their number and types.
        make_inputs: (shape, torch device, seed) to random operands, absent trailing ones left out.
        reference: (shape, operands) to the exact result in float32 or float64, computed from the
            operands as given.
        tolerance: shape to Tolerance.
        flops: shape to floating-point operations of one call.
        bytes_moved: shape to the fewest bytes of memory traffic of one call.
        fake: the operands and the output dtype to an empty output, for meta tensors.
        fields: a Shape to those keyword arguments of `shape_of`, apart from ``otype``, that the
            operands do not determine.
        strided: positions of the operands whose order in memory is part of the shape. Launchers get
            them with their strides, aligned but not contiguous.
        problem: a Shape to the reason why no operands have it, with the field and what would fit,
            or ""; see `tunedgemm.ops.domain`. Sizes that no memory holds are refused for every op.
        canonical: a Shape to the one form in which `shape_of` returns it, where several forms mean
            one call.
        equivalent_shapes: a Shape to the shapes whose rows may serve it, best first: itself, then
            as AITER's key knows it.
        unbiased: a Shape with a bias to the same without one, where the bias is the last operand
            given and nothing follows it; None where it is not, so that no bias is split off.
        weight_dtype: a Shape to the short dtype of the weight in memory; by default the field
            ``q_dtype_w``, else the dtype of the activations.
        serves_alike: whether rows of the package's tables serve all devices of their gfx and
            cu_num, or only the device that they name.
        padded_m: (m, n) to the M of the rows that may serve, in order, each with the word for it;
            see `tunedgemm.ops.padded_m`.
        first_rows: (shape, operands, m) to the operands of the shape's first *m* rows, for tests of
            batch invariance.
        examples, large: functions without arguments that return the shapes of the conformance
            suite, and further ones for a GPU; empty for an op whose shapes follow from M, N and K
            alone. They are called at the first use: serving does not need them.
        factors: a Shape to the operands that enter the result as products; by default one, of the
            activations and the weights or their scales.
        functions: names of the op's public functions.
        entry: a dispatcher (`tunedgemm.ops.hot.Serving`) to those functions by name; an op without
            one is called by ``tunedgemm.call``.
    """

    name: str
    operands: tuple[str, ...]
    weights: tuple[int, ...]
    columns: Columns
    shape_of: Callable[..., Shape]
    make_inputs: Callable[[Shape, torch.device, int], tuple[Any, ...]]
    reference: Callable[[Shape, tuple[Any, ...]], torch.Tensor]
    tolerance: Callable[[Shape], Tolerance]
    flops: Callable[[Shape], int]
    bytes_moved: Callable[[Shape], int]
    fake: Callable[..., torch.Tensor]
    fields: Callable[[Shape], Mapping[str, Any]] = lambda _: {}
    strided: tuple[int, ...] = ()
    problem: Callable[[Shape], str] = lambda _: ""
    canonical: Callable[[Shape], Shape] = lambda shape: shape
    equivalent_shapes: Callable[[Shape], tuple[Shape, ...]] = lambda shape: (shape,)
    unbiased: Callable[[Shape], Shape | None] = lambda _: None
    weight_dtype: Callable[[Shape], str] = lambda shape: str(dict(shape.extra).get("q_dtype_w", shape.dtype))
    serves_alike: bool = True
    padded_m: Callable[[int, int], Mapping[int, str]] = padded
    first_rows: Callable[[Shape, tuple[Any, ...], int], tuple[Any, ...]] = attrs.field()
    _examples: Callable[[], tuple[Shape, ...]] = tuple
    _large: Callable[[], tuple[Shape, ...]] = tuple
    factors: Callable[[Shape], tuple[Factors, ...]] = attrs.field()
    functions: tuple[str, ...] = ()
    entry: Callable[[Any], Mapping[str, Function]] | None = None

    def __attrs_post_init__(self) -> None:
        parse = self.columns.parse
        parse = parse.__wrapped__ if isinstance(parse, _ParseAsked) else parse  # of the op that this one was evolved from
        object.__setattr__(self, "columns", attrs.evolve(self.columns, parse=_ParseAsked(parse, self.as_asked)))

    def as_asked(self, shape: Shape) -> Shape:
        """Return the form of a shape in which calls ask for it.

        Raises:
            ShapeError: no call does; the message names the field and what would fit.
        """
        if fault := size_problem(shape, self.bytes_moved) or self.problem(shape):
            raise ShapeError(f"{self.name}: no call asks for this shape: {fault}")
        return self.canonical(shape)

    @functools.cached_property
    def examples(self) -> tuple[Shape, ...]:
        """Return the shapes of the conformance suite."""
        return self._examples()

    @functools.cached_property
    def large(self) -> tuple[Shape, ...]:
        """Return further shapes, for a GPU."""
        return self._large()

    @functools.cached_property
    def matrices(self) -> tuple[int, ...]:
        """Return the positions of the weights proper, without their scales and biases."""
        return tuple(index for index in self.weights if not any(word in self.operands[index] for word in ("scale", "bias")))

    @functools.cached_property
    def key_of(self) -> Callable[..., Any]:
        """Return the function of the cache keys of launchers; see `tunedgemm.ops.key.key_function`."""
        return key_function(self.operands, self.matrices)

    @functools.cached_property
    def sizes_of(self) -> Callable[..., Any]:
        """Return the function of the keys of choices, which hold wherever the operands are in memory."""
        return key_function(self.operands, self.matrices, reads_memory=False)

    @functools.cached_property
    def field_names(self) -> frozenset[str]:
        """Return the names of the arguments of `shape_of` other than operands and otype."""
        parameters = inspect.signature(self.shape_of).parameters
        operands = {name.removesuffix("?") for name in self.operands}
        return frozenset(name for name, each in parameters.items() if each.kind is not each.VAR_POSITIONAL) - operands - {"otype"}

    @factors.default
    def _one_product(self) -> Callable[[Shape], tuple[Factors, ...]]:
        """Return one product, of the activations and the weights, either given by their scales."""
        added = {index for index, name in enumerate(self.operands) if name.startswith("bias")}
        activations = tuple(index for index in range(len(self.operands)) if index not in {*self.weights, *added})
        scales = tuple(index for index in self.weights if index not in {*self.matrices, *added})
        factors = (Factors(activations, (*self.matrices, *scales)),)
        return lambda _: factors

    @first_rows.default
    def _by_first_dimension(self) -> Callable[[Shape, tuple[Any, ...], int], tuple[Any, ...]]:
        """Cut all operands but weights whose first dimension is M."""
        weights = self.weights

        def first_rows(shape: Shape, operands: tuple[Any, ...], m: int) -> tuple[Any, ...]:
            def cut(index: int, operand: Any) -> Any:
                by_row = operand is not None and index not in weights and operand.dim() >= 2 and operand.shape[0] == shape.m
                return operand[:m].contiguous() if by_row else operand

            return tuple(cut(index, operand) for index, operand in enumerate(operands))

        return first_rows
