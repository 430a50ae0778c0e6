# SPDX-License-Identifier: Apache-2.0
"""Variants of the tests: the source, the same in NumPy, and arguments."""

import dataclasses
from collections.abc import Callable

import numpy as np

import flashplan as fp


@dataclasses.dataclass(frozen=True)
class VariantCase:
    """`bodies` in NumPy take what those in C++ take, as arrays that broadcast, then the arguments
    as keywords. Elements are [tokens, dim] of a head, logits [queries, keys]."""

    variant: fp.Variant
    bodies: dict[str, Callable]
    arguments: Callable  # (case, rng) -> dict
    softmax: bool = True


def _block_range(request, query, kv_len):
    begin = np.maximum(query, 0) // 50 * 50
    return begin, np.where(query % 11 == 3, begin, begin + 50)


def _seen_prefixes(case, rng):
    lens = np.array(case.kv_lens, np.int32)
    return {"prefix": rng.integers(0, np.maximum(lens, 1) + 1).astype(np.int32)}


def _slopes(case, rng):
    return {"slopes": rng.uniform(0, 0.2, case.num_qo_heads).astype(np.float32)}


def _element_arguments(case, rng):
    return {
        "gains": rng.uniform(0.5, 1.5, max(case.head_dims)).astype(np.float32),
        "shifts": rng.integers(-2, 3, len(case.kv_lens) + 1, np.int32),
        "step": 0.25,
    }


_ELEMENTS = {
    "query": "return x * gains[dim] + step * (token % 3) + 0.125f * head;",
    "key": "return x * (token % 2 == 0 ? 1 : -1) + step * head + shifts[request];",
    "value": "if (dim % 2) return -x;\nreturn x + 0.5f * (token % 4) - head;",
    "output": "return abs(x) < 64 ? x * gains[dim] - step * token + head + shifts[request] : x;",
}
_ENDS = {
    "query": lambda x, request, token, head, dim, *, gains, shifts, step: (
        x * gains[dim] + step * np.fmod(token, 3) + 0.125 * head
    ),
    "output": lambda x, request, token, head, dim, *, gains, shifts, step: np.where(
        np.abs(x) < 64, x * gains[dim] - step * token + head + shifts[request], x
    ),
}
_LOGITS = (
    "float bias = slopes[qo_head] * (key - query);\n"
    "bias += 0.1f * sin(request + kv_head);\n"
    "return max(x, -8) + bias + min(qo_len, 3) * 0.5f - 0.01f * (kv_len - key);"
)
_MASK = "return key <= query - kv_len / 4 || key < prefix[request] || key == query;"


def _sigmoid(x, **_):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


VARIANTS = {
    "elements": VariantCase(
        fp.Variant(
            "elements",
            **_ELEMENTS,
            tensors={"gains": "float32", "shifts": "int32"},
            scalars={"step": 9.0},
        ),
        _ENDS
        | {
            "key": lambda x, request, token, head, dim, *, gains, shifts, step: (
                x * np.where(token % 2 == 0, 1, -1) + step * head + shifts[request]
            ),
            "value": lambda x, request, token, head, dim, **_: np.where(
                dim % 2, -x, x + 0.5 * (token % 4) - head
            ),
        },
        _element_arguments,
    ),
    # Only bodies that the sm90 kernels serve: those of keys and values they leave to sm80.
    "ends": VariantCase(
        fp.Variant(
            "ends",
            **{name: _ELEMENTS[name] for name in ("query", "output")},
            tensors={"gains": "float32", "shifts": "int32"},
            scalars={"step": 9.0},
        ),
        _ENDS,
        _element_arguments,
    ),
    "biased": VariantCase(
        fp.Variant("biased", logits=_LOGITS, tensors={"slopes": "float32"}),
        {
            "logits": lambda x, request, query, key, qo_head, kv_head, qo_len, kv_len, *, slopes: (
                np.maximum(x, -8)
                + slopes[qo_head] * (key - query)
                + 0.1 * np.sin(request + kv_head)
                + min(qo_len, 3) * 0.5
                - 0.01 * (kv_len - key)
            )
        },
        _slopes,
    ),
    "alibi": VariantCase(
        fp.variants.alibi,
        {
            "logits": lambda x, request, query, key, qo_head, *_, slopes: (
                x + slopes[qo_head] * (key - query)
            )
        },
        _slopes,
    ),
    # A bias that falls as the key grows, and depends on the request.
    "linear": VariantCase(
        fp.Variant(
            "linear",
            logits="return (request - (query - key) * slopes[qo_head] + x)\n"
            "  - (2 * key - kv_len) / 9.0;",
            tensors={"slopes": "float32"},
        ),
        {
            "logits": lambda x, request, query, key, qo_head, kv_head, qo_len, kv_len, *, slopes: (
                request - (query - key) * slopes[qo_head] + x - (2 * key - kv_len) / 9.0
            )
        },
        _slopes,
    ),
    "prefix_lm": VariantCase(
        fp.Variant("prefix_lm", mask=_MASK, tensors={"prefix": "int32"}),
        {
            "mask": lambda request, query, key, qo_head, kv_head, qo_len, kv_len, *, prefix: (
                (key <= query - kv_len // 4) | (key < prefix[request]) | (key == query)
            )
        },
        _seen_prefixes,
    ),
    # Queries see their block of 50 keys, some see none: so do some row tiles.
    "blocks": VariantCase(
        fp.Variant(
            "blocks",
            mask="return key / 50 == max(query, 0) / 50 && query % 11 != 3 && key % 7 != qo_head;",
            key_range=_block_range,
        ),
        {
            "mask": lambda request, query, key, qo_head, *_: (
                (key // 50 == np.maximum(query, 0) // 50) & (query % 11 != 3) & (key % 7 != qo_head)
            )
        },
        lambda case, rng: {},
    ),
    "sigmoid": VariantCase(
        fp.Variant(
            "sigmoid",
            logits="return 1 / (1 + exp(-(x + bias)));",
            mask="return (key + qo_head) % 5 != 0;",
            output="return x + (query_is_odd ? token % 2 : 0);",
            softmax=False,
            scalars={"bias": 0.0, "query_is_odd": 1.0},
        ),
        {
            "logits": lambda x, *_, bias: _sigmoid(x + bias),
            "mask": lambda request, query, key, qo_head, *_, bias: (key + qo_head) % 5 != 0,
            "output": lambda x, request, token, head, dim, *, bias: x + np.fmod(token, 2),
        },
        lambda case, rng: {"bias": -1.5},
        softmax=False,
    ),
}
