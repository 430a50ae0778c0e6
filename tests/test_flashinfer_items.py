# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's multi-item scoring: items behind a prefix, which do not see each other."""

import numpy as np
import pytest

from flashinfer_cases import Batch, Case, workspace

torch = pytest.importorskip("torch")

from flashplan import flashinfer  # noqa: E402

# Of each request, the tokens of its prefix and of its items, each of which ends with a separator.
PREFIXES, ITEMS, STRIDE = (7, 40), ((3, 1, 5), (2, 30)), 40
LENS = [prefix + sum(items) + len(items) for prefix, items in zip(PREFIXES, ITEMS)]


def item_mask(prefix, items):
    """[tokens, tokens]: which keys each token sees."""
    size = prefix + sum(items) + len(items)
    mask = np.zeros((size, size), bool)
    mask[:, :prefix] = True
    begin = prefix
    for length in items:
        mask[begin : begin + length, begin : begin + length] = True
        begin += length + 1
    return np.tril(mask)


def arguments():
    positions = np.zeros((2, STRIDE), np.int64)
    for row, items in zip(positions, ITEMS):
        numbers = [i for length in items for i in (*range(1, length + 1), 0)]
        row[: len(numbers)] = numbers
    flat = torch.from_numpy(positions.ravel())
    return {
        "prefix_len_ptr": torch.tensor(PREFIXES).to(torch.uint32),
        "token_pos_in_items_ptr": flat.to(torch.uint16),
        "token_pos_in_items_len": STRIDE,
        "max_item_len_ptr": torch.tensor([5, 30]).to(torch.uint16),
    }


def batch_of(rng, window, qo_lens=LENS):
    """Of the last tokens of each request."""
    case = Case(causal=True, mask="bool", page_size=5, window_left=window)
    batch = Batch(torch, rng, case, qo_lens, LENS)
    masks = [item_mask(*request) for request in zip(PREFIXES, ITEMS)]
    batch.masks = [mask[len(mask) - n :] for mask, n in zip(masks, qo_lens)]
    return batch


@pytest.mark.parametrize("qo_lens", [LENS, [5, 36]])
@pytest.mark.parametrize("window", [-1, 6])
def test_pages(rng, window, qo_lens):
    batch = batch_of(rng, window, qo_lens)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(torch))
    lengths = batch.ends(batch.qo_lens), *batch.page_table()
    shape = *batch.case.heads, 64, 5
    options = {"causal": True, "window_left": window, "q_data_type": torch.float32}
    wrapper.plan(*lengths, *shape, **options, **arguments())
    batch.check(*wrapper.run(batch.joined(batch.q), batch.pages(), return_lse=True))


def test_ragged_keys(rng):
    batch = batch_of(rng, -1)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(torch))
    ends, kv_ends = batch.ends(batch.qo_lens), batch.ends(batch.kv_lens)
    wrapper.plan(ends, kv_ends, *batch.case.heads, 64, q_data_type=torch.float32, **arguments())
    tensors = (batch.joined(x) for x in (batch.q, batch.k, batch.v))
    batch.check(*wrapper.run(*tensors, return_lse=True))


def test_one_request(rng):
    """Its prefix may be a number without dimensions, as FlashInfer's tests have it."""
    batch = batch_of(rng, -1)
    batch.qo_lens, batch.kv_lens = [LENS[1]], [LENS[1]]
    for name in ("q", "k", "v", "masks"):
        setattr(batch, name, getattr(batch, name)[1:])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(torch))
    given = arguments()
    given["prefix_len_ptr"] = given["prefix_len_ptr"][1]
    given["token_pos_in_items_ptr"] = given["token_pos_in_items_ptr"][STRIDE:]
    ends = batch.ends(batch.qo_lens), batch.ends(batch.kv_lens)
    wrapper.plan(*ends, *batch.case.heads, 64, q_data_type=torch.float32, **given)
    batch.check(wrapper.run(*(batch.joined(x) for x in (batch.q, batch.k, batch.v))))


@pytest.mark.parametrize("missing", ["prefix_len_ptr", "token_pos_in_items_ptr"])
def test_one_of_the_tensors_alone(missing):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(torch))
    ends = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{missing}: expected a tensor"):
        wrapper.plan(ends, ends, 4, 2, 64, **arguments() | {missing: None})
