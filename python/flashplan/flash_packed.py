# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's functions for packed tensors, and install() for programs that import it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flashplan.flash_arguments import check_dims

if TYPE_CHECKING:
    from types import ModuleType

# The modules that programs import: FlashAttention 2, its module of functions, and FlashAttention 3.
_NAMES = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface")


def _functions() -> ModuleType:
    """The module flashplan.flash_attn. That module imports this one, so it is imported here, in a
    call, and not at the top."""
    from flashplan import flash_attn

    return flash_attn


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """Calls `flash_attn_func` with qkv [batch_size, tokens, 3, heads, head_dim]: q, k and v.

    Args:
        args, options: the other arguments of `flash_attn_func`, in its order.
    """
    check_dims("qkv", qkv, 5)
    return _functions().flash_attn_func(*qkv.unbind(2), *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """Calls `flash_attn_func` with q and kv [batch_size, tokens, 2, heads, head_dim]: k and v.

    Args:
        args, options: the other arguments of `flash_attn_func`, in its order.
    """
    check_dims("kv", kv, 5)
    return _functions().flash_attn_func(q, *kv.unbind(2), *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Any, *args: Any, **options: Any
) -> Any:
    """Calls `flash_attn_varlen_func` with qkv [tokens, 3, heads, head_dim]: q, k and v.

    Args:
        cu_seqlens, max_seqlen: those of the queries and of the keys.
        args, options: the other arguments of `flash_attn_varlen_func`, in its order from dropout_p.
    """
    check_dims("qkv", qkv, 4)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _functions().flash_attn_varlen_func(*qkv.unbind(1), *lengths, *args, **options)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """Calls `flash_attn_varlen_func` with q and kv [kv_tokens, 2, heads, head_dim]: k and v.

    Args:
        args, options: the other arguments of `flash_attn_varlen_func`, in its order.
    """
    check_dims("kv", kv, 4)
    return _functions().flash_attn_varlen_func(q, *kv.unbind(1), *args, **options)


def install() -> None:
    """Lets imports of `flash_attn`, `flash_attn.flash_attn_interface` and `flash_attn_interface`
    give `flashplan.flash_attn`.

    Call it before anything imports one of them. Programs that ask for an installed distribution, as
    transformers does, do not find one.

    Raises:
        RuntimeError: the program has imported FlashAttention already. Nothing was changed.

    Examples:
        >>> import flashplan.flash_attn
        >>> flashplan.flash_attn.install()
        >>> from flash_attn import flash_attn_func
        >>> flash_attn_func.__module__
        'flashplan.flash_attn'
    """
    functions = _functions()
    for name in _NAMES:
        other = sys.modules.get(name, functions)
        if other is not functions:
            place = getattr(other, "__file__", None)
            raise RuntimeError(
                f"install: expected a process that has not imported {name}, got the one of {place}"
            )
    sys.modules.update(dict.fromkeys(_NAMES, functions))
