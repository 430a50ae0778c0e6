# SPDX-License-Identifier: Apache-2.0
"""Functions with FlashInfer's names that write pages, against loops."""

import pytest

torch = pytest.importorskip("torch")

from flashplan import flashinfer  # noqa: E402


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("stacked", [False, True])
def test_append(layout, stacked):
    indptr = torch.tensor([0, 2, 2, 5], dtype=torch.int32)  # the second request gets no token
    page_indptr = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    pages = torch.tensor([3, 1, 0], dtype=torch.int32)
    last = torch.tensor([1, 0, 4], dtype=torch.int32)
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
