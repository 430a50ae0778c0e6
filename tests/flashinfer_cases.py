# SPDX-License-Identifier: Apache-2.0
"""Batches for the wrappers with FlashInfer's names, and what attention of them is in float64."""

import dataclasses
import math

import ml_dtypes  # noqa: F401  (registers dtypes with NumPy)
import numpy as np

import flashplan as fp
import reference
import rope_cases
from frameworks import Torch

POISON = float("nan")
WORKSPACE = 16 << 20


@dataclasses.dataclass(frozen=True)
class Case:
    """Options of a plan, as FlashInfer names them, and the shapes of the tensors."""

    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None
    mask: str | None = None  # "bool" or "packed"
    dtype: str = "float32"
    kv_dtype: str | None = None
    heads: tuple = (4, 2)
    dims: tuple = (64, 64)
    page_size: int = 5
    layout: str = "NHD"
    cache: str = "pair"  # or "one", or "tokens" of pages without a dimension of tokens
    scales: tuple = (None, None, None)  # of q, k and v
    index_dtype: str = "int32"

    def __str__(self):
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ",".join(changed) or "plain"

    def options(self):
        """Those that plan() and forward() take."""
        return {
            "pos_encoding_mode": self.pos_encoding_mode,
            "window_left": self.window_left,
            "logits_soft_cap": self.logits_soft_cap,
            "sm_scale": self.sm_scale,
            "rope_scale": self.rope_scale,
            "rope_theta": self.rope_theta,
        }


def alibi_slopes(num_heads):
    """Press et al.: 2^(-8 i / n) for n heads, a power of two, then every other one of 2 n."""
    n = 2 ** int(math.log2(num_heads))
    first = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    rest = [2 ** (-8 * i / (2 * n)) for i in range(1, 2 * n + 1)][::2]
    return np.array(first + rest[: num_heads - n])


