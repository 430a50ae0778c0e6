# SPDX-License-Identifier: Apache-2.0
"""Inputs of a Case made on the GPU by torch, and what is right for a sample of their rows."""

import dataclasses
import math

import numpy as np
import torch

import flashplan as fp
from inputs import random_tree

SAMPLE_BYTES = 1 << 30  # of logits that a comparison may hold


def indptr(lens):
    return torch.tensor([0, *lens]).cumsum(0).int()


@dataclasses.dataclass
class GpuInputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    qo_indptr: torch.Tensor  # on the host
    kv_lens: torch.Tensor
    block_table: torch.Tensor | None
    shared_prefixes: list | None = None
    planned_lens: tuple | None = None
    trees: torch.Tensor | None = None  # [tokens, nodes] of bool
    mask: torch.Tensor | None = None  # of them
    slopes: torch.Tensor | None = None  # of ALiBi

    def plan_args(self):
        return self.qo_indptr.numpy(), list(self.planned_lens or self.kv_lens.tolist())

    def other_tensors(self):
        """Arguments of run() besides q, k and v."""
        lens = self.kv_lens.to(self.q.device) if self.planned_lens else None
        tensors = {
            "block_table": self.block_table,
            "kv_lens": lens,
            "mask": self.mask,
            "slopes": self.slopes,
        }
        return {name: x for name, x in tensors.items() if x is not None}

    def plan_options(self):
        return {} if self.shared_prefixes is None else {"shared_prefixes": self.shared_prefixes}

    def request(self, r, page_size):
        """The dense (k, v) of a request, NHD."""
        kv_len = int(self.kv_lens[r])
        if self.block_table is None:
            begin = int(self.kv_lens[:r].sum())
            return self.k[begin : begin + kv_len], self.v[begin : begin + kv_len]
        pages = self.block_table[r, : -(-kv_len // page_size)].long()
        # As bytes, since torch does not index 8-bit floats.
        return tuple(
            cache.view(torch.uint8)[pages].flatten(0, 1)[:kv_len].view(cache.dtype)
            for cache in (self.k, self.v)
        )


def add_other_inputs(case, inputs, device):
    """The real lengths of `planned_lens`, masks of random trees of all queries, the slopes of ALiBi
    (Press et al., 2022)."""
    inputs.planned_lens = case.planned_lens
    if case.variant == "alibi":
        heads = torch.arange(1, case.num_qo_heads + 1, device=device)
        inputs.slopes = 2.0 ** (-8 * heads / case.num_qo_heads)
    if case.custom_mask == "tree":
        rng = np.random.default_rng()
        trees = np.concatenate([random_tree(rng, n) for n in case.qo_lens])
        inputs.trees = torch.from_numpy(trees).to(device)
        inputs.mask = torch.from_numpy(fp.pack_mask(trees)).to(device)


def make_gpu_inputs(case, device):
    """Normal random numbers, fresh every time; pages in random order."""
    total = sum(case.qo_lens)
    dtype = getattr(torch, case.product_dtype)
    cache_dtype = getattr(torch, case.cache_dtype)

    def normal(*shape):
        return torch.randn(shape, dtype=dtype, device=device)

    q = normal(total, case.num_qo_heads, case.head_dims[0]).to(getattr(torch, case.q_dtype))
    table = None
    if case.page_size is None:
        outer = (sum(case.kv_lens),)
    else:
        pages_of = [-(-n // case.page_size) for n in case.planned_lens or case.kv_lens]
        ids = torch.randperm(sum(pages_of), device=device, dtype=torch.int32)
        table = torch.full((len(pages_of), max(pages_of)), 2**31 - 1, dtype=torch.int32).to(device)
        for row, own in zip(table, ids.split(pages_of), strict=True):
            row[: len(own)] = own
        for first, count, tokens in case.shared_prefixes:
            pages = tokens // case.page_size
            table[first + 1 : first + count, :pages] = table[first, :pages]
        outer = (sum(pages_of), case.page_size)
    k, v = (normal(*outer, case.num_kv_heads, d).to(cache_dtype) for d in case.head_dims)
    inputs = GpuInputs(
        q,
        k,
        v,
        indptr(case.qo_lens),
        torch.tensor(case.kv_lens, dtype=torch.int32),
        table,
        [list(group) for group in case.shared_prefixes] or None,
    )
    add_other_inputs(case, inputs, device)
    return inputs


def rotated(x, positions):
    """x [tokens, heads, d] by the angles of flashplan.Rope()."""
    half = x.shape[-1] // 2
    turns = 1e4 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = (positions[:, None] * turns)[:, None]
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b = x.split(half, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def exact_rows(case, inputs, r, rows):
    """o of the query rows `rows` (counted within request r), in float32 but for the inputs."""
    q = inputs.q[int(inputs.qo_indptr[r]) + rows].float()
    k, v = (x.to(inputs.q.dtype).float() for x in inputs.request(r, case.page_size))
    key = torch.arange(len(k), device=k.device)
    last = rows[:, None] + len(k) - case.qo_lens[r]
    if case.rope:
        q, k = rotated(q, last[:, 0]), rotated(k, key)
    q = q.unflatten(1, (case.num_kv_heads, -1))  # [rows, kv_heads, group, d]
    logits = torch.einsum("rhgd,nhd->rhgn", q, k) / math.sqrt(q.shape[-1])
    if inputs.slopes is not None:
        slopes = inputs.slopes.unflatten(0, (case.num_kv_heads, -1))
        logits += slopes[..., None] * (key - last)[:, None, None]
    if case.causal:
        logits.masked_fill_((key > last)[:, None, None], -math.inf)
    if case.window_left >= 0:
        logits.masked_fill_((key < last - case.window_left)[:, None, None], -math.inf)
    if inputs.trees is not None:
        seen = inputs.trees[int(inputs.qo_indptr[r]) + rows]
        logits[..., -seen.shape[1] :].masked_fill_(~seen[:, None, None], -math.inf)
    return torch.einsum("rhgn,nhd->rhgd", logits.softmax(-1), v).flatten(1, 2)


def sample(case):
    """(request, rows) pairs: the first, the longest and the last request; first and last rows."""
    requests = {0, max(range(len(case.kv_lens)), key=case.kv_lens.__getitem__)}
    for r in sorted(requests | {len(case.kv_lens) - 1}):
        qo_len, kv_len = case.qo_lens[r], case.kv_lens[r]
        count = max(1, min(qo_len, 64, SAMPLE_BYTES // (4 * case.num_qo_heads * kv_len)))
        yield r, torch.linspace(0, qo_len - 1, count).round().long()


def assert_right(case, inputs, o, name):
    """o of a few requests against float32. A row may be off by 2 % of its largest value: bfloat16
    rounds probabilities and outputs by up to 0.4 %, a wrong key or mask is far outside."""
    for r, rows in sample(case):
        rows = rows.to(o.device)
        exact = exact_rows(case, inputs, r, rows)
        actual = o[int(inputs.qo_indptr[r]) + rows].float()
        budget = 0.02 * exact.abs().amax(-1, keepdim=True) + 1e-5
        wrong = ~((actual - exact).abs() <= budget)  # NaN is wrong too
        if wrong.any():
            row, head, d = wrong.nonzero()[0].tolist()
            raise AssertionError(
                f"{name} is wrong in {int(wrong.sum())} of {wrong.numel()} values sampled from "
                f"request {r}: row {int(rows[row])}, head {head}, dim {d}: "
                f"expected {exact[row, head, d]:.4g}, got {actual[row, head, d]:.4g}"
            )
