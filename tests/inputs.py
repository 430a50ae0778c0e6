# SPDX-License-Identifier: Apache-2.0
"""Random tensors for a Case. Memory that must not be read holds NaN, or INT_MAX in a page table."""

import dataclasses
import itertools

import numpy as np

import flashplan as fp
import reference
from variant_cases import VARIANTS

INT_MIN, INT_MAX = np.iinfo(np.int32).min, np.iinfo(np.int32).max
SPARE_ROWS = 3  # tensors may have more rows than the plan


@dataclasses.dataclass
class Inputs:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    qo_indptr: np.ndarray
    kv_lens: np.ndarray
    planned_lens: np.ndarray  # for plan()
    kv_indptr: np.ndarray | None  # ragged only
    block_table: np.ndarray | None = None
    page_indptr: np.ndarray | None = None
    page_indices: np.ndarray | None = None
    device_lens: np.ndarray | None = None  # the argument kv_lens of run()
    shared_prefixes: np.ndarray | None = None
    mask: np.ndarray | None = None
    mask_begin: np.ndarray | None = None
    sinks: np.ndarray | None = None
    variant_arguments: dict | None = None
    # [1] or [num_kv_heads] each; None: those of the case.
    q_scales: np.ndarray | None = None  # with queries of 8 bits
    k_scales: np.ndarray | None = None
    v_scales: np.ndarray | None = None
    # Of each request, where the table has other page ids: its pages, and whether a page is missing.
    own_pages: list | None = None
    missing_pages: list | None = None
    k_tail: np.ndarray | None = None  # the last dims of k, if they are in a tensor of their own

    def plan_args(self):
        lengths = (self.qo_indptr, self.planned_lens)
        return lengths if self.kv_indptr is None else (*lengths, self.kv_indptr)

    def plan_options(self):
        options = {"shared_prefixes": self.shared_prefixes, "mask_begin": self.mask_begin}
        return {name: x for name, x in options.items() if x is not None}

    def masks(self, case):
        """[qo_len, kv_len] of bool of each request; None: there is no mask."""
        if self.mask is None and self.missing_pages is None:
            return None
        masks = [np.ones(lens, bool) for lens in zip(case.qo_lens, case.kv_lens, strict=True)]
        if self.mask is not None:
            spans = zip(self.qo_indptr, self.qo_indptr[1:], case.first_masked_keys, case.kv_lens)
            masks = [
                reference.unpacked_mask(self.mask[begin:end], first, kv_len)
                for begin, end, first, kv_len in spans
            ]
        for mask, missing in zip(masks, self.missing_pages or [], strict=False):
            mask &= ~np.repeat(missing, case.page_size)[: mask.shape[1]]
        return masks

    def tables(self):
        names = ("block_table", "page_indptr", "page_indices")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def other_tensors(self):
        """Arguments of run() besides q, k and v."""
        own = self.variant_arguments or {}
        tensors = {name: x for name, x in own.items() if isinstance(x, np.ndarray)}
        others = {"kv_lens": self.device_lens, "mask": self.mask, "sinks": self.sinks} | tensors
        others["k_tail"] = self.k_tail
        return self.tables() | {name: x for name, x in others.items() if x is not None}

    def scales(self, case):
        """The arguments q_scale, k_scale and v_scale of run()."""
        names = ("q_scale", "k_scale", "v_scale")[0 if case.has_narrow_queries else 1 :]
        if self.k_scales is None:
            return {name: getattr(case, name) for name in names}
        return {name: getattr(self, f"{name}s") for name in names}

    def pages(self, request):
        if self.own_pages is not None:
            return self.own_pages[request]
        return self.given_pages(request)

    def given_pages(self, request):
        if self.block_table is not None:
            return self.block_table[request]
        return self.page_indices[self.page_indptr[request] :]

    def requests(self, kv_layout):
        """The dense (k, v) of each request, gathered."""
        if self.kv_indptr is not None:
            spans = zip(self.kv_indptr, self.kv_lens, strict=False)
            return [(self.k[a : a + n], self.v[a : a + n]) for a, n in spans]
        return [
            tuple(
                reference.gather_pages(cache, self.pages(r), n, kv_layout)
                for cache in (self.k, self.v)
            )
            for r, n in enumerate(self.kv_lens)
        ]


