# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's functions that attend without plan(), against the reference."""

import numpy as np
import pytest

from flashinfer_cases import Batch, Case, poisoned

torch = pytest.importorskip("torch")

import flashplan as fp  # noqa: E402
from flashplan import flashinfer  # noqa: E402

SCALE = 0.3
NO_WORKSPACE = torch.zeros(16, dtype=torch.uint8)


def batch_of(rng, qo_lens, kv_lens, **options):
    case = Case(sm_scale=SCALE, **{"causal": True, "page_size": 5, **options})
    return Batch(torch, rng, case, qo_lens, kv_lens)


def tables(batch):
    """(block_tables, seq_lens), with ids of no page behind the lengths."""
    indptr, indices, _ = batch.page_table()
    table = np.full((len(batch.kv_lens), 12), -7, np.int32)
    for row, begin, end in zip(table, indptr.tolist(), indptr.tolist()[1:]):
        row[: end - begin] = indices[begin:end]
    return batch.tensor(table), torch.tensor(batch.kv_lens).to(torch.uint32)


def scales(batch, as_tensors):
    k_scale, v_scale = (1.0 if x is None else x for x in batch.case.scales[1:])
    numbers = SCALE * k_scale, v_scale
    return tuple(map(torch.tensor, numbers)) if as_tensors else numbers


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"window_left": 6}, {"cache": "one"}, {"scales": (None, 0.5, 2.0)}]
)
def test_decodes(rng, options, q_len, layout, as_tensors):
    for kv_lens in ([30, 4, 17], [55, 3, 8]):  # the second time with the plan of the first
        batch = batch_of(rng, [q_len] * 3, kv_lens, layout=layout, **options)
        batch.sinks = rng.standard_normal(4).astype(np.float32)
        window = batch.case.window_left
        lengths, q = tables(batch), batch.joined(batch.q)
        bmm1_scale, bmm2_scale = scales(batch, as_tensors)
        arguments = q, batch.pages(), NO_WORKSPACE, *lengths, 60, bmm1_scale, bmm2_scale, window
        named = {"kv_layout": layout, "q_len_per_req": q_len, "sinks": torch.tensor(batch.sinks)}
        trtllm = flashinfer.decode.trtllm_batch_decode_with_kv_cache
        batch.check(*trtllm(*arguments, **named, return_lse=True))
        out, lse = poisoned(torch, *q.shape), poisoned(torch, *q.shape[:2])
        assert trtllm(*arguments, **named, out=out, lse=lse) is out
        batch.check(out, lse)
        o = flashinfer.decode.xqa_batch_decode_with_kv_cache(*arguments, **named)
        if q_len > 1:
            assert o.shape == (3, q_len, 4, 64)
            o = o.flatten(0, 1)
        assert torch.equal(o, out)


@pytest.mark.parametrize("by_xqa", [False, True])
def test_decodes_of_different_numbers_of_rows(rng, by_xqa):
    batch = batch_of(rng, [3, 1, 2], [30, 4, 17])
    lengths = tables(batch)
    arguments = batch.joined(batch.q), batch.pages(), NO_WORKSPACE, *lengths, 60, SCALE
    ends = batch.ends(batch.qo_lens)
    if by_xqa:
        named = {"q_len_per_req": 3, "q_cu_seq_lens": ends}
        o = flashinfer.decode.xqa_batch_decode_with_kv_cache(*arguments, **named)
    else:
        named = {"max_q_len": 3, "cum_seq_lens_q": ends, "kv_layout": "NHD"}
        o = flashinfer.decode.trtllm_batch_decode_with_kv_cache(*arguments, **named)
    batch.check(o)


def test_keys_that_are_values(rng):
    batch = batch_of(rng, [1, 1], [30, 4], causal=False)
    batch.v = batch.k
    lengths = tables(batch)
    cache = batch.pages()[0].unsqueeze(1)
    batch.check(
        flashinfer.decode.xqa_batch_decode_with_kv_cache(
            batch.joined(batch.q), cache, NO_WORKSPACE, *lengths, 30, SCALE
        )
    )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_prompts_over_pages(rng, causal, layout):
    batch = batch_of(rng, [9, 1, 17], [30, 4, 17], causal=causal, layout=layout)
    lengths, q = tables(batch), batch.joined(batch.q)
    numbers = 17, 30, SCALE, 1.0, 3
    ends = batch.ends(batch.qo_lens), batch.ends(batch.kv_lens)
    context = flashinfer.prefill.trtllm_batch_context_with_kv_cache
    arguments = q, batch.pages(), NO_WORKSPACE, *lengths, *numbers, *ends
    named = {"causal": causal, "kv_layout": layout}
    batch.check(*context(*arguments, **named, return_lse=True))
    lse = poisoned(torch, *q.shape[:2])
    batch.check(context(*arguments, **named, lse=lse), lse)


