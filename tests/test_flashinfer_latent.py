# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's names for latent, block-sparse and mixed attention, against the reference."""

import dataclasses

import numpy as np
import pytest

import reference
from flashinfer_cases import Batch, Case, poisoned, workspace

torch = pytest.importorskip("torch")

import flashplan as fp  # noqa: E402
from flashplan import flashinfer  # noqa: E402
from frameworks import Torch  # noqa: E402

LATENT, ROTATED, HEADS, PAGE, SCALE = 512, 64, 4, 5, 192**-0.5


class Latent(Batch):
    """Requests whose values are the first dims of their keys."""

    def __init__(self, rng, qo_lens, kv_lens, causal=True, scale=None):
        case = Case(
            causal=causal,
            heads=(HEADS, 1),
            dims=(LATENT + ROTATED, LATENT),
            sm_scale=SCALE,
            scales=(None, scale, scale),
        )
        super().__init__(torch, rng, case, qo_lens, kv_lens)
        self.v = [k[..., :LATENT] for k in self.k]

    def plan(self, wrapper, **options):
        indptr, indices, _ = self.page_table()
        wrapper.plan(
            self.ends(self.qo_lens),
            indptr,
            indices,
            self.integers(self.kv_lens),
            HEADS,
            LATENT,
            ROTATED,
            PAGE,
            self.case.causal,
            SCALE,
            torch.float32,
            torch.float32,
            **options,
        )

    def tensors(self):
        cache = self.pages()[0].squeeze(2)
        q = self.joined(self.q)
        return q[..., :LATENT], q[..., LATENT:], cache[..., :LATENT], cache[..., LATENT:]


@pytest.mark.parametrize("causal", [False, True])
def test_latent(rng, causal):
    """Slots without a key hold NaN, and a request without keys has o = 0 and lse = -inf."""
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(torch))
    for qo_lens, kv_lens in (([1, 1, 1], [30, 0, 7]), ([3, 2], [9, 41])):
        batch = Latent(rng, qo_lens, kv_lens, causal, scale=0.5)
        batch.plan(wrapper)
        tensors = batch.tensors()
        batch.check(*wrapper.run(*tensors, return_lse=True, ckv_scale=0.5, kpe_scale=0.5))
        batch.check(wrapper.run(*tensors, ckv_scale=0.5))
        o, lse = wrapper.run(*tensors, return_lse=True, return_lse_base_on_e=True, kpe_scale=0.5)
        batch.check(o, lse, base2=False)


def test_latent_with_buffers_for_graphs(rng):
    def buffer(length):
        return torch.full((length,), -7, dtype=torch.int32)

    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(
        workspace(torch), True, buffer(3), buffer(3), buffer(20), buffer(2)
    )
    for kv_lens in ([30, 7], [8, 41]):
        batch = Latent(rng, [1, 1], kv_lens)
        batch.plan(wrapper)
        assert wrapper._paged_kv_last_page_len_buf.tolist() == kv_lens
        batch.check(wrapper.run(*batch.tensors()))
    with pytest.raises(ValueError, match="batch size should be fixed in cudagraph mode, got 1"):
        Latent(rng, [1], [5]).plan(wrapper)


def test_latent_errors(rng):
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(torch))
    batch = Latent(rng, [1], [7])
    batch.plan(wrapper, query_layout="split", lse_mode="base2")
    with pytest.raises(fp.UnsupportedError, match="query_layout: expected 'split', got 'packed'"):
        batch.plan(wrapper, query_layout="packed")
    with pytest.raises(fp.UnsupportedError, match="skip_softmax: expected none, got True"):
        batch.plan(wrapper, skip_softmax=True)
    for name in ("kv_len", "page_table", "ckv_scale_arr", "profiler_buffer", "bmm1_scale"):
        with pytest.raises(fp.UnsupportedError, match=f"{name}: expected none, got a tensor"):
            wrapper.run(*batch.tensors(), **{name: torch.ones(1)})
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    for i, name in enumerate(names):
        tensors = list(batch.tensors())
        tensors[i] = tensors[i].half()
        with pytest.raises(ValueError, match=rf"{name}\.dtype: expected the \w+ of plan\(\)"):
            wrapper.run(*tensors)


