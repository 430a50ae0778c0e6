# SPDX-License-Identifier: Apache-2.0
"""Tells whether there is a kernel for options, and how much workspace they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashplan import _core
from flashplan.options import Options, options_from

if TYPE_CHECKING:
    from typing_extensions import Unpack


def is_supported(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int | tuple[int, int],
    **options: Unpack[Options],
) -> tuple[bool, str]:
    """Whether `Attention` has a kernel for the options, and if not, why.

    Takes the options of `Attention` except workspace.

    Returns:
        (True, "") or (False, the reason).

    Raises:
        ValueError, TypeError: an option is out of range or of the wrong type, as for `Attention`,
            except that a head_dim above every limit gives (False, the reason).

    Examples:
        >>> fp.is_supported(32, 8, 128, device="cpu")
        (True, '')
        >>> fp.is_supported(32, 8, 5000, device="cpu")
        (False, 'head_dim_qk: expected <= 4096, got 5000')
    """
    try:
        return _core.is_supported(options_from(num_qo_heads, num_kv_heads, head_dim, options))
    except _core.UnsupportedError as error:
        return False, str(error)


def workspace_bytes(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int | tuple[int, int],
    **options: Unpack[Options],
) -> int:
    """Bytes of workspace that an `Attention` with these options uses.

    Takes the options of `Attention` except workspace.

    Raises:
        ValueError, TypeError: an option is out of range or of the wrong type, as for `Attention`.
        UnsupportedError: there is no kernel for the options, or no compiler for the variant.

    Examples:
        >>> num_bytes = fp.workspace_bytes(32, 8, 128, num_ctas=8, device="cpu")
        >>> num_bytes == fp.Attention(32, 8, 128, num_ctas=8, device="cpu").workspace_bytes
        True
    """
    return _core.workspace_bytes(options_from(num_qo_heads, num_kv_heads, head_dim, options))
