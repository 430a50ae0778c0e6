# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a small Llama. flashplan computes norms, rotations and activations, and the
array module multiplies matrices. The caller decides where keys and values are kept: `forward` gives
each layer's q, k and v to its `attend` function.

The code uses only what NumPy, CuPy and PyTorch have in common.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashplan as fp

Array = Any  # of the model's array module

# attend(layer, q [tokens, q_heads, d], k and v [tokens, kv_heads, d]) -> o, as q, in float32
Attend = Callable[[int, Array, Array, Array], Array]


@dataclass(frozen=True)
class Config:
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    eos_token: int
    trained_length: int  # positions that the model has seen in training


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; matrices are [in, out] float32."""

    attn_norm: Array  # [hidden]
    qkv: Array  # [hidden, (q_heads + 2 * kv_heads) * d]
    attn_output: Array  # [q_heads * d, hidden]
    ffn_norm: Array  # [hidden]
    gate_up: Array  # [hidden, 2 * ffn]
    down: Array  # [ffn, hidden]


@dataclass(frozen=True)
class Llama:
    """A model, in float32 but for q, k and v."""

    config: Config
    embedding: Array  # [vocab, hidden], also the output head
    layers: list[Layer]
    output_norm: Array  # [hidden]
    rope: fp.Rope
    xp: Any = np  # the array module that holds the weights
    kv_dtype: str = "float32"  # of q, k and v, as attention and the cache want them

    def forward(
        self, tokens: Sequence[int], positions: Sequence[int] | None, attend: Attend, rows: Any
    ) -> Array:
        """Logits [len(rows), vocab] of the chosen rows of a ragged batch.

        tokens, positions: of the new tokens of all requests, one after another. Without positions
            q and k are not rotated, as for an `attend` that does so itself.
        rows: which tokens need logits (an index array or a slice).
        """
        xp, c = self.xp, self.config
        num_tokens, num_qk_heads = len(tokens), c.num_qo_heads + c.num_kv_heads
        dtype = getattr(xp, self.kv_dtype)
        if positions is not None:
            positions = xp.asarray(np.array(positions, np.int32))
        hidden = self.embedding[xp.asarray(tokens)]
        x = fp.rmsnorm(hidden, self.layers[0].attn_norm, c.rms_eps)
        for i, layer in enumerate(self.layers):
            qkv = (x @ layer.qkv).reshape(num_tokens, num_qk_heads + c.num_kv_heads, c.head_dim)
            q, k = qkv[:, : c.num_qo_heads], qkv[:, c.num_qo_heads : num_qk_heads]
            if positions is not None:
                fp.apply_rope(q, k, positions, self.rope, out_q=q, out_k=k)
            o = attend(i, *(xp.asarray(x, dtype=dtype) for x in (q, k, qkv[:, num_qk_heads:])))
            x = o.reshape(num_tokens, -1) @ layer.attn_output
            fp.add_rmsnorm(x, hidden, layer.ffn_norm, c.rms_eps)  # hidden += x; x is its norm
            x = fp.silu_and_mul(x @ layer.gate_up) @ layer.down
            last = i + 1 == c.num_layers
            norm = self.output_norm if last else self.layers[i + 1].attn_norm
            fp.add_rmsnorm(x, hidden, norm, c.rms_eps)
        return x[rows] @ self.embedding.T


def random_llama(seed: int, vocab: int = 256) -> Llama:
    """A tiny model of random weights, which predicts nothing."""
    rng = np.random.default_rng(seed)
    c = Config(2, 4, 2, 16, 10000.0, 1e-5, eos_token=-1, trained_length=256)
    hidden, ffn = 32, 48

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns), np.float32) / np.float32(rows**0.5)

    ones = np.ones(hidden, np.float32)
    layers = [
        Layer(
            attn_norm=ones,
            qkv=2 * matrix(hidden, (c.num_qo_heads + 2 * c.num_kv_heads) * c.head_dim),
            attn_output=matrix(c.num_qo_heads * c.head_dim, hidden),
            ffn_norm=ones,
            gate_up=matrix(hidden, 2 * ffn),
            down=matrix(ffn, hidden),
        )
        for _ in range(c.num_layers)
    ]
    return Llama(c, matrix(vocab, hidden) * 4, layers, ones, fp.Rope(theta=c.rope_theta))