def test_latent_scales_that_differ(rng):
    """Rotated dims have half of the batch's scale, so they are stored twice as large."""
    batch = Latent(rng, [3, 2], [9, 41], scale=0.5)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(torch))
    batch.plan(wrapper)
    q_nope, q_pe, ckv, kpe = batch.tensors()
    results = wrapper.run(
        q_nope, q_pe, ckv, 2 * kpe, return_lse=True, ckv_scale=0.5, kpe_scale=0.25
    )
    batch.check(*results)


def test_latent_keys_without_rotated_dims(rng):
    """Their tensors are empty. The page table may have a tail, and lse is written where it is
    given."""
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(torch))
    batch = Latent(rng, [3, 2], [9, 41])
    batch.k = [k[..., :LATENT] for k in batch.k]
    batch.q = [q[..., :LATENT] for q in batch.q]
    batch.case = dataclasses.replace(batch.case, dims=(LATENT, LATENT))
    indptr, indices, _ = batch.page_table()
    shape = HEADS, LATENT, 0, PAGE, True, SCALE, torch.float32, torch.float32
    lens = batch.integers(batch.kv_lens)
    longer = torch.cat((indptr, torch.tensor([-7, -7], dtype=torch.int32)))
    wrapper.plan(batch.ends(batch.qo_lens), longer, indices, lens, *shape)
    q, cache = batch.joined(batch.q), batch.pages()[0].squeeze(2)
    lse = poisoned(torch, 5, HEADS)
    o = wrapper.run(q, q[..., :0], cache, cache[..., :0], lse=lse)
    batch.check(o, lse)


def last_page_lens(batch):
    return batch.integers([(n - 1) % PAGE + 1 if n else 0 for n in batch.kv_lens])


@pytest.mark.parametrize("in_graphs", [False, True])
def test_latent_decodes(rng, in_graphs):
    """The wrapper that FlashInfer had before. Its buffers may be the tensors of a plan."""
    arguments = {}
    if in_graphs:
        buffers = [torch.full((length,), -7, dtype=torch.int32) for length in (4, 20, 3)]
        names = ("indptr", "indices", "last_page_len")
        arguments = {f"paged_kv_{name}_buffer": x for name, x in zip(names, buffers)}
    wrapper = flashinfer.BatchDecodeMlaWithPagedKVCacheWrapper(
        workspace(torch), in_graphs, use_tensor_cores=True, **arguments
    )
    assert wrapper.use_tensor_cores
    for kv_lens in ([30, 0, 7], [8, 41, 1]):
        batch = Latent(rng, [1, 1, 1], kv_lens)
        indptr, indices, _ = batch.page_table()
        table = indptr, indices, last_page_lens(batch)
        shape = HEADS, LATENT, PAGE, SCALE
        for _ in range(2):
            wrapper.plan(*table, *shape, data_type=torch.float32)
            batch.check(*wrapper.run(*batch.tensors(), return_lse=True))
    with pytest.raises(fp.UnsupportedError, match="window_left: expected one of -1, got 3"):
        wrapper.plan(*table, *shape, window_left=3)
    with pytest.raises(fp.UnsupportedError, match="logits_soft_cap: expected one of None, 0.0"):
        wrapper.plan(*table, *shape, logits_soft_cap=3.0)
    with pytest.raises(fp.UnsupportedError, match="k_scale: expected one of None, 1.0, got 2.0"):
        wrapper.run(*batch.tensors(), k_scale=2.0)


