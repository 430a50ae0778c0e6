# SPDX-License-Identifier: Apache-2.0
"""Attention over shared prefixes with FlashInfer's names, against the reference on the CPU."""

import numpy as np
import pytest

from flashinfer_cases import Batch, Case, workspace

torch = pytest.importorskip("torch")

from flashplan import flashinfer  # noqa: E402

PAGE = 5
HEADS = (4, 2, 64, PAGE)


class Tree:
    """Requests that begin with the keys of their group. Two groups, of three and of two requests.

    Level 0 has the pages of the groups, level 1 those of the requests. `batch` is what the requests
    are to attention that knows no levels.
    """

    def __init__(self, rng, case, qo_lens=(2, 1, 4, 3, 1), shared=(10, 15), own=(7, 4, 12, 3, 1)):
        group_of = [0, 0, 0, 1, 1]
        prefixes = Batch(torch, rng, case, [6, 9], shared)
        suffixes = Batch(torch, rng, case, qo_lens, own)
        self.tables = [
            [suffixes.ends([7, 4]), *prefixes.page_table()],
            [suffixes.ends(qo_lens), *suffixes.page_table()],
        ]
        caches = [prefixes.pages(), suffixes.pages()]
        self.tables[1][2] += len(caches[0][0])  # pages of requests lie behind those of groups
        self.cache = tuple(torch.cat(sides) for sides in zip(*caches))
        kv_lens = [shared[group] + n for group, n in zip(group_of, own)]
        self.batch = Batch(torch, rng, case, qo_lens, kv_lens)
        self.batch.q = suffixes.q
        for side in ("k", "v"):
            parts = zip(group_of, getattr(suffixes, side))
            joined = [np.concatenate((getattr(prefixes, side)[g], part)) for g, part in parts]
            setattr(self.batch, side, joined)
        self.q = self.batch.joined(self.batch.q)


@pytest.mark.parametrize("causal", [False, True])
def test_levels(rng, causal):
    """Causal is that of the last level: all rows see all keys of their group."""
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(torch))
    assert not wrapper.is_cuda_graph_enabled
    for _ in range(2):
        tree = Tree(rng, Case(causal=causal, sm_scale=0.3))
        arrays = [list(of_levels) for of_levels in zip(*tree.tables)]
        wrapper.plan(*arrays, *HEADS, causal=causal, sm_scale=0.3, q_data_type=torch.float32)
        tree.batch.check(wrapper.run(tree.q, tree.cache))
    ints = [torch.zeros(16, dtype=torch.uint8)] * 2
    wrapper.reset_workspace_buffer(workspace(torch), ints)
    tree.batch.check(wrapper.forward(tree.q, tree.cache))
    wrapper.end_forward()


def test_levels_with_buffers_for_graphs(rng):
    def buffers(length):
        return [torch.zeros(n + length, dtype=torch.int32) for n in (2, 5)]

    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, workspace(torch), "NHD", True, buffers(1), buffers(1), buffers(30), buffers(0)
    )
    assert wrapper.is_cuda_graph_enabled
    tree = Tree(rng, Case(causal=True))
    arrays = [list(of_levels) for of_levels in zip(*tree.tables)]
    wrapper.plan(*arrays, *HEADS, causal=True, q_data_type=torch.float32)
    tree.batch.check(wrapper.run(tree.q, tree.cache))
    last = wrapper._batch_prefill_wrappers[1]
    assert torch.equal(last._paged_kv_indptr_buf, tree.tables[1][1])


def test_wrong_numbers_of_levels(rng):
    make = flashinfer.MultiLevelCascadeAttentionWrapper
    with pytest.raises(ValueError, match="qo_indptr_buf_arr: expected 2 levels, got 0"):
        make(2, workspace(torch), use_cuda_graph=True)
    wrapper = make(3, workspace(torch))
    arrays = [list(of_levels) for of_levels in zip(*Tree(rng, Case()).tables)]
    with pytest.raises(ValueError, match="qo_indptr_arr: expected 3 levels, got 2"):
        wrapper.plan(*arrays, *HEADS)


