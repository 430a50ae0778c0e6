# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's block-sparse attention with blocks of any sizes, against the reference."""

import numpy as np
import pytest

import reference
from flashinfer_cases import poisoned, workspace

torch = pytest.importorskip("torch")

import flashplan as fp  # noqa: E402
from flashplan import flashinfer  # noqa: E402

KV_HEADS, GROUP, QUERIES, KEYS, DIM = 2, 3, 19, 30, 64
ROWS = torch.tensor([[4, 10, 5], [1, 1, 17]])
COLUMNS = torch.tensor([[9, 1, 12, 8], [20, 3, 3, 4]])


def planned(blocks, **options):
    wrapper = flashinfer.sparse.VariableBlockSparseAttentionWrapper(workspace(torch))
    heads = KV_HEADS * GROUP, KV_HEADS, DIM
    arguments = {"q_data_type": torch.float32, **options}
    wrapper.plan(torch.from_numpy(blocks), ROWS, COLUMNS, *heads, **arguments)
    return wrapper


def test_variable_blocks(rng):
    blocks = rng.random((KV_HEADS, 3, 4)) < 0.5
    blocks[1, 1] = False  # queries that see nothing
    wrapper = planned(blocks, sm_scale=0.3, logits_soft_cap=5.0)
    q, k, v = (
        rng.standard_normal((heads, tokens, DIM)).astype(np.float32)
        for heads, tokens in ((KV_HEADS * GROUP, QUERIES), (KV_HEADS, KEYS), (KV_HEADS, KEYS))
    )
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    out, lse = poisoned(torch, *q.shape), poisoned(torch, *q.shape[:2])
    assert wrapper.run(*tensors, out=out, lse=lse) is out
    for kv_head, (rows, columns) in enumerate(zip(ROWS.numpy(), COLUMNS.numpy())):
        mask = blocks[kv_head].repeat(rows, 0).repeat(columns, 1)
        heads = slice(kv_head * GROUP, (kv_head + 1) * GROUP)
        exact, twin = (
            reference.attention(
                q[heads].swapaxes(0, 1),
                k[kv_head][:, None],
                v[kv_head][:, None],
                causal=False,
                mask=mask,
                softmax_scale=0.3,
                softcap=5.0,
                dtype=dtype,
            )
            for dtype in ("float64", "float32")
        )
        for name, got, i in (("o", out, 0), ("lse", lse / np.log2(np.e), 1)):
            actual = got[heads].transpose(0, 1).numpy()
            reference.assert_close(actual, exact[i], twin[i], unit=4, what=name)
    again, of_rows = wrapper.run_return_lse(*tensors)
    assert torch.equal(again, out)
    assert torch.equal(of_rows, lse)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"causal": True}, fp.UnsupportedError, "causal: expected none, got True"),
        ({"pos_encoding_mode": "ALIBI"}, fp.UnsupportedError, "pos_encoding_mode: expected 'NONE'"),
    ],
)
def test_options_that_are_not_supported(options, error, message):
    with pytest.raises(error, match=message):
        planned(np.ones((KV_HEADS, 3, 4), bool), **options)


def test_wrong_sizes():
    with pytest.raises(ValueError, match=r"block_mask_map: expected shape \[2, 3, 4\], got"):
        planned(np.ones((KV_HEADS, 4, 4), bool))
    wrapper = flashinfer.sparse.VariableBlockSparseAttentionWrapper(workspace(torch))
    blocks = torch.ones(KV_HEADS, 3, 4)
    with pytest.raises(ValueError, match=r"block_col_sz: expected equal sums .* got \[30, 26\]"):
        wrapper.plan(blocks, ROWS, torch.stack((COLUMNS[0], COLUMNS[1] - 1)), 6, 2, DIM)
