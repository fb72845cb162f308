"""Op: the definition of one tensor signature. Each other module defines one op or a family."""

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


#: A launcher's function, or a wrapper of one.
Function = Callable[..., "torch.Tensor"]

#: Arguments of `Serving.call`: operands in the op's order, output dtype or None, the op's fields.
Arguments = tuple[tuple["torch.Tensor | None", ...], "torch.dtype | None", dict[str, Any]]

#: Maps the arguments of a hot function to those of `Serving.call`; Dynamo can trace it.
ArgumentOrder = Callable[..., Arguments]


@attrs.frozen
class Tolerance:
    """Error bounds of an output against the reference.

    Attributes:
        atol, rtol: element bounds, ``|out - ref| <= atol + rtol * |ref|``; the fraction of
            elements that exceed them is AITER's error ratio.
        row_error: bound of ``norm(out - ref) / norm(ref)`` for each row of the output.
    """

    atol: float
    rtol: float
    row_error: float


def as_they_are(cells: Mapping[str, str]) -> Mapping[str, str]:
    """Return the cells unchanged: the default of `Columns.read` and `Columns.write`."""
    return cells


@attrs.frozen(eq=False)
class Columns:
    """The CSV format of an op's tables: AITER's columns in AITER's order.

    Attributes:
        tuned_file, untuned_file: AITER's default file names.
        variable: the environment variable that overrides the tuned files.
        key: columns of the untuned file; the tuned file has gfx and cu_num before them.
        values: columns of the tuned file after its key.
        parse: maps the cells of `key` and `own` in a row, absent ones left out, to a Shape;
            raises UserError for an invalid cell. An op's `parse` returns the canonical shape
            (`Op.as_asked`). Cell ``gfx`` is the row's architecture, by default the current one,
            which decides the meaning of ``fp8``.
        format: maps a Shape to the cells of `key` and `own`; "" for a default in `own`.
        own: our columns after AITER's, for fields that AITER's key lacks.
        read: maps the cells of `values` to the common ones: ``libtype``, ``kernelName``,
            ``splitK``, ``us`` and ``err_ratio``. Needed if AITER's columns differ. Cells that it
            does not return keep their names.
        write: the inverse of *read*.
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
    """Operands multiplied with each other: scaling one by s and the other by 1/s cancels out.

    Attributes:
        activations, weights: operand positions in order of preference; the first with a float or
            e8m0 dtype is used.
        is_linear: whether scaling a row of activations scales that row of the output.
        k: field of the shape with the number of elements that they sum over.
    """

    activations: tuple[int, ...]
    weights: tuple[int, ...]
    is_linear: bool = True
    k: str = "k"


def unbiased(shape: Shape) -> Shape:
    """Return a shape without its bias: `Op.unbiased` of ops that add a bias last."""
    return attrs.evolve(shape, epilogue="none", bias_dtype="")


@attrs.frozen(eq=False)
class _ParseAsked:
    """`Columns.parse` of an op: returns the canonical shape of a row.

    Attributes:
        __wrapped__: the function given for `Columns.parse`.
        as_asked: `Op.as_asked`.
    """

    __wrapped__: Callable[[Mapping[str, str]], Shape]
    as_asked: Callable[[Shape], Shape]

    def __call__(self, cells: Mapping[str, str]) -> Shape:
        """Return the canonical shape of a row; raise UserError for an impossible one."""
        return self.as_asked(self.__wrapped__(cells))


@attrs.frozen
class Op:
    """One op family.

    Attributes:
        name: the name in ``--op``, `Shape.op` and a backend's ``ops``.
        operands: names of the operands in a launcher's order; optional ones end in ``?`` and come
            last.
        weights: positions of the operands that are model parameters, and thus cold in cache.
        columns: the CSV format of its tables.
        shape_of: (*operands, otype=dtype or None, **fields) -> Shape; raises OperandError for
            mismatched operands. `Call` has checked their number and types.
        make_inputs: (shape, torch device, seed) -> random operands, without trailing absent ones.
        reference: (shape, operands) -> the exact result in float32 or float64.
        tolerance: shape -> Tolerance.
        flops: shape -> floating-point operations of one call.
        bytes_moved: shape -> least memory traffic of one call, in bytes.
        fake: (*operands, otype) -> an empty output, for meta tensors.
        fields: shape -> the keyword arguments of `shape_of`, except ``otype``, that the operands
            do not determine.
        shuffled_scales: positions of the scales whose bytes may be in AITER's order
            (`tunedgemm.ops.scale_order`) or an engine's, which cache keys then show.
        strided: positions of the operands whose strides are part of the shape. Launchers get them
            aligned, but not contiguous.
        problem: shape -> why it is impossible: the field and the valid values; "" if it is valid.
            See `tunedgemm.ops.domain`. Sizes beyond any memory are rejected for every op.
        canonical: shape -> the form that `shape_of` returns, where several forms mean one call.
        equivalent_shapes: shape -> the shapes whose rows may serve it, best first: itself, then its
            form in AITER's key.
        unbiased: shape with a bias -> the same without. None if the bias is not the last operand
            or not added last, so that it cannot be split off.
        weight_dtype: shape -> short dtype of the weight in memory; by default field ``q_dtype_w``,
            else the dtype of the activations.
        serves_alike: whether rows of shipped tables serve all devices with their gfx and cu_num,
            or only devices like the one that they name (`tunedgemm.products.are_alike`).
        padded_m: (m, n) -> the M of rows that may serve, in order, each with its name; see
            `tunedgemm.ops.padded_m`.
        some_rows: (shape, operands, indices) -> the operands of these rows, of which some may be
            repeated, to test batch invariance.
        examples, large: functions that return the shapes of the conformance suite, and further
            ones for GPUs; empty for an op whose shapes have only M, N and K. Called at first use.
        factors: shape -> the pairs of multiplied operands; by default one pair, of the activations
            and the weights or their scales.
        functions: names of the op's public functions.
        entry: dispatcher (`tunedgemm.ops.hot.Serving`) -> those functions by name; an op without
            *entry* is called by ``tunedgemm.call``.
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
    shuffled_scales: tuple[int, ...] = ()
    strided: tuple[int, ...] = ()
    problem: Callable[[Shape], str] = lambda _: ""
    canonical: Callable[[Shape], Shape] = lambda shape: shape
    equivalent_shapes: Callable[[Shape], tuple[Shape, ...]] = lambda shape: (shape,)
    unbiased: Callable[[Shape], Shape | None] = lambda _: None
    weight_dtype: Callable[[Shape], str] = lambda shape: str(dict(shape.extra).get("q_dtype_w", shape.dtype))
    serves_alike: bool = True
    padded_m: Callable[[int, int], Mapping[int, str]] = padded
    some_rows: Callable[[Shape, tuple[Any, ...], torch.Tensor], tuple[Any, ...]] = attrs.field()
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
        """Return the canonical form of a shape, as calls look it up.

        Raises:
            ShapeError: the shape is impossible; the message names the field and valid values.
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
        """Return further shapes of the conformance suite, for GPUs."""
        return self._large()

    @functools.cached_property
    def roles(self) -> tuple[str, ...]:
        """Return the word in each operand's name for what it holds; "" for values that multiply."""
        words = ("scale", "zeros", "index", "bias")
        return tuple(next((word for word in words if word in name), "") for name in self.operands)

    @functools.cached_property
    def matrices(self) -> tuple[int, ...]:
        """Return the positions of the weights, without scales, zero points, indices and biases."""
        return tuple(index for index in self.weights if not self.roles[index])

    @functools.cached_property
    def key_of(self) -> Callable[..., Any]:
        """Return the function that computes cache keys; see `tunedgemm.ops.key.key_function`."""
        return key_function(self.operands, self.matrices, scales=self.shuffled_scales)

    @functools.cached_property
    def sizes_of(self) -> Callable[..., Any]:
        """Return the function that computes keys independent of addresses and strides."""
        return key_function(self.operands, self.matrices, reads_memory=False)

    @functools.cached_property
    def field_names(self) -> frozenset[str]:
        """Return the names of the arguments of `shape_of` other than operands and otype."""
        parameters = inspect.signature(self.shape_of).parameters
        operands = {name.removesuffix("?") for name in self.operands}
        return frozenset(name for name, each in parameters.items() if each.kind is not each.VAR_POSITIONAL) - operands - {"otype"}

    @factors.default
    def _one_product(self) -> Callable[[Shape], tuple[Factors, ...]]:
        """Return one pair: the activations and the weights, each represented by its scales if any."""
        added = {index for index, name in enumerate(self.operands) if name.startswith("bias")}
        activations = tuple(index for index in range(len(self.operands)) if index not in {*self.weights, *added})
        scales = tuple(index for index in self.weights if index not in {*self.matrices, *added})
        factors = (Factors(activations, (*self.matrices, *scales)),)
        return lambda _: factors

    @some_rows.default
    def _by_first_dimension(self) -> Callable[[Shape, tuple[Any, ...], torch.Tensor], tuple[Any, ...]]:
        """Take the rows of all operands, except weights, whose first dimension is M."""
        weights = self.weights

        def some_rows(shape: Shape, operands: tuple[Any, ...], indices: torch.Tensor) -> tuple[Any, ...]:
            def take(index: int, operand: Any) -> Any:
                by_row = operand is not None and index not in weights and operand.dim() >= 2 and operand.shape[0] == shape.m
                return taken(operand, indices) if by_row else operand

            return tuple(take(index, operand) for index, operand in enumerate(operands))

        return some_rows

    def first_rows(self, shape: Shape, operands: tuple[Any, ...], m: int) -> tuple[Any, ...]:
        """Return the operands of the first *m* rows."""
        import torch

        return self.some_rows(shape, operands, torch.arange(m, device=operands[0].device))


def taken(operand: torch.Tensor, indices: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Copy some rows of a tensor, also in dtypes that torch cannot index."""
    import torch

    if operand.element_size() > 1:
        return operand.index_select(dim, indices)
    return operand.view(torch.uint8).index_select(dim, indices).view(operand.dtype)
