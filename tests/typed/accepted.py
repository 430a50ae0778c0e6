# SPDX-License-Identifier: Apache-2.0
"""A user's program: type checkers accept it and infer what it says, and it runs."""

import sys
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

import flashplan as fp

if sys.version_info >= (3, 11):
    from typing import assert_type
elif TYPE_CHECKING:
    from typing_extensions import assert_type

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


def with_latents() -> None:
    attn = fp.Attention(
        4,
        1,
        (12, 8),
        shared_kv=True,
        softmax_scale=0.1,
        page_size=4,
        q_dtype="float32",
        device="cpu",
    )
    attn.plan([0, 1], [3])
    cache: Floats = np.zeros((2, 4, 12), np.float32)
    q: Floats = np.ones((1, 4, 12), np.float32)
    slots, table = np.arange(4), np.zeros((1, 1), np.int32)
    fp.append_mla(q[0, :, :8].copy(), q[0, :, 8:].copy(), cache, slot_mapping=slots)
    assert_type(attn.run(q, cache, block_table=table), Floats)
    pair = (q[..., :8], q[..., 8:])
    assert_type(attn.run(pair, (cache[..., :8], cache[..., 8:]), block_table=table), Floats)
    assert_type(fp.gather_mla(cache, table, np.array([0, 2], np.int32)), Floats)


def with_numpy() -> None:
    attn = fp.Attention(
        4, 2, 8, page_size=None, q_dtype="float32", o_dtype=np.dtype("float32"), device="cpu"
    )
    qo_indptr: npt.NDArray[np.int64] = np.cumsum([0, 1, 2])
    assert_type(attn.plan(qo_indptr, [3, 4]).describe(), str)
    q: Floats = np.ones((3, 4, 8), np.float32)
    kv: Floats = np.ones((7, 2, 8), np.float32)
    assert_type(attn.run(q, kv, kv), Floats)
    o, lse = attn.run(q, kv, kv, return_lse=True)
    assert_type(o, Floats)
    assert_type(lse, Floats)
    assert_type(attn.run(q, kv, kv, out=o, lse=lse, k_scale=0.5), Floats)
    assert_type(attn.run(q, kv, kv, k_scale=np.ones(1, np.float32), v_scale=0.5), Floats)
    assert_type(attn.run(q, kv, kv, sinks=np.zeros(4, np.float32)), Floats)
    call = attn.bind(q, kv, kv, out=o)
    assert_type(call(), Floats)
    assert_type(call(stream=None), Floats)
    assert_type(attn.bind(q, kv, kv, return_lse=True)(), tuple[Floats, Floats])
    assert_type(fp.merge_states(o, lse, o.copy(), lse.copy()), tuple[Floats, Floats])
    assert_type(fp.pack_mask([[True, False]]), npt.NDArray[np.uint32])
    fp.pack_mask(np.ones((2, 3), np.bool_))
    fp.check_device_data(attn, kv_lens=np.array([3, 4], np.int32))
    assert_type(fp.apply_rope(q, q[:, :2], np.arange(3), fp.Rope()), tuple[Floats, Floats])
    assert_type(fp.quantize_fp8(q, per_head=True), tuple[Floats, Floats])
    logits: Floats = np.zeros((2, 5), np.float32)
    tokens = fp.sample(logits, top_k=np.array([1, 3], np.int32), seed=1)
    assert_type(tokens, Ints)
    assert_type(fp.sample(logits, return_logprobs=True), tuple[Ints, Floats])
    listed = fp.sample(logits, joint=True, top_logprobs=3, logprobs_of="raw")
    assert_type(listed, tuple[Ints, Floats, Ints, Floats])
    assert_type(fp.filtered_probs(logits, top_p=0.5), Floats)
    assert_type(fp.top_k_renorm(fp.softmax(logits), 3), Floats)
    assert_type(fp.top_p_renorm(fp.softmax(logits), 0.5), Floats)
    assert_type(fp.top_k_mask(logits, 3), Floats)
    assert_type(fp.softmax(logits), Floats)
    assert_type(fp.softmax(logits, 0.5, logits), Floats)
    probs: Floats = np.full((1, 2, 5), 0.2, np.float32)
    verified = fp.speculative_verify(tokens[:1, None], probs[:, :1], probs, seed=1)
    assert_type(verified, tuple[Ints, Ints])
    looked_up = fp.speculative_verify(tokens[:1, None], None, probs)
    assert_type(looked_up, tuple[Ints, Ints])
    fp.apply_penalties(fp.softmax(logits), tokens[:, None], np.ones(2, np.int32), 1.5)
    with_latents()
    assert_type(attn.workspace_bytes, int)
    assert_type(fp.workspace_bytes(4, 2, 8, device="cpu"), int)
    assert_type(fp.is_supported(4, 2, (8, 16), q_dtype=np.float32, device="cpu"), tuple[bool, str])
    assert fp.Attention(**attn.options).workspace_bytes == attn.workspace_bytes


