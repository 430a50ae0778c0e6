# SPDX-License-Identifier: Apache-2.0
"""flashplan.flashinfer on the GPU: results, CUDA graphs of PyTorch, generators."""

import numpy as np
import pytest

from flashinfer_cases import Batch, Case, workspace

pytestmark = pytest.mark.gpu

QO_LENS, KV_LENS = [1, 70, 0, 3, 4, 2], [300, 70, 9, 1, 0, 640]
CASES = [
    Case(dtype="bfloat16", causal=True, heads=(8, 2), dims=(128, 128), page_size=16),
    Case(dtype="float16", layout="HND", cache="one", page_size=16),
    Case(dtype="bfloat16", causal=True, cache="tokens", page_size=1, index_dtype="int64"),
    Case(dtype="bfloat16", causal=True, window_left=9, logits_soft_cap=2.0, sm_scale=0.3),
    Case(dtype="float16", kv_dtype="float8_e4m3fn", scales=(1.5, 0.5, 2.0), page_size=16),
    Case(dtype="bfloat16", pos_encoding_mode="ROPE_LLAMA", causal=True),
    Case(dtype="bfloat16", kv_dtype="float8_e4m3fn", pos_encoding_mode="ROPE_LLAMA", causal=True),
    Case(dtype="bfloat16", mask="bool", causal=True),
    Case(dtype="bfloat16", mask="packed"),
]
every = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture
def flashinfer(torch):
    import flashplan.flashinfer

    with torch.inference_mode():
        yield flashplan.flashinfer


def plan(torch, wrapper, batch, *, is_decode=False, **options):
    """Lengths are on the GPU."""
    case = batch.case
    rows = [] if is_decode else [batch.ends(batch.qo_lens)]
    if not is_decode:
        options |= {"causal": case.causal} | batch.mask_arguments()
    arguments = case.options() | batch.shape_arguments() | options
    wrapper.plan(*rows, *batch.page_table(), *case.heads, case.dims[0], case.page_size, **arguments)


@every
def test_paged(cuda, torch, rng, case, flashinfer):
    buffer = workspace(torch, cuda.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, case.layout)
    for kv_lens in (KV_LENS, KV_LENS[::-1]):
        batch = Batch(torch, rng, case, QO_LENS, kv_lens, cuda)
        plan(torch, wrapper, batch)
        q, cache = batch.joined(batch.q), batch.pages()
        batch.check(*wrapper.run(q, cache, return_lse=True, **batch.scales()))


@pytest.mark.parametrize("case", [case for case in CASES if not case.mask], ids=str)
def test_graph_of_decodes(cuda, torch, rng, case, flashinfer):
    """A graph that was captured once serves later plans."""

    def ints(length):
        return torch.zeros(length, dtype=torch.int32, device=cuda.device)

    buffers = ints(5), ints(2000), ints(4)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace(torch, cuda.device), *buffers, case.layout
    )
    graph = tensors = None
    for kv_lens in ([900, 4, 17, 1], [5, 0, 900, 17], [230, 230, 230, 232]):
        batch = Batch(torch, rng, case, [1] * 4, kv_lens, cuda)
        plan(torch, wrapper, batch, is_decode=True)
        now = [batch.joined(batch.q), batch.pages()]
        if graph is None:
            tensors, graph = now, torch.cuda.CUDAGraph()
            wrapper.run(*tensors, **batch.scales())
            with torch.cuda.graph(graph):
                o, lse = wrapper.run(*tensors, return_lse=True, **batch.scales())
        else:
            tensors[0].copy_(now[0])
            both = zip(*(x if isinstance(x, tuple) else (x,) for x in (tensors[1], now[1])))
            for place, cache in both:
                most = min(len(place), len(cache))
                place[:most].copy_(cache[:most])
        graph.replay()
        batch.check(o, lse)


def test_first_run_in_a_capture(cuda, torch, rng, flashinfer):
    batch = Batch(torch, rng, CASES[0], [1], [9], cuda)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(torch, cuda.device))
    plan(torch, wrapper, batch, is_decode=True)
    q, cache = batch.joined(batch.q), batch.pages()
    with (
        pytest.raises(RuntimeError, match="run: expected .* before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        wrapper.run(q, cache, window_left=3)


def test_single(cuda, torch, rng, flashinfer):
    for case in CASES[0], CASES[3], CASES[5]:
        batch = Batch(torch, rng, case, [7], [300], cuda)
        q, k, v = (batch.tensor(x[0]) for x in (batch.q, batch.k, batch.v))
        options = case.options() | batch.mask_arguments() | {"causal": case.causal}
        batch.check(*flashinfer.single_prefill_with_kv_cache(q, k, v, return_lse=True, **options))


def test_generators(cuda, torch, flashinfer):
    """A generator advances by its offset, so that PyTorch's own numbers differ, too."""
    probs = torch.softmax(torch.randn(64, 500, device=cuda.device), -1)
    first, again = (torch.Generator(cuda.device).manual_seed(5) for _ in range(2))
    tokens = flashinfer.sampling_from_probs(probs, generator=first)
    assert torch.equal(tokens, flashinfer.sampling_from_probs(probs, generator=again))
    assert first.get_offset() == again.get_offset() > 0
    assert not torch.equal(tokens, flashinfer.sampling_from_probs(probs, generator=first))
    assert not torch.equal(
        flashinfer.sampling_from_probs(probs), flashinfer.sampling_from_probs(probs)
    )
    probs[3] = torch.nan
    tokens, valid = flashinfer.top_p_sampling_from_probs(probs, 0.9, return_valid=True)
    assert np.flatnonzero(~valid.cpu().numpy()).tolist() == [3]
    assert tokens[3] == 0


def test_pages_and_positions(cuda, torch, flashinfer):
    indptr = torch.tensor([0, 2, 2, 5], device=cuda.device)
    lens = torch.tensor([5, 0, 4], device=cuda.device)
    requests, positions = flashinfer.get_batch_indices_positions(indptr, lens, 6)
    assert requests.tolist() == [0, 0, 2, 2, 2, -1]
    assert positions.tolist() == [3, 4, 1, 2, 3, 0]
    x = torch.rand(77, device=cuda.device) < 0.5
    packed, begins = flashinfer.segment_packbits(x, torch.tensor([0, 3, 77], device=cuda.device))
    parts = [np.packbits(part) for part in np.split(x.cpu().numpy(), [3])]
    assert np.array_equal(packed.cpu().numpy(), np.concatenate(parts))
    assert begins.tolist() == [0, 1, 11]
