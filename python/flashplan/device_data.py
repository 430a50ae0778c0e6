# SPDX-License-Identifier: Apache-2.0
"""Checks of page tables, lengths and slots that lie on a GPU."""

from flashplan.attention import Attention
from flashplan.types import Stream, Tensor
from flashplan.values import to_int


def check_device_data(
    attn: Attention,
    *,
    block_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    page_indices: Tensor | None = None,
    num_pages: int | None = None,
    kv_lens: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    stream: Stream | None = None,
) -> None:
    """Waits for the GPU, and checks values of tensors that `run()` does not check there.

    For debugging: call it before `run()` or `append_paged_kv()` with their tensors. The values are
    copied to the host, and checked as `run()` checks them on the CPU, against the current plan of
    `attn`. A real length that is negative or above the planned one, which `run()` would replace, is
    an error here.

    Args:
        attn: an `Attention` whose plan() was called.
        block_table: the page table, as in `Attention.run`, or
        page_indptr, page_indices: the page table as CSR. The ids of pages that a query of the plan
            sees must be in [0, num_pages). No page table is needed to check kv_lens or slot_mapping
            alone.
        num_pages: pages of the cache. Needed with a page table and with slot_mapping.
        kv_lens: [batch_size] int32: the real lengths, as in `Attention.run`.
        slot_mapping: [tokens] int64, as in `append_paged_kv`: -1, or a slot of the cache.
        stream: as in `Attention`: the call waits for all work on it; default: the current one of
            the framework of the first tensor. None on the CPU.

    Tensors are on the device of `attn` or on the host, of any framework.

    Raises:
        ValueError: a value is out of range, or a tensor has a wrong shape. The message names the
            place, such as block_table[3, 7].
        TypeError: a tensor has a wrong dtype or is on another device.
        RuntimeError: there was no plan() yet, or `stream` is being captured.
        CudaError: work that was on the stream has failed.

    Examples:
        >>> attn = fp.Attention(8, 2, 64, page_size=16, q_dtype="float32", device="cpu")
        >>> plan = attn.plan([0, 1], [40])
        >>> table = np.array([[3, 8, 1]], np.int32)
        >>> fp.check_device_data(attn, block_table=table, num_pages=9)
        >>> fp.check_device_data(attn, block_table=table, num_pages=8)
        Traceback (most recent call last):
        ValueError: block_table[0, 1]: expected a page in [0, 8), got 8
    """
    if not isinstance(attn, Attention):
        raise TypeError(f"attn: expected an Attention, got {type(attn).__name__}")
    paged = (block_table, page_indptr, page_indices, slot_mapping)
    if num_pages is None and any(tensor is not None for tensor in paged):
        raise TypeError("num_pages: expected the number of pages of the cache, got None")
    attn._plan.check_device_data(
        block_table,
        page_indptr,
        page_indices,
        0 if num_pages is None else to_int("num_pages", num_pages, 64),
        kv_lens,
        slot_mapping,
        stream,
    )