class Batch:
    """Random requests of these lengths. Slots of the cache without a key hold NaN.

    `device` is a framework of frameworks.py, by default PyTorch on the CPU.
    """

    def __init__(self, torch, rng, case, qo_lens, kv_lens, device=None):
        self.torch, self.rng, self.case = torch, rng, case
        self.device = device or Torch(torch)
        self.qo_lens, self.kv_lens = list(qo_lens), list(kv_lens)
        kv_dtype = case.kv_dtype or case.dtype
        self.q = [self._normal(n, case.heads[0], case.dims[0], case.dtype) for n in qo_lens]
        self.k = [self._normal(n, case.heads[1], case.dims[0], kv_dtype) for n in kv_lens]
        self.v = [self._normal(n, case.heads[1], case.dims[1], kv_dtype) for n in kv_lens]
        self.masks = None
        if case.mask:
            sizes = zip(self.qo_lens, self.kv_lens)
            self.masks = [rng.random((qo_len, kv_len)) < 0.5 for qo_len, kv_len in sizes]
        self.sinks = None

    def _normal(self, tokens, heads, dim, dtype):
        return self.rng.standard_normal((tokens, heads, dim)).astype(np.dtype(dtype))

    def tensor(self, array):
        return self.device.tensor(np.ascontiguousarray(array))

    def integers(self, numbers):
        return self.tensor(np.array(numbers, self.case.index_dtype))

    def joined(self, parts):
        return self.tensor(np.concatenate(parts))

    def ends(self, lens):
        return self.integers(np.cumsum([0, *lens]))

    def page_table(self):
        """(page_indptr, page_indices, last_page_len). The last page length of a request without
        pages is 1, as SGLang has it."""
        size = self.case.page_size
        counts = [-(-n // size) for n in self.kv_lens]
        self.ids = self.rng.permutation(sum(counts) + 3)
        last = [(n - 1) % size + 1 if n else 1 for n in self.kv_lens]
        self.counts = counts
        return self.ends(counts), self.integers(self.ids[: sum(counts)]), self.integers(last)

    def pages(self):
        """The cache of the last page_table(), in the form that the case names."""
        size, case = self.case.page_size, self.case
        begins = np.cumsum([0, *self.counts])
        caches = []
        for parts, dim in zip((self.k, self.v), case.dims):
            cache = np.full((len(self.ids), size, case.heads[1], dim), POISON, np.float32)
            cache = cache.astype(parts[0].dtype)
            for begin, tokens in zip(begins, parts):
                for j, token in enumerate(tokens):
                    cache[self.ids[begin + j // size], j % size] = token
            caches.append(cache if case.layout == "NHD" else cache.swapaxes(1, 2))
        if case.cache == "tokens":
            assert size == 1
            return tuple(self.tensor(x.squeeze(1 if case.layout == "NHD" else 2)) for x in caches)
        k, v = (self.tensor(x) for x in caches)
        return self.torch.stack((k, v), 1) if case.cache == "one" else (k, v)

    def mask_arguments(self):
        if self.masks is None:
            return {}
        if self.case.mask == "bool":
            flat = np.concatenate([mask.ravel() for mask in self.masks])
            return {"custom_mask": self.tensor(flat.astype(np.uint8)).bool()}
        packed = [np.packbits(mask.ravel(), bitorder="little") for mask in self.masks]
        return {"packed_custom_mask": self.tensor(np.concatenate(packed))}

    def shape_arguments(self):
        """The arguments of plan() after the lengths, but for page_size."""
        case, torch = self.case, self.torch
        dtypes = {"q_data_type": getattr(torch, case.dtype)}
        if case.kv_dtype:
            dtypes["kv_data_type"] = getattr(torch, case.kv_dtype)
        return dtypes

    def scales(self):
        names = ("q_scale", "k_scale", "v_scale")
        return {name: x for name, x in zip(names, self.case.scales) if x is not None}

    def expected(self, dtype="float64", **changed):
        """(o, lse to base 2) of all rows; `changed` are options of reference.attention."""
        case = self.case
        q_scale, k_scale, v_scale = (1.0 if x is None else x for x in case.scales)
        options = {
            "causal": case.causal and not case.mask,
            "window_left": case.window_left,
            "softcap": case.logits_soft_cap or 0.0,
            "softmax_scale": case.sm_scale,
            "k_scale": q_scale * k_scale,
            "v_scale": v_scale,
            "sinks": self.sinks,
        }
        if case.pos_encoding_mode == "ROPE_LLAMA":
            rope = fp.Rope(theta=case.rope_theta or 1e4, scale=case.rope_scale or 1.0)
            options["rotate"] = lambda x, positions: rope_cases.rotated(x, positions, rope)
        if case.pos_encoding_mode == "ALIBI":
            slopes = alibi_slopes(case.heads[0])

            def biased(x, request, query, key, qo_head, *_):
                return x + slopes[qo_head] * (key - query)

            options["bodies"] = {"logits": biased}
        o, lse = reference.batch_attention(
            np.concatenate(self.q),
            list(zip(self.k, self.v)),
            np.cumsum([0, *self.qo_lens]),
            self.masks,
            dtype=dtype,
            **(options | changed),
        )
        return o, lse / math.log(2)

    def check(self, o, lse=None, base2=True, **changed):
        """Tensors o [tokens, heads, dim] and lse [tokens, heads]."""
        exact = self.expected(**changed)
        twin = self.expected(self.case.dtype, **changed)
        unit = max(float(np.abs(v.astype(np.float32)).max(initial=0)) for v in self.v)
        scale = self.case.scales[2] or 1.0
        reference.assert_close(
            self.device.array(o), exact[0], twin[0], unit=unit * 4 * scale, what="o"
        )
        if lse is None:
            return
        factor = 1.0 if base2 else math.log(2)
        largest = np.abs(np.where(np.isfinite(exact[1]), exact[1], 0)).max(initial=1)
        reference.assert_close(
            self.device.array(lse), exact[1] * factor, twin[1] * factor, unit=largest, what="lse"
        )


def workspace(torch, device="cpu"):
    """Poisoned."""
    return torch.full((WORKSPACE,), 0xFF, dtype=torch.uint8, device=device)


def poisoned(torch, *shape):
    return torch.full(shape, POISON)
