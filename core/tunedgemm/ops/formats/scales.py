"""Orders of scales: e8m0 scales that AITER's kernels read, tiles for NVIDIA's, transposed ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from tunedgemm.errors import OperandError
from tunedgemm.ops.layout import note_order
from tunedgemm.ops.scale_order import E8M0_TILE, SHUFFLED, SWIZZLED, TILE_COLUMNS, TILE_ROWS, swizzled_sizes

E8M0 = torch.float8_e8m0fnu
#: The e8m0 byte of scale 1.
ONE = 127
_aten = torch.ops.aten
#: Operations that keep the bytes and their order.
_KEPT = (
    _aten.detach.default, _aten.clone.default, _aten.alias.default, _aten._to_copy.default, _aten.empty_like.default,
    _aten.lift_fresh.default, _aten._pin_memory.default, _aten.view.default, _aten.view.dtype, _aten._unsafe_view.default,
    _aten._reshape_alias.default, _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim,
)  # fmt: skip
#: Operations that select parts, which keep the order if they are whole tiles of 32 rows.
_PARTS = (_aten.slice.Tensor, _aten.select.int, _aten.split.Tensor, _aten.unbind.int, _aten.index.Tensor, _aten.index_select.default)
_TILE_ROWS = 32


class ShuffledScale(torch.Tensor):
    """e8m0 scales in the order of AITER's kernels, distinguished by their type.

    They can be moved between devices, viewed, cloned, saved, loaded and made a parameter. Parts
    must be whole tiles of 32 rows. Other operations work on the bytes in memory order and return a
    plain tensor.

    Attributes:
        scale_order: the value in `Shape.extra`.
        plain: the same memory as a plain tensor.
        kept_plain: cached *plain*. A cache hit reads it, since the address of a tensor subclass
            takes three times as long. Only code that bypasses the setter of `data` makes it stale.
    """

    scale_order = SHUFFLED
    kept_plain: torch.Tensor

    # Keeps attributes such as shape as fast as those of a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def plain(self) -> torch.Tensor:
        """Return the current memory as a plain tensor."""
        if self.kept_plain.data_ptr() != self.data_ptr():  # Module.to replaced the memory
            with torch._C._DisableTorchDispatch():
                self.kept_plain = torch.Tensor._make_subclass(torch.Tensor, self)
        return self.kept_plain

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Return a detached view; the setter accepts shuffled scales only."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take the memory of other shuffled scales.

        Raises:
            OperandError: value is row-major.
        """
        if not isinstance(value, ShuffledScale):
            raise OperandError("row-major scales cannot go where shuffled ones are; shuffle_scale(s), or as_shuffled_scale(s)")
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.kept_plain = value.plain

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation on the bytes; the result keeps the type where it keeps the order.

        Raises:
            OperandError: the operation cuts a tile, copies row-major scales into shuffled ones, or
                sets memory or sizes.
        """
        if torch.Tag.inplace_view in func.tags or func.overloadpacket is _aten.resize_:
            name = func.overloadpacket.__name__
            raise OperandError(f"shuffled scales keep their memory and sizes (got {name}); assign scale.data = others instead")
        if func is _aten.copy_.default and not (isinstance(args[0], cls) and isinstance(args[1], cls)):
            raise OperandError("shuffled scales are copied to shuffled ones only; shuffle_scale(s) or s.plain first")
        plain_args, plain_kwargs = torch.utils._pytree.tree_map_only(cls, lambda scale: scale.plain, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func in _PARTS:
            return _parts(args[0], result)
        return _typed(result) if func in _KEPT and result.dtype in (E8M0, torch.uint8) else result

    def __deepcopy__(self, memo: dict[int, Any]) -> ShuffledScale:
        """Clone the scales; a parameter stays one."""
        if id(self) not in memo:
            memo[id(self)] = _rebuilt(self.plain.clone(), isinstance(self, torch.nn.Parameter))
        copied: ShuffledScale = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the plain tensor and whether it is a parameter, also for `torch.save`."""
        del protocol
        return _rebuilt, (self.plain, isinstance(self, torch.nn.Parameter))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShuffledScale({tuple(self.shape)}, {self.dtype}, {self.device})"


def _typed(plain: torch.Tensor) -> ShuffledScale:
    typed: ShuffledScale = torch.Tensor._make_subclass(ShuffledScale, plain)
    typed.kept_plain = torch.Tensor._make_subclass(torch.Tensor, plain)  # compilers see the memory through it alone
    note_order(plain, SHUFFLED)
    return typed