def copy_request(source, r, target, to, kv_layout):
    """Gives request `to` of `target` the queries, keys and values of request `r` of `source`."""
    begin, end = target.qo_indptr[to : to + 2]
    target.q[begin:end] = source.q[slice(*source.qo_indptr[r : r + 2])]
    k, v = source.requests(kv_layout)[r]
    for cache, tokens in ((target.k, k), (target.v, v)):
        if target.kv_indptr is None:
            reference.append_pages(cache, tokens, target.pages(to), len(tokens), kv_layout)
        else:
            row = target.kv_indptr[to]
            cache[row : row + len(tokens)] = tokens


def rearranged(case, inputs, lens, places, seed):
    """(batch, inputs): requests of `lens` [(qo_len, kv_len)], request r of `case` at places[r]."""
    batch = dataclasses.replace(
        case,
        qo_lens=tuple(qo for qo, _ in lens),
        kv_lens=tuple(kv for _, kv in lens),
        planned_lens=None,
        custom_mask=None,
        mask_begin=None,
    )
    target = make_inputs(batch, seed)
    for name in ("sinks", "q_scales", "k_scales", "v_scales"):
        setattr(target, name, getattr(inputs, name))
    for r, to in enumerate(places):
        copy_request(inputs, r, target, to, case.kv_layout)
    return batch, target


def indptr(lens):
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def poisoned(shape, dtype, strided=False):
    """NaN everywhere; `strided` leaves gaps round every dimension but the first and the last."""
    if not strided:
        return np.full(shape, np.nan, dtype)
    *outer, last = shape
    gaps = [outer[0], *(n + 1 for n in outer[1:]), last + 5]
    view = np.full(gaps, np.nan, dtype)
    return view[(slice(None), *(slice(n) for n in outer[1:]), slice(last))]


def plant(case, name, rng, tokens):
    """Writes the special value of tensor `name` to a random element of one request."""
    for tensor, value in case.special:
        if tensor == name and tokens.size:
            at = tuple(rng.integers(n) for n in tokens.shape)
            all_bits = np.full(tokens.dtype.itemsize, 0xFF, np.uint8).view(tokens.dtype)[0]
            tokens[at] = all_bits if np.isnan(value) else value


def normal(rng, shape, dtype, gain=1.0):
    return (gain * rng.standard_normal(shape, np.float32)).astype(dtype)


def lens_on_device(case, rng):
    """kv_lens, or other lengths with the same meaning: above the planned ones, or negative."""
    if case.planned_lens is None:
        return None
    lens = np.array(case.kv_lens, np.int32)
    beyond = rng.choice([0, 1, 5000], lens.shape)
    lens += np.where(lens == case.planned_lens, beyond, 0).astype(np.int32)
    return np.where(lens == 0, -beyond, lens).astype(np.int32)


def random_tree(rng, size):
    """[size, size] of bool: each node of a random tree sees itself and its ancestors."""
    seen = np.eye(size, dtype=bool)
    for node in range(1, size):
        seen[node] |= seen[rng.integers(node)]
    return seen


