# SPDX-License-Identifier: Apache-2.0
"""Problems of multi-head latent attention: values are the first dims of the keys. Memory that must
not be read holds NaN."""

import dataclasses

import ml_dtypes
import numpy as np

import flashplan as fp
import reference
from inputs import INT_MAX, SPARE_ROWS, indptr, lens_on_device, normal, poisoned

DIMS = (576, 512)
SCALE = 192**-0.5


@dataclasses.dataclass(frozen=True)
class MlaCase:
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int = 16
    dims: tuple[int, int] = DIMS
    page_size: int | None = 64
    q_dtype: str = "bfloat16"
    kv_dtype: str | None = None
    o_dtype: str | None = None
    causal: bool = True
    k_scale: float = 1.0
    pairs: str = ""  # "q", "k", "qk": which are given in two tensors
    # Of the cache: "" no dimension of heads, or one in the order "NHD" or "HND".
    heads: str = ""
    strided: bool = False
    csr: bool = False
    sinks: bool = False
    planned_lens: tuple[int, ...] | None = None
    num_ctas: int | None = None
    batch_invariant: bool = False
    gain: float = 1.0

    def __str__(self):
        default = MlaCase((), ())
        fields = (f.name for f in dataclasses.fields(self))
        changed = {n: getattr(self, n) for n in fields if getattr(self, n) != getattr(default, n)}
        texts = (f"{n}={v}" for n, v in changed.items())
        return "-".join(t.replace(" ", "").replace("float", "f") for t in texts)

    def options(self):
        return {
            "num_qo_heads": self.num_heads,
            "num_kv_heads": 1,
            "head_dim": self.dims,
            "shared_kv": True,
            "softmax_scale": SCALE,
            "page_size": self.page_size,
            "kv_layout": self.heads or "NHD",
            "q_dtype": self.q_dtype,
            "kv_dtype": self.kv_dtype,
            "o_dtype": self.o_dtype,
            "causal": self.causal,
            "max_batch_size": max(1, len(self.qo_lens)),
            "max_qo_tokens": max(1, sum(self.qo_lens)),
            "num_ctas": self.num_ctas,
            "batch_invariant": self.batch_invariant,
            "device": "cpu",
        }

    @property
    def stored_dtype(self):
        return self.kv_dtype or self.q_dtype


@dataclasses.dataclass
class MlaInputs:
    q: np.ndarray  # [tokens + spare rows, num_heads, dims]
    keys: list  # of each request, as they are stored: [kv_len, dims], or [kv_len, 656] bytes
    cache: np.ndarray  # [pages, page_size, dims], or ragged [tokens, dims]
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray | None
    tables: dict
    device_lens: np.ndarray | None
    sinks: np.ndarray | None


def ds_mla_rows(keys):
    """Keys [n, 576] as rows of DeepSeek's format: 512 e4m3, 4 float32 scales of 128 dims each, 64
    bfloat16."""
    content = keys[:, :512].astype(np.float32).reshape(-1, 4, 128)
    scales = np.maximum(np.abs(content).max(axis=2) / np.float32(448), np.float32(1e-4))
    scaled = (content / scales[..., None]).astype(ml_dtypes.float8_e4m3fn)
    parts = (scaled.reshape(-1, 512), scales, keys[:, 512:].astype(ml_dtypes.bfloat16))
    return np.concatenate([part.view(np.uint8) for part in parts], axis=1)


def real_keys(stored, k_scale=1.0):
    """Keys as float64 from what a cache stores."""
    if stored.dtype == np.uint8:
        content = np.ascontiguousarray(stored[:, :512]).view(ml_dtypes.float8_e4m3fn)
        scales = np.ascontiguousarray(stored[:, 512:528]).view(np.float32)
        tail = np.ascontiguousarray(stored[:, 528:]).view(ml_dtypes.bfloat16)
        # Float32, as the format is read; the product with an 8-bit float may round.
        content = content.astype(np.float32).reshape(-1, 4, 128) * scales[..., None]
        stored = np.concatenate([content.reshape(-1, 512), tail.astype(np.float32)], axis=1)
    return stored.astype(np.float64) * k_scale


def stored_keys(rng, case, count):
    keys = rng.standard_normal((count, case.dims[0]), np.float32)
    if case.kv_dtype == "fp8_ds_mla":
        keys *= np.exp2(rng.integers(-6, 7, (count, 1))).astype(np.float32)  # scales that differ
        keys /= np.abs(keys).max(axis=1, initial=1, keepdims=True) / 3
        return ds_mla_rows(keys)
    return keys.astype(case.stored_dtype)


def poisoned_rows(shape, case):
    """NaN everywhere, in any format."""
    if case.kv_dtype == "fp8_ds_mla":
        memory = np.full((*shape, 656 + 16 * case.strided), 0xFF, np.uint8)
        return memory[..., :656]
    return poisoned((*shape, case.dims[0]), case.stored_dtype, case.strided)


