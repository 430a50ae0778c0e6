# SPDX-License-Identifier: Apache-2.0
"""A model of random weights with a byte-level tokenizer. Its texts are random bytes."""

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from export_smollm2 import write_json, write_safetensors

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("Ã", "©"), ("Ġ", "the"))  # "Ã©": é in bytes
MAX_TOKENS = 32768
CONFIG = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 272,  # some more than the tokenizer knows
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% if message.content == 'refuse me' %}{{ raise_exception('no') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [left + right for left, right in MERGES]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tiny_model(folder: Path) -> None:
    rng = np.random.default_rng(0)
    c = CONFIG
    hidden, ffn = c["hidden_size"], c["intermediate_size"]
    q_size, kv_size = c["num_attention_heads"] * c["head_dim"], hidden // 2

    def matrix(rows: int, columns: int) -> np.ndarray:
        return 2 * rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)

    ones = np.ones(hidden, np.float32)
    weights = {"model.embed_tokens": matrix(c["vocab_size"], hidden) * 2, "model.norm": ones}
    for i in range(c["num_hidden_layers"]):
        weights |= {
            f"model.layers.{i}.{name}": weight
            for name, weight in {
                "input_layernorm": ones,
                "self_attn.q_proj": matrix(q_size, hidden),
                "self_attn.k_proj": matrix(kv_size, hidden),
                "self_attn.v_proj": matrix(kv_size, hidden),
                "self_attn.o_proj": matrix(hidden, q_size),
                "post_attention_layernorm": ones,
                "mlp.gate_proj": matrix(ffn, hidden),
                "mlp.up_proj": matrix(ffn, hidden),
                "mlp.down_proj": matrix(hidden, ffn),
            }.items()
        }
    named = {f"{name}.weight": weight for name, weight in weights.items()}
    write_safetensors(folder / "model.safetensors", named)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(make_tokenizer().to_str())))
    write_json(folder / "tokenizer_config.json", {"chat_template": CHAT_TEMPLATE})
    write_json(folder / "config.json", CONFIG)
