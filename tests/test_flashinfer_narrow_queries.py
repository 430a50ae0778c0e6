# SPDX-License-Identifier: Apache-2.0
"""Queries of 8 bits with FlashInfer's names and scales, against float64."""

import numpy as np
import pytest

from flashinfer_cases import Batch, Case, workspace

torch = pytest.importorskip("torch")

import flashplan as fp  # noqa: E402
from flashplan import flashinfer  # noqa: E402
from flashplan.flashinfer import _narrow_queries  # noqa: E402

HEADS = [(4, 4), (4, 2)]  # scales of the latter's query heads are multiplied with q
every = [
    pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"]),
    pytest.mark.parametrize("heads", HEADS),
    pytest.mark.parametrize("kind", ["head", "one"]),
]


def every_case(test):
    for mark in every:
        test = mark(test)
    return test


class Narrow:
    """A batch of 8 bits, and the scales of q, k and v."""

    def __init__(self, rng, dtype, heads, kind, qo_lens=(7, 1, 4), kv_lens=(30, 4, 17)):
        case = Case(dtype=dtype, heads=heads, causal=True)
        self.batch = Batch(torch, rng, case, qo_lens, kv_lens)
        counts = (heads[0], heads[1], heads[1]) if kind == "head" else (1, 1, 1)
        self.scales = [torch.from_numpy(rng.uniform(0.5, 2, n)).float() for n in counts]
        scale_q, self.k_scale, self.v_scale = (x.double().numpy() for x in self.scales)
        real = [q.astype(np.float64) * scale_q[:, None] for q in self.batch.q]
        given, self.batch.q = self.batch.q, real
        self.exact = self.batch.expected(k_scale=self.k_scale, v_scale=self.v_scale)
        self.batch.q = given

    def check(self, o, lse):
        """Queries that are multiplied have an error of 2^-9, which moves logits by as much."""
        assert o.dtype == torch.float32
        np.testing.assert_allclose(o, self.exact[0], rtol=0.02, atol=0.03)
        np.testing.assert_allclose(lse, self.exact[1], rtol=0.005, atol=0.02)


def dtypes(batch):
    return {"q_data_type": getattr(torch, batch.case.dtype), "o_data_type": torch.float32}


@every_case
def test_paged(rng, dtype, heads, kind):
    narrow = Narrow(rng, dtype, heads, kind)
    batch = narrow.batch
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(torch))
    shape = *heads, 64, batch.case.page_size
    ends = batch.ends(batch.qo_lens)
    wrapper.plan(ends, *batch.page_table(), *shape, causal=True, **dtypes(batch))
    q, pages = batch.joined(batch.q), batch.pages()
    narrow.check(*wrapper.run(q, pages, *narrow.scales, return_lse=True))
    halved = [narrow.scales[0], narrow.scales[1] / 2, narrow.scales[2] / 4]
    narrow.check(*wrapper.run(q, pages, *halved, k_scale=2.0, v_scale=4.0, return_lse=True))
    with pytest.raises(ValueError, match="scale_q: expected 1 or 4 elements, .* got 3"):
        wrapper.run(q, pages, torch.ones(3), *narrow.scales[1:])
    with pytest.raises(ValueError, match=r"q: expected the q_data_type of plan\(\), torch.float8"):
        wrapper.run(q.float(), pages)
    with pytest.raises(fp.UnsupportedError, match="run: expected no arguments of a JIT variant"):
        wrapper.run(q, pages, *narrow.scales[:2])


@every_case
def test_ragged(rng, dtype, heads, kind):
    narrow = Narrow(rng, dtype, heads, kind)
    batch = narrow.batch
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(torch))
    ends = batch.ends(batch.qo_lens), batch.ends(batch.kv_lens)
    wrapper.plan(*ends, *heads, 64, causal=True, **dtypes(batch))
    q, k, v = (batch.joined(x) for x in (batch.q, batch.k, batch.v))
    narrow.check(*wrapper.run(q, k, v, *narrow.scales, return_lse=True))


@every_case
def test_decodes(rng, dtype, heads, kind):
    narrow = Narrow(rng, dtype, heads, kind, [1, 1, 1])
    batch = narrow.batch
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(torch))
    shape = *heads, 64, batch.case.page_size
    wrapper.plan(*batch.page_table(), *shape, **dtypes(batch))
    q, pages = batch.joined(batch.q), batch.pages()
    narrow.check(*wrapper.run(q, pages, *narrow.scales, return_lse=True))


@every_case
def test_single(rng, dtype, heads, kind):
    narrow = Narrow(rng, dtype, heads, kind, [7], [30])
    q, k, v = (torch.as_tensor(narrow.batch.tensor(x[0])) for x in tensors_of(narrow.batch))
    arguments = q, k, v, *narrow.scales
    results = flashinfer.single_prefill_with_kv_cache(
        *arguments, o_dtype=torch.float32, causal=True, return_lse=True
    )
    narrow.check(*results)
    with pytest.raises(fp.UnsupportedError, match="o_dtype: expected 16 bits .* got torch.float8"):
        flashinfer.single_prefill_with_kv_cache(*arguments)


def tensors_of(batch):
    return batch.q, batch.k, batch.v


@every_case
def test_blocks(rng, dtype, heads, kind):
    """Blocks of 4 queries and 8 keys, all of which are seen."""
    narrow = Narrow(rng, dtype, heads, kind, [8], [16])
    batch = narrow.batch
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(torch))
    indptr, indices = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 4], [0, 1, 0, 1]))
    dtype = getattr(torch, dtype)
    wrapper.plan(indptr, indices, 8, 16, 4, 8, *heads, 64, q_data_type=dtype, kv_data_type=dtype)
    q, k, v = (batch.joined(x) for x in tensors_of(batch))
    o = wrapper.run(q, k, v, *narrow.scales)
    assert o.dtype == torch.float16  # the default beside queries of 8 bits
    scale_q, scale_k, scale_v = (x.double().numpy()[:, None] for x in narrow.scales)
    whole = Batch(torch, rng, Case(heads=heads), [8], [16])
    whole.q, whole.k, whole.v = (
        [x[0].astype(np.float64) * scale]
        for x, scale in zip(tensors_of(batch), (scale_q, scale_k, scale_v))
    )
    np.testing.assert_allclose(o.float(), whole.expected()[0], rtol=0.02, atol=0.03)


def test_dtypes_that_kernels_read():
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    assert _narrow_queries.kernel_dtype(e5m2, gpu) == torch.bfloat16
    for dtype, device in ((e4m3, gpu), (e4m3, cpu), (e5m2, cpu), (torch.float16, gpu)):
        assert _narrow_queries.kernel_dtype(dtype, device) == dtype
