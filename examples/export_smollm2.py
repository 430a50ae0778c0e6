# SPDX-License-Identifier: Apache-2.0
"""Writes SmolLM2-135M-Instruct as a folder of Hugging Face's format, which engine and server read:
config.json, model.safetensors, tokenizer.json, tokenizer_config.json.

python examples/export_smollm2.py build/smollm2
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

try:
    import gguf
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install --group serve") from None
import numpy as np

from smollm2_file import Tensors, find_weights, load_tokenizer, metadata

LAYER_NAMES = {  # in the file of GGUF, in that of safetensors
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        path = find_weights()
    except FileNotFoundError as error:
        parser.error(str(error))
    print(f"exporting {path.name} to {folder}")
    reader = gguf.GGUFReader(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = load_config(reader)
    write_safetensors(folder / "model.safetensors", load_weights(reader, config))
    load_tokenizer(reader).save(str(folder / "tokenizer.json"))
    template = {"chat_template": metadata(reader, "tokenizer.chat_template")}
    write_json(folder / "tokenizer_config.json", template)
    write_json(folder / "config.json", config)  # last: a folder that has it is complete


def load_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    def llama(key: str) -> Any:
        return metadata(reader, f"llama.{key}")

    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": llama("vocab_size"),
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": llama("attention.head_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "head_dim": llama("rope.dimension_count"),
        "max_position_embeddings": llama("context_length"),
        "rms_norm_eps": llama("attention.layer_norm_rms_epsilon"),
        "rope_theta": llama("rope.freq_base"),
        "tie_word_embeddings": True,
        "eos_token_id": metadata(reader, "tokenizer.ggml.eos_token_id"),
    }


def load_weights(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, np.ndarray]:
    tensors = Tensors(reader)
    weights = {
        "model.embed_tokens": tensors["token_embd"],
        "model.norm": tensors["output_norm"],
    }
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for i in range(config["num_hidden_layers"]):
        for name, exported in LAYER_NAMES.items():
            weight = tensors[f"blk.{i}.{name}"]
            if name in heads:
                weight = apart(weight, heads[name])
            weights[f"model.layers.{i}.{exported}"] = weight
    return {f"{name}.weight": weight for name, weight in weights.items()}


def apart(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Puts the two halves of each head one after the other. In GGUF the elements that RoPE rotates
    together are neighbours."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def write_safetensors(path: Path, weights: dict[str, np.ndarray]) -> None:
    """The length of the header in 8 bytes, the header, and the float32 weights."""
    header, end = {}, 0
    for name, weight in weights.items():
        begin, end = end, end + weight.nbytes
        header[name] = {"dtype": "F32", "shape": weight.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the engine can use the weights where they lie
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i, weight in enumerate(weights.values()):
            file.write(np.ascontiguousarray(weight, "<f4").data)
            if sys.stdout.isatty():
                print(f"\r{i + 1} of {len(weights)} tensors", end="")
    if sys.stdout.isatty():
        print()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces the file at once, so that nobody reads a part of it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(part, path)


if __name__ == "__main__":
    main()
