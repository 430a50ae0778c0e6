# SPDX-License-Identifier: Apache-2.0
"""Ranges of keys of variants on a GPU, besides the cases of the variant "blocks"."""

import pytest

import flashplan as fp
from gpu_cases import DEVICE

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM = 8, 2, 128
NUM_KEYS = 4000


def attention(variant=None):
    return fp.Attention(
        HEADS,
        KV_HEADS,
        DIM,
        page_size=None,
        causal=False,
        variant=variant,
        max_batch_size=2,
        max_qo_tokens=256,
        device=DEVICE,
    )


@pytest.mark.parametrize("num_queries", [1, 200])
def test_hidden_tiles_are_not_read(torch, num_queries):
    """The variant hides nothing itself: NaN outside of the range shows what is read. A captured
    run takes the ranges of the last plan."""
    keys = [0, 0]
    variant = fp.Variant(
        "seeing_all", mask="return true;", key_range=lambda request, query, kv_len: keys
    )
    ranged, plain = attention(variant), attention()
    q = torch.randn((num_queries, HEADS, DIM), device=DEVICE).bfloat16()
    k, v = torch.randn((2, NUM_KEYS, KV_HEADS, DIM), device=DEVICE).bfloat16()
    hidden_k, hidden_v, out = torch.empty_like(k), torch.empty_like(v), torch.empty_like(q)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ranged.plan([0, num_queries], [NUM_KEYS])
        ranged.run(q, hidden_k, hidden_v, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            ranged.run(q, hidden_k, hidden_v, out=out)
        # Begins are multiples of the steps of all kernels: 64, 80 and 128 keys.
        for begin, end in ((0, 1), (1280, 1500), (640, 4000), (3200, 3201), (1920, 1920)):
            keys[:] = begin, end
            for hidden, x in ((hidden_k, k), (hidden_v, v)):
                hidden.fill_(torch.nan)
                hidden[begin:end] = x[begin:end]
            ranged.plan([0, num_queries], [NUM_KEYS])
            graph.replay()
            plain.plan([0, num_queries], [end - begin])
            wanted = plain.run(q, k[begin:end], v[begin:end])
            torch.testing.assert_close(out, wanted, atol=1e-2, rtol=2e-2)