def test_ragged_prompts(rng):
    """With head dims as DeepSeek's prompts have them."""
    batch = batch_of(rng, [9, 1, 17], [30, 4, 17], dims=(192, 128), heads=(4, 4))
    tensors = [batch.joined(x) for x in (batch.q, batch.k, batch.v)]
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32)
    ends = batch.ends(batch.qo_lens), batch.ends(batch.kv_lens)
    numbers = 17, 30, SCALE, 1.0, 1.0, 3, -1
    results = flashinfer.prefill.trtllm_ragged_attention_deepseek(
        *tensors, NO_WORKSPACE, lens, *numbers, *ends, None, True, True
    )
    batch.check(*results)


def decode(rng, name="xqa", **changed):
    batch = batch_of(rng, [1, 1], [30, 4])
    lengths = tables(batch)
    arguments = batch.joined(batch.q), batch.pages(), NO_WORKSPACE, *lengths, 30
    function = getattr(flashinfer.decode, f"{name}_batch_decode_with_kv_cache")
    return function(*arguments, **{"kv_layout": "NHD", **changed})


def draft_mask(qo_lens, causal, words=2):
    """[tokens, words] uint16."""
    rows = [i if causal else n - 1 for n in qo_lens for i in range(n)]
    bits = np.arange(16 * words) <= np.array(rows)[:, None]
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.uint16))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("qo_lens", [[18, 18], [18, 0, 3]])
def test_masks_of_drafts(rng, qo_lens, causal):
    """With more drafts than a word of the mask has bits."""
    batch = batch_of(rng, qo_lens, [30, 18, 20][: len(qo_lens)], causal=causal)
    lengths = tables(batch)
    mask = draft_mask(qo_lens, causal)
    named = {"q_len_per_req": 18, "mask": mask.view(len(qo_lens), -1, 2)}
    if len(set(qo_lens)) > 1:
        named |= {"q_cu_seq_lens": batch.ends(qo_lens), "mask": mask}
    q, cache = batch.joined(batch.q), batch.pages()
    function = flashinfer.decode.xqa_batch_decode_with_kv_cache
    o = function(q, cache, NO_WORKSPACE, *lengths, 30, SCALE, **named)
    batch.check(o.view(q.shape))
    mask[1, 0] ^= 1
    with pytest.raises(fp.UnsupportedError, match="mask: expected drafts that see those before"):
        function(q, cache, NO_WORKSPACE, *lengths, 30, SCALE, **named)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_outputs_of_eight_bits(rng, dtype):
    """They are those of float32, rounded once."""
    batch = batch_of(rng, [1] * 3, [30, 4, 17])
    lengths = tables(batch)
    q, cache = batch.joined(batch.q), batch.pages()
    arguments = q, cache, NO_WORKSPACE, *lengths, 60, SCALE
    expected = flashinfer.xqa_batch_decode_with_kv_cache(*arguments).to(getattr(torch, dtype))
    out = torch.empty(q.shape, dtype=getattr(torch, dtype))
    for function in (
        flashinfer.xqa_batch_decode_with_kv_cache,
        flashinfer.trtllm_batch_decode_with_kv_cache,
    ):
        named = {"kv_layout": "NHD", "out": out}
        assert function(*arguments, **named) is out
        assert torch.equal(out.float(), expected.float())
        out.fill_(0.0)
    named = {"kv_layout": "NHD", "out_dtype": dtype, "return_lse": True}
    o, lse = flashinfer.trtllm_batch_decode_with_kv_cache(
        *arguments, **named, skip_softmax_threshold_scale_factor=100.0
    )
    assert torch.equal(o.float(), expected.float())
    assert lse.shape == (3, 4)
    ends = batch.ends(batch.qo_lens), batch.ends(batch.kv_lens)
    o = flashinfer.trtllm_batch_context_with_kv_cache(
        *arguments[:5], 1, 60, SCALE, 1.0, 3, *ends, kv_layout="NHD", out_dtype=dtype
    )
    assert torch.equal(o.float(), expected.float())


def test_scales_of_four_bits_are_not_supported(rng):
    with pytest.raises(fp.UnsupportedError, match="kv_cache_sf: expected none, got a tensor"):
        decode(rng, kv_cache_sf=torch.ones(1))


def test_arguments_that_are_not_supported(rng):
    for changed, message in (
        ({"out": object()}, "out: expected a torch.Tensor, got object"),
        ({"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx: expected none"),
        ({"enable_block_sparse_attention": True}, "enable_block_sparse_attention: expected none"),
        ({"kv_layout": "DHN"}, "kv_layout: expected one of"),
    ):
        with pytest.raises(fp.UnsupportedError, match=message):
            decode(rng, "trtllm", **changed)


def test_wrong_numbers_of_rows(rng):
    with pytest.raises(ValueError, match=r"query: expected 6 rows, q_len_per_req = 3 .* got 2"):
        decode(rng, q_len_per_req=3)