def test_prompt_beside_decodes(rng):
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(torch))
    assert not wrapper.is_cuda_graph_enabled
    prompt = Batch(torch, rng, Case(causal=True, sm_scale=0.3), [7], [30])
    decodes = Batch(torch, rng, Case(window_left=6), [1, 1, 1], [30, 4, 17])
    table = decodes.page_table()
    wrapper.plan(*table, 4, 2, 64, PAGE, window_left=6, q_data_type=torch.float32)
    tensors = [prompt.joined(x) for x in (prompt.q, prompt.k, prompt.v)]
    tensors += [decodes.joined(decodes.q), decodes.pages()]
    options = {"causal_p": True, "sm_scale_p": 0.3}
    both = wrapper.run(*tensors, return_lse_p=True, return_lse_d=True, **options)
    prompt.check(*both[0])
    decodes.check(*both[1])
    wrapper.reset_workspace_buffer(workspace(torch), torch.zeros(16, dtype=torch.uint8))
    o_p, o_d = wrapper.run(*tensors, window_left_d=6, **options)
    prompt.check(o_p)
    decodes.check(o_d)
    wrapper.end_forward()
    with pytest.raises(fp.UnsupportedError, match=r"window_left_d: expected .*, 6, got 5"):
        wrapper.run(*tensors, window_left_d=5)
    with pytest.raises(fp.UnsupportedError, match="custom_mask_d: expected none, got a tensor"):
        wrapper.run(*tensors, custom_mask_d=torch.ones(1))
    with pytest.raises(fp.UnsupportedError, match="jit_args: expected none"):
        flashinfer.PODWithPagedKVCacheWrapper(workspace(torch), jit_args=[1])


@pytest.mark.parametrize("masked", [False, True])
def test_block_sparse(rng, masked):
    M, N, R, C = 12, 35, 3, 5
    blocks = rng.random((M // R, N // C)) < 0.5
    blocks[1] = False  # which sees nothing
    indptr = torch.from_numpy(np.cumsum([0, *blocks.sum(1)]).astype(np.int32))
    indices = torch.from_numpy(np.nonzero(blocks)[1].astype(np.int32))
    inside = rng.random((len(indices), R, C)) < (0.5 if masked else 2)
    seen = np.zeros((M, N), bool)
    for block, (row, column) in enumerate(np.argwhere(blocks)):
        seen[row * R : row * R + R, column * C : column * C + C] = inside[block]
    q, k, v = (
        rng.standard_normal((n, h, 64)).astype(np.float32) for n, h in ((M, 4), (N, 2), (N, 2))
    )
    options = {"mask": seen, "causal": False, "softmax_scale": 0.3, "softcap": 2.0}
    exact = reference.attention(q, k, v, **options)
    twin = reference.attention(q, k, v, dtype="float32", **options)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(torch))
    mask = torch.from_numpy(inside) if masked else None
    shape = (M, N, R, C, 4, 2, 64)
    wrapper.plan(
        indptr,
        indices,
        *shape,
        mask=mask,
        logits_soft_cap=2.0,
        sm_scale=0.3,
        q_data_type=torch.float32,
    )
    device = Torch(torch)
    tensors = [device.tensor(x) for x in (q, k, v)]
    o, lse = wrapper.run(*tensors, return_lse=True)
    reference.assert_close(o.numpy(), exact[0], twin[0], unit=16, what="o")
    lse2 = [x[1] / np.log(2) for x in (exact, twin)]
    reference.assert_close(lse.numpy(), *lse2, unit=8, what="lse")
    wrapper.reset_workspace_buffer(workspace(torch), torch.zeros(16, dtype=torch.uint8))
    assert torch.equal(wrapper.run(*tensors), o)
    halves = [x.bfloat16() for x in tensors]
    for o_dtype, wanted in ((torch.float16, torch.bfloat16), ("float32", torch.float32)):
        dtypes = {"q_data_type": "bfloat16", "o_data_type": o_dtype}
        wrapper.plan(indptr, indices, *shape, **dtypes)
        assert wrapper.run(*halves).dtype == wanted
    wrapper.end_forward()


def test_block_sparse_errors():
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(torch))
    indptr, indices = torch.tensor([0, 1, 2]), torch.tensor([0, 1])

    def plan(M=6, N=10, **options):
        wrapper.plan(indptr, indices, M, N, 3, 5, 4, 2, 64, **options)

    with pytest.raises(ValueError, match="M: expected a multiple of 3, got 7"):
        plan(M=7)
    with pytest.raises(ValueError, match="N: expected a multiple of 5, got 11"):
        plan(N=11)
    with pytest.raises(ValueError, match="indptr: expected 4 elements, got 3"):
        plan(M=9)
    for name in ("causal", "block_mask", "packed_mask"):
        with pytest.raises(fp.UnsupportedError, match=f"{name}: expected none, got True"):
            plan(**{name: True})
    with pytest.raises(fp.UnsupportedError, match="pos_encoding_mode: expected 'NONE'"):
        plan(pos_encoding_mode="ALIBI")
