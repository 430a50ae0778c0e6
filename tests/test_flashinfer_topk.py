# SPDX-License-Identifier: Apache-2.0
"""The largest elements of rows, and prompts beside decodes over pages, with FlashInfer's names."""

import pytest

from flashinfer_cases import Batch, Case, workspace

torch = pytest.importorskip("torch")

import flashplan as fp  # noqa: E402
from flashplan import flashinfer  # noqa: E402


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("tie_break", flashinfer.TopKTieBreak)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k(random, dtype, tie_break, is_sorted):
    x = torch.randint(-4, 4, (5, 40), generator=random).to(dtype)  # many are equal
    k = 17
    values, indices = flashinfer.top_k(x, k, is_sorted, tie_break=int(tie_break))
    assert values.dtype == dtype and indices.dtype == torch.int64
    assert torch.equal(x.gather(1, indices), values)
    for row, chosen in zip(x.tolist(), indices.tolist()):
        assert len(set(chosen)) == k
        expected = sorted(row, reverse=True)[:k]
        found = [row[i] for i in chosen]
        assert (found if is_sorted else sorted(found, reverse=True)) == expected
        last = [i for i, value in enumerate(row) if value == expected[-1]]
        tied = sorted(set(chosen) & set(last))
        if tie_break == flashinfer.TopKTieBreak.SMALL:
            assert tied == last[: len(tied)]
        elif tie_break == flashinfer.TopKTieBreak.LARGE:
            assert tied == last[len(last) - len(tied) :]


def test_top_k_of_wrong_arguments():
    x = torch.zeros(2, 5)
    assert flashinfer.topk.topk(x, 5, True)[0].shape == (2, 5)
    for k in (0, 6):
        with pytest.raises(ValueError, match=rf"^k: expected 1 to 5 .*, got {k}"):
            flashinfer.top_k(x, k)
    with pytest.raises(ValueError, match=r"^input: expected 2 dimensions, got shape \[5\]"):
        flashinfer.top_k(x[0], 1)
    with pytest.raises(fp.UnsupportedError, match="^tie_break: expected one of .*, got 3"):
        flashinfer.top_k(x, 1, tie_break=3)


def pages(batch):
    """(lengths of plan(), tensors of run())."""
    lengths = [batch.ends(batch.qo_lens), *batch.page_table()]
    return lengths, [batch.joined(batch.q), batch.pages()]


def test_prompts_beside_decodes(rng):
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(torch))
    assert not wrapper.is_cuda_graph_enabled
    shared = {"window_left": 6, "sm_scale": 0.3}
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), (1.5, 0.5, 2.0)))
    decodes = Batch(torch, rng, Case(**shared, scales=tuple(scales.values())), [1] * 3, [30, 4, 17])
    lengths, tensors = pages(decodes)
    for case in (Case(**shared, causal=True), Case(**shared), Case(**shared, mask="bool")) * 2:
        prompts = Batch(torch, rng, case, [7, 0, 3], [30, 5, 9])
        lengths_p, tensors_p = pages(prompts)
        wrapper.plan(*lengths_p, *lengths, 4, 2, 64, 5, q_data_type=torch.float32, **shared)
        masks = {f"{name}_p": x for name, x in prompts.mask_arguments().items()}
        options = {"causal_p": case.causal} | masks | scales
        for has_lse in (True, False):
            both = wrapper.run(*tensors_p, *tensors, return_lse=has_lse, **options)
            prompts.check(*both[0]) if has_lse else prompts.check(both[0])
            decodes.check(*both[1]) if has_lse else decodes.check(both[1])
        if masks:  # without it in the next run of the same plan
            o, _ = wrapper.run(*tensors_p, *tensors, causal_p=True, **scales)
            prompts.case, prompts.masks = Case(**shared, causal=True), None
            prompts.check(o)
    wrapper.end_forward()
