# SPDX-License-Identifier: Apache-2.0
"""An attention backend for an engine that describes its steps as vLLM does."""

import dataclasses

import torch

import flashplan as fp

# --8<-- [start:backend]


@dataclasses.dataclass
class Metadata:
    """A step, as vLLM's CommonAttentionMetadata describes it."""

    query_start_loc_cpu: torch.Tensor  # [num_reqs + 1] int32, on the host
    seq_lens_cpu_upper_bound: torch.Tensor  # [num_reqs] int32, on the host: with the new tokens
    seq_lens: torch.Tensor  # [num_reqs] int32, on the device: the real lengths
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32, on the device
    slot_mapping: torch.Tensor  # [num_tokens] int64, on the device


class Backend:
    """Of all layers with the same heads and the same sliding window."""

    def __init__(self, num_heads, num_kv_heads, head_size, scale, sliding_window, engine):
        self.attn = fp.Attention(
            num_heads,
            num_kv_heads,
            head_size,
            page_size=engine.block_size,
            q_dtype=engine.dtype,
            softmax_scale=scale,
            window_left=-1 if sliding_window is None else sliding_window - 1,
            max_batch_size=engine.max_num_seqs,
            max_qo_tokens=engine.max_num_batched_tokens,
            device=engine.device,
        )

    def build(self, metadata):
        """Once per step, before its first layer."""
        self.attn.plan(metadata.query_start_loc_cpu, metadata.seq_lens_cpu_upper_bound)

    def forward(self, query, key, value, kv_cache, metadata, output):
        """Once per layer. The cache is [blocks, 2, block_size, num_kv_heads, head_size]."""
        k_cache, v_cache = kv_cache.unbind(1)
        fp.append_paged_kv(key, value, k_cache, v_cache, slot_mapping=metadata.slot_mapping)
        self.attn.run(
            query,
            k_cache,
            v_cache,
            block_table=metadata.block_table,
            kv_lens=metadata.seq_lens,
            out=output,
        )


# --8<-- [end:backend]


@dataclasses.dataclass
class Engine:
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    device: str = "cpu"


def dense(q, k, v, window):
    """Attention of one request in PyTorch, where the last query is at the last key."""
    positions = torch.arange(len(k))
    distances = positions[len(k) - len(q) :, None] - positions
    seen = (distances >= 0) & (distances < window)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.2)
    return o.transpose(0, 1)


torch.manual_seed(0)
WINDOW = 20
backend = Backend(8, 2, 64, 0.2, WINDOW, Engine())
kv_cache = torch.zeros(12, 2, 16, 2, 64)
blocks = [[7, 2, 5], [0, 9, 1]]  # of two requests
keys, values = ([torch.empty(0, 2, 64) for _ in blocks] for _ in "kv")
for new_tokens in ([30, 5], [1, 10], [1, 1]):  # two prompts; a decode and a chunk; two decodes
    num_tokens = sum(new_tokens)
    q, k, v = (torch.randn(num_tokens, heads, 64) for heads in (8, 2, 2))
    lens, slots = [], []
    for r, (new_k, new_v) in enumerate(zip(k.split(new_tokens), v.split(new_tokens))):
        span = range(len(keys[r]), len(keys[r]) + len(new_k))
        slots += [blocks[r][i // 16] * 16 + i % 16 for i in span]
        keys[r], values[r] = torch.cat([keys[r], new_k]), torch.cat([values[r], new_v])
        lens.append(span.stop)
    step = Metadata(
        torch.tensor([0, *new_tokens]).cumsum(0).int(),
        torch.tensor(lens, dtype=torch.int32) + 3,  # drafts of the last step that may be accepted
        torch.tensor(lens, dtype=torch.int32),
        torch.tensor(blocks, dtype=torch.int32),
        torch.tensor(slots),
    )
    output = torch.empty_like(q)
    backend.build(step)
    backend.forward(q, k, v, kv_cache, step, output)
    for r, rows in enumerate(q.split(new_tokens)):
        expected = dense(rows, keys[r], values[r], WINDOW)
        assert torch.allclose(output.split(new_tokens)[r], expected, atol=1e-5)