def make_mla_inputs(case, seed, keys=None):
    """`keys` [request] of [kv_len, dims], as they are stored; default: random ones."""
    rng = np.random.default_rng(seed)
    qo_indptr = indptr(case.qo_lens)
    total = qo_indptr[-1]
    q = poisoned((total + SPARE_ROWS, case.num_heads, case.dims[0]), case.q_dtype, case.strided)
    q[:total] = normal(rng, q[:total].shape, case.q_dtype, case.gain)
    if keys is None:
        keys = [stored_keys(rng, case, n) for n in case.kv_lens]
    planned = case.planned_lens or case.kv_lens
    inputs = MlaInputs(q, keys, None, qo_indptr, None, {}, lens_on_device(case, rng), None)
    if case.sinks:
        inputs.sinks = normal(rng, case.num_heads, np.float32, 3.0)
    if case.page_size is None:
        inputs.kv_indptr = indptr([n + 2 for n in planned])
        inputs.cache = poisoned_rows((inputs.kv_indptr[-1] + SPARE_ROWS,), case)
        for begin, rows in zip(inputs.kv_indptr, keys, strict=False):
            inputs.cache[begin : begin + len(rows)] = rows
        return inputs
    pages_of = [-(-n // case.page_size) for n in case.kv_lens]
    num_pages = sum(pages_of) + 3
    pages = rng.permutation(num_pages).astype(np.int32)
    inputs.cache = poisoned_rows((num_pages, case.page_size), case)
    columns = -(-max(planned, default=0) // case.page_size) + 1
    table = np.full((len(pages_of), columns), INT_MAX, np.int32)
    for r, (begin, n) in enumerate(zip(indptr(pages_of), pages_of, strict=False)):
        table[r, :n] = pages[begin : begin + n]
        for j, row in enumerate(keys[r]):
            inputs.cache[table[r, j // case.page_size], j % case.page_size] = row
    inputs.tables = {"block_table": table}
    if case.csr:
        inputs.tables = {"page_indptr": indptr(pages_of), "page_indices": pages}
    return inputs


def expected(case, inputs, keys=None, **options):
    """(o, lse, twin_o, twin_lse) of all requests; `keys`: float64 instead of the stored ones."""
    if keys is None:
        keys = [real_keys(rows, case.k_scale) for rows in inputs.keys]
    requests = [(k[:, None], k[:, None, : case.dims[1]]) for k in keys]
    options = {"causal": case.causal, "softmax_scale": SCALE, "sinks": inputs.sinks} | options
    arguments = (inputs.q, requests, inputs.qo_indptr)
    exact = reference.batch_attention(*arguments, **options)
    twin = reference.batch_attention(*arguments, **options, dtype=case.q_dtype)
    if case.kv_dtype == "fp8_ds_mla":
        # GPU kernels round the product of a number and its scale to the dtype of q.
        rounded = [k.astype(case.q_dtype).astype(np.float64) for k in keys]
        requests = [(k[:, None], k[:, None, : case.dims[1]]) for k in rounded]
        of_rounded = reference.batch_attention(inputs.q, requests, inputs.qo_indptr, **options)
        twin = [farther(*xs) for xs in zip(exact, twin, of_rounded, strict=True)]
    return (*exact, twin[0].astype(case.o_dtype or case.q_dtype), twin[1])


def farther(exact, a, b):
    """Of each element of a and b the one that is farther from the exact one."""
    with np.errstate(invalid="ignore"):  # -inf - -inf
        return np.where(np.abs(b - exact) > np.abs(a - exact), b, a)


def with_heads(tensor, heads, is_paged):
    """A view with a dimension for the one kv head, in the order `heads`."""
    if not heads:
        return tensor
    return np.expand_dims(tensor, 1 if heads == "HND" or not is_paged else 2)


def run_mla(case, inputs, attn=None, framework=None, **changes):
    """(o, lse) as NumPy arrays, from a plan and a run."""
    tensor = framework.tensor if framework else (lambda x: x)
    array = framework.array if framework else (lambda x: x)
    attn = attn or fp.Attention(**case.options())
    lengths = [inputs.qo_indptr, np.array(case.planned_lens or case.kv_lens, np.int32)]
    if inputs.kv_indptr is not None:
        lengths.append(inputs.kv_indptr)
    attn.plan(*lengths)
    arguments = {name: tensor(x) for name, x in inputs.tables.items()}
    for name, x in (("kv_lens", inputs.device_lens), ("sinks", inputs.sinks)):
        if x is not None:
            arguments[name] = tensor(x)
    q, k = mla_tensors(case, inputs, tensor)
    if case.k_scale != 1:
        arguments["k_scale"] = case.k_scale
    o, lse = attn.run(q, k, **arguments | {"return_lse": True} | changes)
    return array(o), array(lse)


def mla_tensors(case, inputs, tensor):
    """q and k as run() takes them."""

    def split(x, name, heads=""):
        content, is_paged = case.dims[1], case.page_size is not None
        if name not in case.pairs:
            return tensor(with_heads(x, heads, is_paged))
        parts = (np.array(x[..., :content]), x[..., content:])
        return tuple(tensor(with_heads(part, heads, is_paged)) for part in parts)

    return split(inputs.q, "q"), split(inputs.cache, "k", case.heads)


def assert_mla_correct(case, inputs, o, lse, wanted):
    exact_o, exact_lse, twin_o, twin_lse = wanted
    largest = max(
        (np.abs(real_keys(k, case.k_scale)).max(initial=0) for k in inputs.keys), default=0
    )
    assert np.array_equal(np.isneginf(lse), np.isneginf(exact_lse)), "rows without keys differ"
    assert np.all(o[np.isneginf(lse)] == 0)
    for begin, end in zip(inputs.qo_indptr, inputs.qo_indptr[1:], strict=False):
        rows = slice(begin, end)
        finite = np.where(np.isfinite(exact_lse[rows]), exact_lse[rows], 0)
        unit = 1 + np.abs(finite).max(initial=0)
        pairs = (("o", o, exact_o, twin_o, largest * unit), ("lse", lse, exact_lse, twin_lse, unit))
        for what, actual, exact, twin, size in pairs:
            empty = np.isneginf(exact[rows])
            reference.assert_close(
                np.where(empty, 0, actual[rows]).astype(actual.dtype),
                np.where(empty, 0, exact[rows]),
                np.where(empty, 0, twin[rows]),
                unit=size,
                what=f"{what} of rows from {begin} on",
            )
