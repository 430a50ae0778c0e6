# SPDX-License-Identifier: Apache-2.0
"""The masks that `flashplan.transformers` gives to models, which describe what each query sees."""

from __future__ import annotations

import importlib
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashplan._core import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

masking: Any = importlib.import_module("transformers.masking_utils")


class Mask(Tensor):
    """A description of a mask, which no model can use as if it were the mask.

    Transformers passes a tensor of four dims from its mask function to the layers unchanged. But
    some models compute with it themselves; if it held the numbers of a description, their results
    would be wrong. So every function is refused except those that read its shape and the like, that
    move it, and that slice it without leaving out a query or a key.

    Its shape is that of the mask, [batch_size, 1, q_length, num_keys].

    Attributes:
        described: the numbers that mask() found. If each sequence has one range of keys, int32
            [batch_size, 5] on the host. Otherwise a bit for each query and key, packed as by
            `pack_mask`: uint32 [batch_size, q_length, words].
    """

    described: Tensor

    @staticmethod
    def of(described: Tensor, q_length: int, num_keys: int) -> Mask:
        shape = (described.shape[0], 1, q_length, num_keys)
        empty = torch.empty((), dtype=torch.bool).expand(shape)  # has one element of memory
        mask = Tensor._make_subclass(Mask, empty)
        mask.described = described
        return mask

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        mask = args[0] if args else None
        if isinstance(mask, Mask):
            if name in _MOVES or (name == "__getitem__" and _keeps_all(mask, args[1])):
                return mask
            if name.startswith(_LOOKS):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
        raise UnsupportedError(
            f"attention_mask: expected a model that leaves it to its attention, got {name}() of it "
            "(this model computes with the mask itself; take another attn_implementation)"
        )


# Functions that move or copy a mask. They return the mask itself: attention() moves the description
# to its device.
_MOVES = ("to", "cpu", "cuda", "contiguous", "detach", "clone", "__deepcopy__")
# Prefixes of the names of functions that read no values of a tensor. torch.compile calls the
# private ones for every tensor.
_LOOKS = (
    "__get__",
    "__len__",
    "__hash__",
    "__repr__",
    "_is_",
    "is_",
    "dim",
    "size",
    "stride",
    "numel",
    "storage_offset",
    "untyped_storage",
)


def _keeps_all(mask: Mask, index: Any) -> bool:
    """Whether `mask[index]` is the mask of the same queries and keys."""
    if not isinstance(index, tuple) or len(index) > 4:
        return False
    sizes = mask.shape
    if index[:1] == (Ellipsis,):
        index = index[1:]
        sizes = sizes[4 - len(index) :]
    return all(
        isinstance(part, slice) and part.indices(size) == (0, size, 1)
        for part, size in zip(index, sizes)
    )


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_others: Any,
) -> Mask:
    """The function that transformers calls for the mask of a step. If there is padding, it reads
    attention_mask, so the host waits for the GPU.

    Returns:
        If each sequence has one range of keys, five numbers for each, namely its first key, the one
        after its last key, the position of query 0, whether the mask is causal, and window_left.
        Otherwise words on `device`: a bit for each query and key, as in `pack_mask`.
    """
    window_left = _window_left(mask_function, local_size)
    is_causal = window_left is not None
    if is_causal or mask_function is masking.bidirectional_mask_function:
        bounds = _key_ranges(attention_mask, batch_size, kv_offset, kv_length)
        if bounds is not None:
            q_begin = int(q_offset) - kv_offset
            rest = (q_begin, int(is_causal), -1 if window_left is None else window_left)
            rows = [(first, end, *rest) for first, end in bounds]
            return Mask.of(torch.tensor(rows, dtype=torch.int32), q_length, kv_length)
    visible = masking.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    return Mask.of(packed(visible), q_length, kv_length)


def _window_left(mask_function: Callable[..., Any], local_size: int | None) -> int | None:
    """The window_left of a causal mask, -1 without a sliding window. None for any other mask."""
    if mask_function is masking.causal_mask_function:
        return -1
    if local_size is None:
        return None
    window = masking.sliding_window_causal_mask_function(local_size)
    return local_size - 1 if _is_same(mask_function, window) else None


def _is_same(a: Any, b: Any) -> bool:
    """Whether two values are the same, or functions made by the same code from the same values."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        captured = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (a, b)]
        return a.__code__ is b.__code__ and _is_same(*captured)
    return isinstance(a, int) and isinstance(b, int) and a == b


def _key_ranges(
    attention_mask: Tensor | None, batch_size: int, kv_offset: int, kv_length: int
) -> list[list[int]] | None:
    """[first, end) of the keys of each sequence, counted from kv_offset; None if there are gaps."""
    if attention_mask is None:
        return [[0, kv_length]] * batch_size
    keys = attention_mask[:, kv_offset : kv_offset + kv_length].bool()  # keys behind it are hidden
    if keys.shape[1] == 0:
        return [[0, 0]] * batch_size
    count = keys.sum(1)
    first = keys.int().argmax(1)
    last = keys.shape[1] - 1 - keys.flip(1).int().argmax(1)
    rows: list[list[int]] = torch.stack((first, count, last), 1).tolist()
    if any(count not in (0, last - first + 1) for first, count, last in rows):
        return None
    return [[first, first + count] for first, count, _ in rows]


def packed(visible: Tensor) -> Tensor:
    """Packs bools [batch, 1, queries, keys] to bits [batch, queries, ceil(keys / 32)] uint32."""
    padded = torch.nn.functional.pad(visible[:, 0], (0, -visible.shape[-1] % 32))
    shifts = torch.arange(8, dtype=torch.uint8, device=visible.device)
    bits = padded.reshape(*padded.shape[:-1], padded.shape[-1] // 8, 8).to(torch.uint8) << shifts
    return bits.sum(-1, dtype=torch.uint8).view(torch.uint32)