def one_group(rng, causal, qo_lens):
    """A prefix of all requests in tensors, and the pages of the requests."""
    case = Case(causal=causal)
    own = Batch(torch, rng, case, qo_lens, [n + 5 for n in qo_lens])
    table = own.page_table()
    prefix = Batch(torch, rng, case, [1], [23])
    whole = Batch(torch, rng, case, qo_lens, [n + 28 for n in qo_lens])
    whole.q = own.q
    whole.k = [np.concatenate((prefix.k[0], k)) for k in own.k]
    whole.v = [np.concatenate((prefix.v[0], v)) for v in own.v]
    tensors = own.joined(own.q), prefix.tensor(prefix.k[0]), prefix.tensor(prefix.v[0])
    return whole, table, (*tensors, own.pages())


def test_decodes_that_share_a_prefix(rng):
    wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(torch))
    whole, table, tensors = one_group(rng, False, [1, 1, 1])
    wrapper.begin_forward(*table, *HEADS, torch.float32)
    whole.check(wrapper.forward(*tensors))
    wrapper.reset_workspace_buffer(workspace(torch), torch.zeros(16, dtype=torch.uint8))
    whole.check(wrapper.forward(*tensors))
    wrapper.end_forward()


@pytest.mark.parametrize("causal", [False, True])
def test_prompts_that_share_a_prefix(rng, causal):
    wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(torch))
    for qo_lens in ([3, 1, 6], [2, 9]):
        whole, table, tensors = one_group(rng, causal, qo_lens)
        if len(qo_lens) == 3:
            with pytest.raises(RuntimeError, match=r"forward: expected a begin_forward\(\)"):
                wrapper.forward(*tensors)
        wrapper.begin_forward(whole.ends(qo_lens), *table, *HEADS)
        whole.check(wrapper.forward(*tensors, causal=causal))
        wrapper.reset_workspace_buffer(workspace(torch), torch.zeros(16, dtype=torch.uint8))
        whole.check(wrapper.forward(*tensors, causal=causal))
        wrapper.end_forward()


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_batch_attention(rng, page_size):
    """Lengths are in tokens, and may be shorter than the pages."""
    wrapper = flashinfer.BatchAttention(device="cpu")
    case = Case(causal=True, logits_soft_cap=2.0, page_size=page_size)
    batch = Batch(torch, rng, case, [1, 7, 0, 3], [30, 7, 9, 2])
    indptr, indices, _ = batch.page_table()
    more = batch.integers([0, 0, 0, 0, 1])
    wrapper.plan(
        batch.ends(batch.qo_lens),
        indptr + more,
        torch.cat((indices, indices[:1])),
        batch.integers(batch.kv_lens),
        *HEADS[:3],
        64,
        page_size,
        causal=True,
        logits_soft_cap=2.0,
        q_data_type=torch.float32,
        kv_data_type=torch.float32,
    )
    q, cache = batch.joined(batch.q), batch.pages()
    batch.check(*wrapper.run(q, cache))
    batch.check(*wrapper.run(q, cache, logits_soft_cap=1.0), softcap=1.0)
    batch.check(*wrapper.run(q, cache))


def test_wrapper_with_sinks(rng):
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(torch), window_left=4)
    batch = Batch(torch, rng, Case(causal=True, window_left=4, sm_scale=0.3), [1, 7], [30, 7])
    sinks = torch.randn(4)
    wrapper.plan(
        batch.ends(batch.qo_lens),
        *batch.page_table(),
        *HEADS,
        causal=True,
        window_left=4,
        q_data_type=torch.float32,
    )
    o = wrapper.run(batch.joined(batch.q), batch.pages(), sinks, 0.3)
    batch.check(o, sinks=sinks.numpy())


def test_lengths_of_batch_attention():
    wrapper = flashinfer.BatchAttention(device="cpu")
    indptr, ids, lens = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0], [PAGE + 1]))
    with pytest.raises(
        ValueError, match=r"kv_len_arr: expected at most the keys of the pages, \[5\], got \[6\]"
    ):
        wrapper.plan(indptr, indptr, ids, lens, *HEADS[:3], 64, PAGE)
