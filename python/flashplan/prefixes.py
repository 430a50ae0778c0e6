# SPDX-License-Identifier: Apache-2.0
"""Prefixes that requests of a batch share."""

import numpy as np
import numpy.typing as npt

from flashplan import _core
from flashplan.types import Lengths, Tensor
from flashplan.values import to_int


def find_shared_prefixes(
    qo_indptr: Lengths,
    kv_lens: Lengths,
    page_size: int,
    *,
    block_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    page_indices: Tensor | None = None,
) -> npt.NDArray[np.int32]:
    """Finds the prefixes that requests share: those whose page tables begin with the same pages.

    Only requests side by side in the batch are compared, so an engine gains by keeping requests of
    one conversation tree next to each other. A prefix ends where a request's new tokens begin. The
    time is linear in the page ids that neighbours share.

    Args:
        qo_indptr, kv_lens: as for `Attention.plan`.
        page_size: tokens per page.
        block_table: [batch_size, max_pages] int32 on the host, or
        page_indptr, page_indices: the page table as CSR, [batch_size + 1] and [num_ids] int32.

    Returns:
        int32 [n, 3] for shared_prefixes of `Attention.plan`, with rows (first_request,
        num_requests, num_tokens). Outer prefixes come before those inside them.

    Raises:
        ValueError, TypeError: a length is out of range, or a table is malformed, too short or not
            on the host.

    Examples:
        >>> table = np.array([[4, 5, 6], [4, 5, 7], [8, 9, 0]], np.int32)
        >>> fp.find_shared_prefixes([0, 1, 2, 3], [40, 45, 30], 16, block_table=table)
        array([[ 0,  2, 32]], dtype=int32)
    """
    groups = _core.find_shared_prefixes(
        qo_indptr, kv_lens, to_int("page_size", page_size), block_table, page_indptr, page_indices
    )
    return np.array(groups, np.int32).reshape(-1, 3)
