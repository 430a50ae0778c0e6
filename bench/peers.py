# SPDX-License-Identifier: Apache-2.0
"""The same Case through torch, and what the machine can do at best."""

import functools

import numpy as np

from flashplan.bench import cpu
from frameworks import Torch

try:
    import torch
except ImportError:
    torch = None


def matmul_ceiling(dtype, size=2048):
    """GFLOP/s of a square matrix product by torch, or by NumPy where there is no torch."""
    if torch is not None:
        a = torch.randn(size, size, dtype=getattr(torch, dtype))
        return 2 * size**3 / cpu.best_of(lambda: a @ a, 5) / 1e9
    return cpu.matmul_ceiling(size) if dtype == "float32" else None


def ceilings(num_threads, cache_bytes):
    return {
        "read_gb_s": cpu.read_ceiling(num_threads, 4 * cache_bytes),
        "matmul_float32_gflop_s": matmul_ceiling("float32"),
        "matmul_bfloat16_gflop_s": matmul_ceiling("bfloat16"),
    }


def _request_calls(case, inputs):
    """(rows of q, keyword arguments) of each request; K and V dense and head-major, as torch likes
    them best: gathering pages is not part of what is measured."""
    to_torch = Torch(torch).tensor
    for r, (k, v) in enumerate(inputs.requests(case.kv_layout)):
        begin, end = (int(i) for i in inputs.qo_indptr[r : r + 2])
        k, v = (to_torch(np.ascontiguousarray(x.swapaxes(0, 1)))[None] for x in (k, v))
        q = to_torch(np.ascontiguousarray(inputs.q[begin:end].swapaxes(0, 1)))[None]
        qo_len, kv_len = end - begin, k.shape[2]
        mask = {}
        if case.causal and qo_len == kv_len:
            mask = {"is_causal": True}
        elif case.causal and qo_len > 1:
            mask = {"attn_mask": torch.ones(qo_len, kv_len, dtype=torch.bool).tril(kv_len - qo_len)}
        yield (begin, end), q, k, v, mask


def sdpa(case, inputs):
    """scaled_dot_product_attention per request, grouped heads by enable_gqa."""
    attention = torch.nn.functional.scaled_dot_product_attention
    gqa = {"enable_gqa": True} if case.num_qo_heads != case.num_kv_heads else {}
    return [
        (rows, functools.partial(attention, q, k, v, **mask, **gqa))
        for rows, q, k, v, mask in _request_calls(case, inputs)
    ]


def sdpa_packed(case, inputs):
    """The same, but the query heads of a kv head are passed as its query rows: what a careful
    user does for single-token requests, for which no mask is needed."""
    attention = torch.nn.functional.scaled_dot_product_attention
    calls = []
    for rows, q, k, v, _ in _request_calls(case, inputs):
        packed = q.view(1, case.num_kv_heads, -1, q.shape[-1])
        calls.append((rows, functools.partial(attention, packed, k, v)))
    return calls


def peers_of(case):
    if torch is None or case.kv_dtype or case.softcap or case.window_left >= 0:
        return {}
    peers = {"torch sdpa": sdpa}
    if case.num_qo_heads != case.num_kv_heads and max(case.qo_lens) == 1:
        peers["torch sdpa, packed by hand"] = sdpa_packed
    return peers


def peer_output(case, calls):
    """[tokens, num_qo_heads, head_dim] of float32, for comparison."""
    parts = []
    for (begin, end), call in calls:
        o = call().float().numpy().reshape(case.num_qo_heads, end - begin, -1)
        parts.append(o.swapaxes(0, 1))
    return np.concatenate(parts)
