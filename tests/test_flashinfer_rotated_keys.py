# SPDX-License-Identifier: Apache-2.0
"""Positions encoded by ROPE_LLAMA over caches of 8 bits: rotated as they are read, as CPUs can, or
widened first, as GPUs need."""

import pytest

from flashinfer_cases import Batch, Case, workspace
from test_flashinfer_batch import planned_decode, planned_pages, planned_ragged

torch = pytest.importorskip("torch")

from flashplan import flashinfer  # noqa: E402
from flashplan.flashinfer import _positions, _single, _wrapper  # noqa: E402

QO_LENS, KV_LENS = [7, 1, 0, 4, 3], [30, 4, 9, 17, 0]
SCALES = (1.5, 0.5, 2.0)
CASES = [
    Case(dtype="bfloat16", kv_dtype="float8_e4m3fn", causal=True, scales=SCALES),
    Case(dtype="float16", kv_dtype="float8_e5m2", layout="HND", cache="one", rope_theta=500.0),
    Case(dtype="float16", kv_dtype="float8_e4m3fn", page_size=1, cache="tokens", rope_scale=2.0),
]
every = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(params=[False, True], ids=["read", "widened"], autouse=True)
def widens(request, monkeypatch):
    """Whether keys are widened; with the decisions that were made for the tensors of a test."""
    decisions = []

    def widens_keys(mode, kv_dtype, device):
        decisions.append(mode == "ROPE_LLAMA" and kv_dtype.itemsize == 1 and request.param)
        assert not _positions.widens_keys(mode, kv_dtype, device)
        assert _positions.widens_keys(mode, kv_dtype, torch.device("cuda")) == (
            mode == "ROPE_LLAMA" and kv_dtype.itemsize == 1
        )
        return decisions[-1]

    for module in (_single, _wrapper):
        monkeypatch.setattr(module, "widens_keys", widens_keys)
    yield
    assert any(decisions) == request.param


def rotated(rng, case, qo_lens=QO_LENS):
    case = Case(**vars(case) | {"pos_encoding_mode": "ROPE_LLAMA"})
    return Batch(torch, rng, case, qo_lens, KV_LENS)


@every
def test_paged(rng, case):
    batch = rotated(rng, case)
    wrapper = planned_pages(batch)
    q, cache = batch.joined(batch.q), batch.pages()
    batch.check(*wrapper.run(q, cache, return_lse=True, **batch.scales()))


@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_ragged(rng, case):
    batch = rotated(rng, case)
    tensors = [batch.joined(x) for x in (batch.q, batch.k, batch.v)]
    batch.check(*planned_ragged(batch).run(*tensors, return_lse=True, **batch.scales()))


@every
def test_decodes_with_buffers(rng, case):
    """The buffer of page indices is longer than those of a batch, and holds anything there."""
    anything = torch.randint(-(2**31), 2**31 - 1, (100,), dtype=torch.int32)
    ends, last = (torch.zeros(n, dtype=torch.int32) for n in (len(KV_LENS) + 1, len(KV_LENS)))
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace(torch), ends, anything, last, case.layout
    )
    for _ in range(2):
        batch = rotated(rng, case, [1] * len(KV_LENS))
        planned_decode(batch, wrapper)
        q, cache = batch.joined(batch.q), batch.pages()
        batch.check(*wrapper.run(q, cache, return_lse=True, **batch.scales()))


def test_bits_of_a_cache_of_uint8(rng):
    batch = rotated(rng, CASES[0])
    wrapper = planned_pages(batch)
    q, cache = batch.joined(batch.q), batch.pages()
    bits = tuple(x.view(torch.uint8) for x in cache)
    assert torch.equal(wrapper.run(q, bits), wrapper.run(q, cache))


def test_queries_of_8_bits(rng):
    case = Case(dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
    batch = rotated(rng, case)
    wrapper = planned_pages(batch, o_data_type=torch.float32)
    o, lse = wrapper.run(batch.joined(batch.q), batch.pages(), return_lse=True)
    exact = batch.expected()
    torch.testing.assert_close(o.double(), torch.from_numpy(exact[0]), rtol=0.02, atol=0.03)
    torch.testing.assert_close(lse.double(), torch.from_numpy(exact[1]), rtol=0.01, atol=0.03)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single(rng, layout):
    batch = rotated(rng, CASES[0])
    q, k, v = (batch.tensor(x[0]) for x in (batch.q, batch.k, batch.v))
    if layout == "HND":
        k, v = (x.transpose(0, 1).contiguous() for x in (k, v))
    alone = Batch(torch, rng, batch.case, QO_LENS[:1], KV_LENS[:1])
    alone.q, alone.k, alone.v = (x[:1] for x in (batch.q, batch.k, batch.v))
    options = batch.case.options() | {"causal": True, "kv_layout": layout}
    scales = dict(zip(("scale_q", "scale_k", "scale_v"), SCALES))
    alone.check(
        *flashinfer.single_prefill_with_kv_cache(q, k, v, return_lse=True, **scales, **options)
    )