def _parts(whole: ShuffledScale, result: Any) -> Any:
    """Retype parts of shuffled scales, except single bytes; raise OperandError if they cut a tile."""
    if isinstance(result, torch.Tensor) and not result.dim():
        return result
    parts = result if isinstance(result, (tuple, list)) else (result,)
    columns = whole.shape[-1]
    for part in parts:
        places = part.storage_offset() - whole.storage_offset(), part.numel()
        if part.shape[-1:] != (columns,) or not part.is_contiguous() or any(place % (_TILE_ROWS * columns) for place in places):
            raise OperandError(
                f"shuffled scales {tuple(whole.shape)} are cut between tiles of {_TILE_ROWS} rows alone (got {tuple(part.shape)}); "
                "unshuffle_scale(s, rows, K/32) first, or take the bytes from s.plain"
            )
    typed = [_typed(part) for part in parts]
    return typed if isinstance(result, (tuple, list)) else typed[0]


def _rebuilt(plain: torch.Tensor, parameter: bool) -> ShuffledScale:
    scale: Any = _typed(plain)
    if parameter:
        scale = torch.nn.Parameter(scale, requires_grad=False)
    rebuilt: ShuffledScale = scale
    return rebuilt


torch.serialization.add_safe_globals([_rebuilt])


def as_shuffled_scale(scale: torch.Tensor) -> torch.Tensor:
    """Declare that e8m0 scales, such as a checkpoint's, are shuffled; copies nothing.

    Under torch.compile the tensor is returned unchanged, since graphs lack the type.

    Raises:
        OperandError: the scales are not e8m0, or not contiguous.
    """
    if isinstance(scale, ShuffledScale) or torch.compiler.is_compiling():
        return scale
    as_bytes(scale, E8M0, "e8m0 scales")
    if not scale.is_contiguous():
        raise OperandError(f"shuffled scales are contiguous (got {tuple(scale.shape)} with strides {scale.stride()})")
    return _typed(scale)


def plain_bytes(scale: torch.Tensor) -> torch.Tensor:
    """Return scales as a plain tensor in memory order."""
    return scale.plain if isinstance(scale, ShuffledScale) else scale


