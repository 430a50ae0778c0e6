# SPDX-License-Identifier: Apache-2.0
"""The same Case on the GPU through other libraries, where they are installed.

A peer is a function (case, inputs) -> (call, rows): rows(call()) is o as flashplan returns it.
"""

import functools

import torch

WORKSPACE_BYTES = 512 << 20


def _dense(case, inputs):
    """q, k, v as [batch, heads, length, dim]; for equal lengths."""

    def split(x):
        return x.unflatten(0, (len(case.qo_lens), -1)).transpose(1, 2)

    return split(inputs.q), split(inputs.k), split(inputs.v)


def _heads_last(o):
    return o.transpose(1, 2).flatten(0, 1)


def _as_it_is(o):
    return o


def _sdpa(backend, case, inputs):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.contiguous() for x in _dense(case, inputs))
    gqa = {"enable_gqa": True} if case.num_qo_heads != case.num_kv_heads else {}

    def call():
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, **gqa
            )

    return call, _heads_last


def _flex(case, inputs):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (x.contiguous() for x in _dense(case, inputs))
    length = case.qo_lens[0]
    mask = None
    if case.causal:
        mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, q.device)
    attention = torch.compile(flex_attention)
    gqa = case.num_qo_heads != case.num_kv_heads
    call = functools.partial(attention, q, k, v, block_mask=mask, enable_gqa=gqa)
    return call, _heads_last


def _pages(case, inputs):
    """flashinfer's page table: (indptr, indices, last_page_len)."""
    pages_of = [-(-n // case.page_size) for n in case.kv_lens]
    indptr = torch.tensor([0, *pages_of]).cumsum(0).int().to(inputs.q.device)
    indices = torch.cat(
        [row[:n] for row, n in zip(inputs.block_table, pages_of, strict=True)]
    ).contiguous()
    last = torch.tensor([(n - 1) % case.page_size + 1 for n in case.kv_lens], dtype=torch.int32)
    return indptr, indices, last.to(inputs.q.device)


def _flashinfer_prefill(backend, case, inputs):
    import flashinfer

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.q.device)
    qo_indptr = inputs.qo_indptr.to(inputs.q.device)
    heads = case.num_qo_heads, case.num_kv_heads, case.head_dims[0]
    options = {
        "causal": case.causal,
        "window_left": case.window_left,
        "q_data_type": inputs.q.dtype,
        "kv_data_type": inputs.k.dtype,
    }
    if case.page_size is None:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
        wrapper.plan(qo_indptr, qo_indptr, *heads, **options)
        return functools.partial(wrapper.run, inputs.q, inputs.k, inputs.v), _as_it_is
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    wrapper.plan(qo_indptr, *_pages(case, inputs), *heads, case.page_size, **options)
    return functools.partial(wrapper.run, inputs.q, (inputs.k, inputs.v)), _as_it_is


def _flashinfer_decode(tensor_cores, case, inputs):
    import flashinfer

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=tensor_cores
    )
    wrapper.plan(
        *_pages(case, inputs),
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dims[0],
        case.page_size,
        window_left=case.window_left,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k.dtype,
    )
    return functools.partial(wrapper.run, inputs.q, (inputs.k, inputs.v)), _as_it_is


def _installed(module):
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def peers_of(case, flex=False):
    peers = {}
    is_decode = max(case.qo_lens) == 1
    if case.page_size is None and len(set(case.qo_lens)) == 1:
        peers["cuDNN"] = functools.partial(_sdpa, "CUDNN_ATTENTION")
        peers["torch flash"] = functools.partial(_sdpa, "FLASH_ATTENTION")
        if flex:
            peers["FlexAttention"] = _flex
    if _installed("flashinfer"):
        if is_decode:
            peers["flashinfer cc"] = functools.partial(_flashinfer_decode, False)
            peers["flashinfer tc"] = functools.partial(_flashinfer_decode, True)
        else:
            peers["flashinfer fa2"] = functools.partial(_flashinfer_prefill, "fa2")
            peers["flashinfer fa3"] = functools.partial(_flashinfer_prefill, "fa3")
    return peers