def with_torch() -> None:
    attn = fp.Attention(
        4,
        2,
        8,
        page_size=4,
        q_dtype=torch.float32,
        kv_dtype="float8_e4m3fn",
        device=torch.device("cpu"),
        workspace=torch.zeros(1 << 22, dtype=torch.uint8),
    )
    attn.plan(torch.tensor([0, 1, 3]), torch.tensor([1, 2]))
    q = torch.ones(3, 4, 8)
    cache = torch.zeros(2, 4, 2, 8).to(torch.float8_e4m3fn)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    lens = torch.tensor([1, 2], dtype=torch.int32)
    new = torch.ones(3, 2, 8)
    fp.append_paged_kv(
        new,
        new,
        cache,
        cache.clone(),
        torch.tensor([0, 1, 3], dtype=torch.int32),
        lens,
        block_table=table,
        kv_layout="NHD",
        kv_dtype="float8_e4m3fn",
    )
    assert_type(attn.run(q, cache, cache, block_table=table), torch.Tensor)
    out = torch.empty(3, 4, 8)
    assert_type(attn.run(q, cache, cache, block_table=table, out=out), torch.Tensor)
    assert_type(attn.bind(q, cache, cache, block_table=table)(), torch.Tensor)
    both = attn.run(q, cache, cache, block_table=table, return_lse=True)
    assert_type(both, tuple[torch.Tensor, torch.Tensor])
    logits = torch.zeros(2, 5)
    assert_type(fp.sample(logits, seed=torch.arange(2)), torch.Tensor)
    assert_type(fp.sample(logits, return_logprobs=True), tuple[torch.Tensor, torch.Tensor])
    assert_type(fp.softmax(logits, out=torch.empty(2, 5)), torch.Tensor)


def with_variants() -> None:
    x: Floats = np.ones((1, 4, 8), np.float32)
    doubled = fp.Variant("doubled", value="return 2 * x;", tensors={"t": "int32"}, scalars={"s": 1})
    assert_type(doubled, fp.Variant)
    assert_type(fp.variants.sink_tokens(4), fp.Variant)
    fp.Variant("v", mask="return true;", key_range=lambda request, query, kv_len: (0, query + 1))
    if TYPE_CHECKING:  # where there may be no compiler
        attn = fp.Attention(4, 4, 8, page_size=None, device="cpu", variant=doubled)
        assert_type(attn.run(x, x, x, t=np.zeros(1, np.int32), s=2.0), Floats)


def errors() -> str:
    try:
        fp.Attention(4, 2, 8, device="cpu", workspace=np.zeros(1, np.uint8))
    except (fp.UnsupportedError, fp.CudaError, ValueError) as error:
        return str(error)
    return fp.show_config()


if __name__ == "__main__":
    with_numpy()
    with_torch()
    with_variants()
    errors()