def shuffle_scale(scale: torch.Tensor) -> torch.Tensor:
    """Shuffle e8m0 scales into the order of AITER's kernels.

    Same as AITER's e8m0_shuffle (aiter/ops/shuffle.py). Rows are padded to a multiple of 256 and
    columns to one of 8, with scale 1. In each tile of 32x8, element ``(a * 16 + r, b * 4 + c)``
    moves to offset ``((c * 16 + r) * 2 + b) * 2 + a``.

    Args:
        scale: [..., K/32], torch.float8_e8m0fnu or torch.uint8; the leading dimensions are rows.

    Returns:
        `ShuffledScale` [ceil256(rows), ceil8(K/32)] of the same dtype.

    Raises:
        OperandError: scale has another dtype or number of dimensions, or is shuffled already.
    """
    if isinstance(scale, ShuffledScale):
        raise OperandError("the scales are shuffled already; pass them as they are")
    plain = as_bytes(scale, E8M0, "e8m0 scales")
    if plain.dim() < 2:
        raise OperandError(f"scales are shuffled as [..., K/32] (got shape {tuple(plain.shape)})")
    plain = plain.flatten(0, -2)
    rows, cols = plain.shape
    full = pad(plain, (0, -cols % E8M0_TILE[1], 0, -rows % E8M0_TILE[0]), value=ONE)
    tiles = full.view(full.shape[0] // 32, 2, 16, full.shape[1] // 8, 2, 4)
    return as_shuffled_scale(tiles.permute(0, 3, 5, 2, 4, 1).contiguous().view(full.shape).view(scale.dtype))


def unshuffle_scale(scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Invert `shuffle_scale`: return contiguous row-major scales [rows, cols].

    Args:
        scale: [ceil256(rows), ceil8(cols)] or more, from `shuffle_scale` or as plain bytes.
        rows, cols: sizes of the result.

    Raises:
        OperandError: scale is not a shuffled scale of that many rows and columns.
    """
    plain = as_bytes(plain_bytes(scale), E8M0, "e8m0 scales")
    high, wide = E8M0_TILE
    if plain.dim() != 2 or plain.shape[0] % 32 or plain.shape[1] % wide or rows > plain.shape[0] or cols > plain.shape[1]:
        raise OperandError(
            f"a shuffled scale of [{rows}, {cols}] is [{-(-rows // high) * high}, {-(-cols // wide) * wide}] (got {tuple(scale.shape)})"
        )
    tiles = plain.reshape(plain.shape[0] // 32, plain.shape[1] // 8, 4, 16, 2, 2)
    return tiles.permute(0, 5, 3, 1, 4, 2).reshape(plain.shape)[:rows, :cols].contiguous().view(scale.dtype)


def swizzle_scale(scale: torch.Tensor, scale_order: str = SWIZZLED) -> torch.Tensor:
    """Copy mxfp8 or nvfp4 scales to the tiles that NVIDIA's kernels read, padded with zeros.

    With C padded columns, scale (r, c) of ``128x4`` moves to offset ``((r // 128) * (C // 4) +
    c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4``, of ``8x4`` to
    ``((r // 8) * (C // 4) + c // 4) * 32 + (r % 8) * 4 + c % 4``. Scales in tiles
    look like row-major ones, so a second call moves them again, to wrong places.

    Args:
        scale: [..., groups] of e8m0, e4m3fn or bytes; the leading dimensions are rows.
        scale_order: ``128x4`` (cuBLASLt, torch's SWIZZLE_32_4_4) or ``8x4``.

    Returns:
        [rows rounded up to 128 or 8, groups rounded up to 4] of the same dtype.

    Raises:
        OperandError: another dtype, number of dimensions or order.
    """
    plain = _tileable(scale, scale_order)
    if plain.dim() < 2:
        raise OperandError(f"swizzle_scale: scale must be [..., groups] (got {tuple(scale.shape)})")
    plain = plain.flatten(0, -2)
    sizes, high = swizzled_sizes(scale_order, *plain.shape), TILE_ROWS[scale_order]
    full = pad(plain, (0, sizes[1] - plain.shape[1], 0, sizes[0] - plain.shape[0]))
    low = min(high, 32)
    tiles = full.view(sizes[0] // high, high // low, low, sizes[1] // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(full.shape).view(scale.dtype)


def unswizzle_scale(scale: torch.Tensor, rows: int, groups: int, scale_order: str = SWIZZLED) -> torch.Tensor:
    """Invert `swizzle_scale`: return contiguous row-major scales [rows, groups].

    Raises:
        OperandError: another dtype or order, or not the padded number of scales.
    """
    plain, sizes = _tileable(scale, scale_order), swizzled_sizes(scale_order, rows, groups)
    if plain.numel() != sizes[0] * sizes[1]:
        raise OperandError(f"unswizzle_scale: {scale_order} scales of [{rows}, {groups}] must be {list(sizes)} (got {tuple(scale.shape)})")
    high = TILE_ROWS[scale_order]
    low = min(high, 32)
    tiles = plain.reshape(sizes[0] // high, sizes[1] // TILE_COLUMNS, low, high // low, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(sizes)[:rows, :groups].contiguous().view(scale.dtype)


def _tileable(scale: torch.Tensor, scale_order: str) -> torch.Tensor:
    """View one-byte scales as bytes; raise OperandError for another dtype or order."""
    if scale_order not in TILE_ROWS:
        raise OperandError(f"scale_order must be {' or '.join(TILE_ROWS)} (got {scale_order!r}); row-major scales need no swizzle")
    return as_bytes(scale, scale.dtype if scale.dtype is torch.float8_e4m3fn else E8M0, "scales in tiles")


def as_bytes(x: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """View a tensor of *dtype* as bytes; raise OperandError for another dtype or shuffled scales."""
    if isinstance(x, ShuffledScale):
        raise OperandError(f"{what} must be row-major (got shuffled ones {tuple(x.shape)}); unshuffle_scale(s, rows, K/32) first")
    if x.dtype not in (dtype, torch.uint8):
        raise OperandError(f"{what} are {dtype} or torch.uint8 (got {x.dtype})")
    return x.detach().view(torch.uint8)


def transposed_scale(x_scale: torch.Tensor) -> torch.Tensor:
    """Transpose 1x128 scales in memory, as AITER's blockscale_bpreshuffle takes them.

    The shape [..., ceil(K/128)] is kept.

    Raises:
        OperandError: x_scale is a scalar.
    """
    return _in_order(_row_by_row(x_scale).t()).view(x_scale.shape)


def untransposed_scale(x_scale: torch.Tensor) -> torch.Tensor:
    """Invert `transposed_scale`: row-major scales [..., ceil(K/128)].

    Raises:
        OperandError: x_scale is a scalar, or is not contiguous.
    """
    if not x_scale.is_contiguous():
        raise OperandError(f"a transposed scale is contiguous (got {tuple(x_scale.shape)} with strides {x_scale.stride()})")
    rows = _row_by_row(x_scale)
    return _in_order(rows.view(rows.shape[1], rows.shape[0]).t()).view(x_scale.shape)


def _row_by_row(x_scale: torch.Tensor) -> torch.Tensor:
    if not x_scale.dim():
        raise OperandError("scales have one or more dimensions (got a scalar)")
    return x_scale.detach().reshape(x_scale.shape[:-1].numel(), x_scale.shape[-1])


def _in_order(matrix: torch.Tensor) -> torch.Tensor:
    """Return a row-major matrix; `contiguous` would keep the strides of a single row or column."""
    return matrix.contiguous() if min(matrix.shape) > 1 else matrix.clone(memory_format=torch.contiguous_format)
