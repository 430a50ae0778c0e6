# SPDX-License-Identifier: Apache-2.0
"""Functions with FlashInfer's names that write pages, against loops."""

import pytest

torch = pytest.importorskip("torch")

from flashplan import flashinfer  # noqa: E402


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_append(layout, stacked, dtype):
    indptr = torch.tensor([0, 2, 2, 5], dtype=dtype)  # the second request gets no token
    page_indptr = torch.tensor([0, 2, 2, 3], dtype=dtype)
    pages = torch.tensor([3, 1, 0], dtype=dtype)
    last = torch.tensor([1, 1, 4], dtype=dtype)  # also 1 for the request without pages
    lens = flashinfer.get_seq_lens(page_indptr, last, 4)
    assert lens.tolist() == [5, 0, 4]
    requests, positions = flashinfer.get_batch_indices_positions(indptr, lens, 6)
    assert requests.tolist() == [0, 0, 2, 2, 2, -1]
    assert positions.tolist() == [3, 4, 1, 2, 3, 0]
    shape = (4, 2, 4, 2, 8) if layout == "NHD" else (4, 2, 2, 4, 8)
    cache = torch.full(shape, 7.0)
    k, v = torch.randn(2, 6, 2, 8)
    expected = cache.clone()
    for row, (request, position) in enumerate(zip(requests[:5], positions[:5], strict=True)):
        page = pages[page_indptr[request] + position // 4]
        for side, tensor in enumerate((k, v)):
            place = expected[page, side]
            (place if layout == "NHD" else place.transpose(0, 1))[position % 4] = tensor[row]
    given = cache if stacked else (cache[:, 0], cache[:, 1])
    flashinfer.append_paged_kv_cache(
        k, v, requests, positions, given, pages, page_indptr, last, layout
    )
    assert torch.equal(cache, expected)


def test_append_of_latent_keys():
    ckv, kpe = torch.randn(3, 16), torch.randn(3, 4)
    ckv_cache, kpe_cache = torch.zeros(3, 2, 16), torch.zeros(3, 2, 4)
    requests, positions = torch.tensor([0, 0, -1]), torch.tensor([1, 2, 0])
    page_indptr, pages = torch.tensor([0, 2]), torch.tensor([2, 0])
    flashinfer.append_paged_mla_kv_cache(
        ckv, kpe, requests, positions, ckv_cache, kpe_cache, pages, page_indptr, torch.tensor([1])
    )
    for new, cache in ((ckv, ckv_cache), (kpe, kpe_cache)):
        expected = torch.zeros_like(cache)
        expected[2, 1], expected[0, 0] = new[0], new[1]
        assert torch.equal(cache, expected)


def test_tokens_of_no_request():
    indptr = torch.zeros(1, dtype=torch.int32)
    requests, positions = flashinfer.get_batch_indices_positions(indptr, indptr[:0], 2)
    assert requests.tolist() == [-1, -1]
    assert positions.tolist() == [0, 0]


def test_results_are_written_to_the_given_tensors():
    outs = torch.full((2, 3), 7, dtype=torch.int32)
    results = flashinfer.get_batch_indices_positions(
        torch.tensor([0, 2]), torch.tensor([5]), 3, outs[0], outs[1]
    )
    assert outs.tolist() == [[0, 0, -1], [3, 4, 0]]
    assert [x.data_ptr() for x in results] == [outs[0].data_ptr(), outs[1].data_ptr()]


@pytest.mark.parametrize("shape", [(4, 3, 2, 8), (4, 2, 8), (2, 2, 2, 2, 2, 2)])
def test_cache_of_a_wrong_shape(shape):
    ints = torch.zeros(1, dtype=torch.int32)
    k = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="paged_kv_cache: expected .* got shape"):
        flashinfer.append_paged_kv_cache(k, k, ints, ints, torch.zeros(shape), ints, ints, ints)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2])
def test_keys_of_latent_attention(dtype):
    """Views with gaps, and a part that all heads share."""
    k_nope = torch.randn(3, 4, 20).to(dtype)[..., :16]
    k_rope, k = torch.randn(3, 1, 8).to(dtype), torch.zeros(3, 4, 24).to(dtype)
    flashinfer.concat_mla_k(k, k_nope, k_rope)
    expected = torch.cat((k_nope.float(), k_rope.float().expand(3, 4, 8)), -1)
    assert torch.equal(k.float(), expected)
    with pytest.raises(RuntimeError, match="k_rope: expected the dtype of k, .*, got torch.int32"):
        flashinfer.concat_mla_k(k, k_nope, k_rope.float().int())