def random_mask(case, rng):
    """The words of a mask; bits that belong to no key are random."""
    if case.custom_mask is None:
        return None
    planned_lens = case.planned_lens or case.kv_lens
    needed = [
        kv_len - first if case.mask_begin else qo_len
        for qo_len, kv_len, first in zip(case.qo_lens, planned_lens, case.first_masked_keys)
    ]
    rows, width = sum(case.qo_lens) + SPARE_ROWS, -(-max([*needed, 0]) // 32)
    gap = 3 if case.memory == "strided" else 0
    words = rng.integers(2**32, size=(rows, width + gap), dtype=np.uint32)[:, :width]
    if case.custom_mask == "tree":
        for row, qo_len in zip(indptr(case.qo_lens), case.qo_lens, strict=False):
            tree = fp.pack_mask(random_tree(rng, min(qo_len, 32 * width)))
            words[row : row + len(tree), : tree.shape[1]] = tree
    return words


def add_other_tensors(case, rng, inputs):
    inputs.device_lens, inputs.mask = lens_on_device(case, rng), random_mask(case, rng)
    if case.mask_begin is not None:
        inputs.mask_begin = np.array(case.mask_begin, np.int32)
    if case.sinks:
        dtype = "float32" if case.sinks is True else case.sinks
        inputs.sinks = normal(rng, case.num_qo_heads, dtype, 3.0)
        plant(case, "sinks", rng, inputs.sinks)
    if case.variant is not None:
        inputs.variant_arguments = VARIANTS[case.variant].arguments(case, rng)
    if case.device_scales:
        count = case.num_kv_heads if case.device_scales == "heads" else 1
        inputs.k_scales, inputs.v_scales = rng.uniform(0.3, 2, (2, count)).astype(np.float32)
        if case.has_narrow_queries:
            inputs.q_scales = rng.uniform(0.3, 2, count).astype(np.float32)


def make_inputs(case, seed):
    rng = np.random.default_rng(seed)
    qo_indptr = indptr(case.qo_lens)
    total = int(qo_indptr[-1])
    strided = case.memory == "strided"

    q = poisoned((total + SPARE_ROWS, case.num_qo_heads, case.head_dims[0]), case.q_dtype, strided)
    q[:total] = normal(rng, q[:total].shape, case.q_dtype, case.gain)
    for begin, end in itertools.pairwise(qo_indptr):
        plant(case, "q", rng, q[begin:end])
    kv_lens = np.array(case.kv_lens, np.int32)
    planned_lens = np.array(case.planned_lens or case.kv_lens, np.int32)
    lens = (qo_indptr, kv_lens, planned_lens)
    if case.page_size is None:
        inputs = _ragged(case, rng, q, *lens)
        add_other_tensors(case, rng, inputs)
        return inputs

    pages_of = [-(-n // case.page_size) for n in case.kv_lens]
    num_pages = sum(pages_of) + 4
    pages = rng.permutation(num_pages).astype(np.int32)
    if case.common_pages:
        lists = [rng.choice(num_pages, n, replace=False) for n in pages_of]
        pages = np.concatenate(lists).astype(np.int32)
    k, v = _empty_cache(case, num_pages)
    # On a GPU the table needs columns for the planned lengths: the host can not read the real ones.
    columns = -(-max(planned_lens, default=0) // case.page_size) + 2
    tables = _csr(pages, pages_of) if case.csr else _block_table(pages, pages_of, columns)
    inputs = Inputs(q, k, v, *lens, None, **tables)
    for name, cache in (("k", k), ("v", v)):
        for r, kv_len in enumerate(case.kv_lens):
            tokens = normal(rng, (kv_len, case.num_kv_heads, cache.shape[-1]), cache.dtype)
            plant(case, name, rng, tokens)
            reference.append_pages(cache, tokens, inputs.pages(r), kv_len, case.kv_layout)
    share_prefixes(case, inputs)
    add_other_tensors(case, rng, inputs)
    if case.page_ids is not None:
        replace_page_ids(case, rng, inputs, pages[sum(pages_of) :])
    return inputs


def replace_page_ids(case, rng, inputs, spare_pages):
    """`spare_pages`: those of no request, which hold NaN."""
    outside = [INT_MIN, -1, len(inputs.k), INT_MAX]
    own_pages, missing_pages = [], []
    for r, kv_len in enumerate(case.kv_lens):
        own_pages.append(inputs.given_pages(r).copy())
        firsts = np.arange(0, kv_len, case.page_size)
        seen = case.visible(r).any(axis=0)
        seen = np.logical_or.reduceat(seen, firsts) if kv_len else np.zeros(0, bool)
        ids = inputs.given_pages(r)[: len(firsts)]
        ids[~seen] = rng.choice([*outside, *spare_pages], (~seen).sum())
        missing = seen & (rng.random(len(seen)) < 0.3) & (case.page_ids == "missing")
        ids[missing] = rng.choice(outside, missing.sum())
        missing_pages.append(missing)
    inputs.own_pages, inputs.missing_pages = own_pages, missing_pages


def share_prefixes(case, inputs):
    """Makes requests share prefixes: they get the same whole pages, and copies of the last."""
    if not case.shared_prefixes:
        return
    inputs.shared_prefixes = np.array(case.shared_prefixes, np.int32)
    outer_first = sorted(case.shared_prefixes, key=lambda group: (group[0], -group[1], group[2]))
    for first, count, num_tokens in outer_first:
        tokens = inputs.requests(case.kv_layout)[first]
        num_pages = num_tokens // case.page_size if case.page_size else 0
        for r in range(first + 1, first + count):
            if case.page_size is None:
                row = inputs.kv_indptr[r]
                inputs.k[row : row + num_tokens] = tokens[0][:num_tokens]
                inputs.v[row : row + num_tokens] = tokens[1][:num_tokens]
                continue
            inputs.pages(r)[:num_pages] = inputs.pages(first)[:num_pages]
            for cache, shared in zip((inputs.k, inputs.v), tokens, strict=True):
                pages = inputs.pages(r)
                reference.append_pages(
                    cache, shared[:num_tokens], pages, num_tokens, case.kv_layout
                )


def _ragged(case, rng, q, qo_indptr, kv_lens, planned_lens):
    """In "strided" cases there are gaps between requests: kv_indptr is not the running sum."""
    strided = case.memory == "strided"
    kv_indptr = indptr([n + (2 if strided else 0) for n in planned_lens])
    k, v = (
        poisoned((int(kv_indptr[-1]) + SPARE_ROWS, case.num_kv_heads, d), case.cache_dtype, strided)
        for d in case.head_dims
    )
    for name, tensor in (("k", k), ("v", v)):
        for begin, n in zip(kv_indptr, case.kv_lens, strict=False):
            tokens = tensor[begin : begin + n]
            tokens[...] = normal(rng, tokens.shape, tensor.dtype)
            plant(case, name, rng, tokens)
    inputs = Inputs(q, k, v, qo_indptr, kv_lens, planned_lens, kv_indptr)
    share_prefixes(case, inputs)
    return inputs


def _empty_cache(case, num_pages):
    inner = (case.page_size, case.num_kv_heads)
    if case.kv_layout == "HND":
        inner = inner[::-1]
    if case.memory == "combined":
        both = poisoned((num_pages, 2, *inner, case.head_dims[0]), case.cache_dtype)
        return both[:, 0], both[:, 1]
    strided = case.memory == "strided"
    return (poisoned((num_pages, *inner, d), case.cache_dtype, strided) for d in case.head_dims)


def _block_table(pages, pages_of, columns):
    table = np.full((len(pages_of) + 1, columns), INT_MAX, np.int32)
    for row, begin, n in zip(table, indptr(pages_of), pages_of, strict=False):
        row[:n] = pages[begin : begin + n]
    return {"block_table": table}


def _csr(pages, pages_of):
    """A CSR page table in which every request has one entry more than it needs."""
    page_indptr = indptr([n + 1 for n in pages_of])
    page_indices = np.full(page_indptr[-1] + 2, INT_MAX, np.int32)
    for to, begin, n in zip(page_indptr, indptr(pages_of), pages_of, strict=False):
        page_indices[to : to + n] = pages[begin : begin + n]
    return {"page_indptr": page_indptr, "page_indices": page_indices}
