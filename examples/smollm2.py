# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a model of the demo."""

from typing import Any

import gguf
import numpy as np

import flashplan as fp
from llama import Array, Config, Layer, Llama
from smollm2_file import Tensors, metadata


def load_config(reader: gguf.GGUFReader) -> Config:
    return Config(
        num_layers=metadata(reader, "llama.block_count"),
        num_qo_heads=metadata(reader, "llama.attention.head_count"),
        num_kv_heads=metadata(reader, "llama.attention.head_count_kv"),
        head_dim=metadata(reader, "llama.rope.dimension_count"),
        rope_theta=metadata(reader, "llama.rope.freq_base"),
        rms_eps=metadata(reader, "llama.attention.layer_norm_rms_epsilon"),
        eos_token=metadata(reader, "tokenizer.ggml.eos_token_id"),
        trained_length=metadata(reader, "llama.context_length"),
    )


def load_model(reader: gguf.GGUFReader, xp: Any = np, kv_dtype: str = "float32") -> Llama:
    """The model with its weights in arrays of `xp`; see Llama."""
    config = load_config(reader)
    tensors = Tensors(reader)

    def vector(name: str) -> Array:
        return xp.asarray(tensors[name])

    def matrix(*names: str) -> Array:
        """The named [out, in] matrices side by side, as one [in, out]."""
        return xp.asarray(np.ascontiguousarray(np.concatenate([tensors[name] for name in names]).T))

    layers = [
        Layer(
            attn_norm=vector(f"blk.{i}.attn_norm"),
            qkv=matrix(f"blk.{i}.attn_q", f"blk.{i}.attn_k", f"blk.{i}.attn_v"),
            attn_output=matrix(f"blk.{i}.attn_output"),
            ffn_norm=vector(f"blk.{i}.ffn_norm"),
            gate_up=matrix(f"blk.{i}.ffn_gate", f"blk.{i}.ffn_up"),
            down=matrix(f"blk.{i}.ffn_down"),
        )
        for i in range(config.num_layers)
    ]
    return Llama(
        config,
        xp.asarray(tensors["token_embd"]),
        layers,
        vector("output_norm"),
        # GGUF stores Wq and Wk with their rows permuted so that pairs are neighbours.
        fp.Rope(theta=config.rope_theta, interleaved=True),
        xp,
        kv_dtype,
    )
