# SPDX-License-Identifier: Apache-2.0
"""An attention problem, which tests and benchmarks both run."""

import dataclasses
import itertools

import ml_dtypes  # noqa: F401  (registers bfloat16 and float8 with NumPy)
import numpy as np

import flashplan as fp
from reference import visible_keys
from rope_cases import ROPES, rotation
from variant_cases import VARIANTS

SHORT_NAMES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


def _lens_id(lens):
    """A short text for lengths: "1x64" for sixty-four ones."""
    runs = [(n, len(list(same))) for n, same in itertools.groupby(lens)]
    text = "_".join(f"{n}x{times}" if times > 1 else f"{n}" for n, times in runs)
    return text if len(text) <= 32 else f"{len(lens)}lens{sum(lens)}"


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention problem: the options, the lengths, and how the tensors lie in memory."""

    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | tuple[int, int] = 64
    page_size: int | None = 16
    q_dtype: str = "bfloat16"
    kv_dtype: str | None = None
    o_dtype: str | None = None
    causal: bool = True
    window_left: int = -1
    softmax_scale: float | None = None
    softcap: float = 0.0
    kv_layout: str = "NHD"
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    # Scales in tensors besides: of "one" for all kv heads, or of the "heads".
    device_scales: str | None = None
    rope: str | None = None  # of rope_cases.py
    num_ctas: int | None = None
    batch_invariant: bool = False
    lse_base2: bool = False
    csr: bool = False  # page_indptr and page_indices, not block_table
    memory: str = "dense"  # "strided": gaps in every tensor; "combined": one [pages, 2, ...] cache
    gain: float = 1.0  # of q: large logits make a peaked softmax
    # ("k", value) sets one element of k in each request to this value; likewise "q" and "v". For
    # "sinks" it sets one sink. NaN has all bits set.
    special: tuple[tuple[str, float], ...] = ()
    # The lengths that plan() gets, upper bounds of kv_lens; run() then gets kv_lens on the device.
    planned_lens: tuple[int, ...] | None = None
    shared_prefixes: tuple[tuple[int, int, int], ...] = ()
    # "random": random bits; "tree": the mask of a random tree of draft tokens.
    custom_mask: str | None = None
    mask_begin: tuple[int, ...] | None = None
    sinks: bool | str = False  # a str: their dtype, not float32
    variant: str | None = None  # of variant_cases.py
    # Requests take their pages from a common pool, as the rows of a block-sparse mask do, or heads
    # that select pages.
    common_pages: bool = False
    # "hidden": page ids that no query sees are outside of the cache, or that of another page;
    # "missing": so are some that a query sees, and the keys of these pages are left out. The CPU
    # refuses them.
    page_ids: str | None = None

    def __str__(self):
        dims = self.head_dims
        parts = [
            SHORT_NAMES[self.q_dtype],
            self.kv_dtype and f"kv_{SHORT_NAMES[self.kv_dtype]}",
            self.o_dtype and f"o_{SHORT_NAMES[self.o_dtype]}",
            f"h{self.num_qo_heads}x{self.num_kv_heads}",
            f"d{dims[0]}" if dims[0] == dims[1] else f"d{dims[0]}x{dims[1]}",
            f"page{self.page_size}" if self.page_size else "ragged",
            self.kv_layout == "HND" and "HND",
            self.csr and "csr",
            self.common_pages and "common",
            self.page_ids and f"{self.page_ids}_ids",
            self.memory != "dense" and self.memory,
            "causal" if self.causal else "full",
            self.window_left >= 0 and f"window{self.window_left}",
            self.softmax_scale is not None and f"scale{self.softmax_scale:g}",
            self.softcap and f"cap{self.softcap:g}",
            self.variant,
            self.rope and f"rope_{self.rope}".replace(" ", "_"),
            self.q_scale != 1 and f"qs{self.q_scale:g}",
            self.k_scale != 1 and f"ks{self.k_scale:g}",
            self.v_scale != 1 and f"vs{self.v_scale:g}",
            self.device_scales and f"scales_of_{self.device_scales}",
            self.num_ctas and f"ctas{self.num_ctas}",
            self.batch_invariant and "invariant",
            self.lse_base2 and "base2",
            self.gain != 1 and f"gain{self.gain:g}",
            *(f"{name}={value:g}" for name, value in self.special),
            *("shared" + "_".join(map(str, group)) for group in self.shared_prefixes),
            f"qo{_lens_id(self.qo_lens)}",
            f"kv{_lens_id(self.kv_lens)}",
            self.planned_lens and f"planned{_lens_id(self.planned_lens)}",
            self.custom_mask and f"mask_{self.custom_mask}",
            self.mask_begin and f"from{_lens_id(self.mask_begin)}",
            self.sinks and ("sinks" if self.sinks is True else f"sinks_{self.sinks}"),
        ]
        return "-".join(part for part in parts if part)

    @property
    def head_dims(self):
        return self.head_dim if isinstance(self.head_dim, tuple) else (self.head_dim, self.head_dim)

    @property
    def cache_dtype(self):
        return self.kv_dtype or self.q_dtype

    @property
    def has_narrow_queries(self):
        return self.q_dtype.startswith("float8")

    @property
    def product_dtype(self):
        """The least precise dtype that products are computed in; queries of 8 bits are widened."""
        return "bfloat16" if self.has_narrow_queries else self.q_dtype

    @property
    def output_dtype(self):
        return self.o_dtype or self.product_dtype

    @property
    def flops(self):
        pairs = sum(self.visible(r).sum() for r in range(len(self.qo_lens)))
        return int(2 * sum(self.head_dims) * self.num_qo_heads * pairs)

    @property
    def kv_bytes(self):
        """Bytes of K and V that some query sees, each read once."""
        keys = sum(self.visible(r).any(axis=0).sum() for r in range(len(self.qo_lens)))
        item_size = np.dtype(self.cache_dtype).itemsize
        return int(keys * self.num_kv_heads * sum(self.head_dims) * item_size)

    def _lens(self):
        return zip(self.qo_lens, self.kv_lens, strict=True)

    def visible(self, request):
        """[qo_len, kv_len] of bool: whether a query may see a key, as far as plan() knows."""
        qo_len, kv_len = self.qo_lens[request], self.kv_lens[request]
        visible = visible_keys(qo_len, kv_len, self.causal, self.window_left)
        key_range = self.variant and VARIANTS[self.variant].variant._key_range
        if key_range:
            query, key = np.arange(qo_len) + kv_len - qo_len, np.arange(kv_len)
            begin, end = (bound[:, None] for bound in key_range(request, query, kv_len))
            visible &= (key >= begin) & (key < end)
        return visible

    def options(self):
        """Keyword arguments of flashplan.Attention."""
        names = (
            "num_qo_heads num_kv_heads head_dim page_size q_dtype kv_dtype o_dtype causal "
            "window_left softmax_scale softcap kv_layout num_ctas batch_invariant lse_base2"
        )
        return {name: getattr(self, name) for name in names.split()} | {
            "max_batch_size": max(1, len(self.qo_lens)),
            "max_qo_tokens": max(1, sum(self.qo_lens)),
            "custom_mask": self.custom_mask is not None,
            "variant": self.variant and VARIANTS[self.variant].variant,
            "rope": self.rope and fp.Rope(**ROPES[self.rope]),
            "device": "cpu",
        }

    @property
    def has_lse(self):
        return self.variant is None or VARIANTS[self.variant].softmax

    @property
    def first_masked_keys(self):
        """The first key of each request that its mask covers."""
        if self.mask_begin is not None:
            return self.mask_begin
        return tuple(kv_len - qo_len for qo_len, kv_len in self._lens())

    def reference_options(self):
        """Keyword arguments of reference.attention."""
        names = "causal window_left softmax_scale softcap"
        options = {name: getattr(self, name) for name in names.split()}
        options["rotate"] = self.rope and rotation(self.rope)
        if self.variant is None:
            return options
        own = VARIANTS[self.variant]
        return options | {"bodies": own.bodies, "uses_softmax": own.softmax}
