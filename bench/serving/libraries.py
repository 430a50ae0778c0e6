# SPDX-License-Identifier: Apache-2.0
"""The libraries that replay.py times: flashplan, FlashInfer, FlashAttention-3, SGLang's Triton
kernels and torch.

Each plans a step on the host, and returns a function (q, k, v, out) -> o that computes one layer of
it: q [tokens, heads, dim], k and v [pages, page_size, kv_heads, dim].
"""

import argparse
import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from steps import Step

import flashplan as fp

FLASHINFER_WORKSPACE_BYTES = 512 << 20
SGLANG_MAX_SPLITS = 8  # the default of SGLang's --triton-attention-num-kv-splits


class Shape(argparse.Namespace):
    """Heads and layers of a model, its cache, and the largest step."""

    qo_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    page_size: int
    num_pages: int
    max_batch: int
    max_tokens: int
    device: torch.device
    dtype: torch.dtype


Run = Callable[..., torch.Tensor]


def is_decode(step: Step) -> bool:
    """Each sequence has one token."""
    return int(step.qo_indptr[-1]) == len(step.kv_lens)


def block_table(step: Step) -> np.ndarray:
    """[batch, most pages of a sequence], filled up with page 0."""
    counts = np.diff(step.page_indptr)
    table = np.zeros((len(counts), counts.max()), np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = step.page_indices
    return table


class Library:
    """What all have in common."""

    page_size: int  # of the cache that it reads
    has_graphs = True  # the layers of a step are timed as a CUDA graph

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.page_size = shape.page_size

    def prepare(self, step: Step, k: torch.Tensor, v: torch.Tensor) -> None:
        """Makes what an engine has without planning. Not timed."""

    def plan(self, step: Step) -> Run:
        raise NotImplementedError

    def is_captured(self, step: Step) -> bool:
        return self.has_graphs

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.shape.device, non_blocking=True)


class Flashplan(Library):
    """One Attention for decodes and one for all other steps, as the engine has them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        make = functools.partial(
            fp.Attention,
            shape.qo_heads,
            shape.kv_heads,
            shape.head_dim,
            page_size=shape.page_size,
            q_dtype=str(shape.dtype).removeprefix("torch."),
            device=str(shape.device),
            max_batch_size=shape.max_batch,
        )
        self.mixed = make(max_qo_tokens=max(shape.max_tokens, shape.max_batch))
        self.decodes = make(max_qo_tokens=shape.max_batch)

    def plan(self, step: Step) -> Run:
        attention = self.decodes if is_decode(step) else self.mixed
        table = {"page_indptr": step.page_indptr, "page_indices": step.page_indices}
        prefixes = fp.find_shared_prefixes(
            step.qo_indptr, step.kv_lens, page_size=self.page_size, **table
        )
        attention.plan(step.qo_indptr, step.kv_lens, shared_prefixes=prefixes)
        on_device = {name: self.to_device(ids) for name, ids in table.items()}
        return functools.partial(attention.run, **on_device)

    def is_captured(self, step: Step) -> bool:
        # A graph of steps with prompts holds two kernels, of which one has no work.
        return self.has_graphs and is_decode(step)


class FlashInfer(Library):
    """Its wrapper for prompts serves all steps; that for decodes serves those of decodes alone."""

    def __init__(self, shape: Shape, backend: str) -> None:
        import flashinfer

        super().__init__(shape)
        workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self.mixed = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend=backend
        )
        self.decodes = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace.clone(), "NHD", use_tensor_cores=True
        )

    def plan(self, step: Step) -> Run:
        shape = self.shape
        heads = shape.qo_heads, shape.kv_heads, shape.head_dim, shape.page_size
        last = (step.kv_lens - 1) % shape.page_size + 1
        pages = tuple(map(torch.from_numpy, (step.page_indptr, step.page_indices, last)))
        dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype}
        if is_decode(step):
            wrapper = self.decodes
            wrapper.plan(*pages, *heads, **dtypes)
        else:
            wrapper = self.mixed
            wrapper.plan(torch.from_numpy(step.qo_indptr), *pages, *heads, causal=True, **dtypes)
        return lambda q, k, v, out: wrapper.run(q, (k, v), out=out)


class FlashAttention3(Library):
    """Its own functions for paged caches (flash_attn_interface: the package tokenspeed-fa3)."""

    def __init__(self, shape: Shape, page_size: int, plans: bool) -> None:
        """`plans`: its schedule is made once for all layers, else in each."""
        import flash_attn_interface

        super().__init__(shape)
        self.page_size = page_size
        self.library = flash_attn_interface
        self.plans = plans

    def plan(self, step: Step) -> Run:
        shape = self.shape
        table = block_table(step)
        max_rows = int(np.diff(step.qo_indptr).max())
        qo_indptr, kv_lens = self.to_device(step.qo_indptr), self.to_device(step.kv_lens)
        schedule = None
        if self.plans:
            schedule = self.library.get_scheduler_metadata(
                len(step.kv_lens),
                max_rows,
                table.shape[1] * self.page_size,
                shape.qo_heads,
                shape.kv_heads,
                shape.head_dim,
                kv_lens,
                qkv_dtype=shape.dtype,
                cu_seqlens_q=qo_indptr,
                page_size=self.page_size,
                causal=True,
            )
        options = {
            "cache_seqlens": kv_lens,
            "page_table": self.to_device(table),
            "cu_seqlens_q": qo_indptr,
            "max_seqlen_q": max_rows,
            "causal": True,
            "scheduler_metadata": schedule,
        }
        return lambda q, k, v, out: self.library.flash_attn_with_kvcache(q, k, v, **options)


def import_sglang(folder: Path) -> dict[str, Any]:
    """SGLang's attention kernels, from a folder with its sglang/kernels/ops/attention alone.

    What they import besides is replaced by a few functions, which say that this is an NVIDIA GPU.
    """
    names = ("", ".kernels", ".kernels.ops", ".kernels.ops.attention", ".srt")
    modules = {name: types.ModuleType(f"sglang{name}") for name in (*names, ".srt.environ")}
    for name in names:
        modules[name].__path__ = [str(folder)] if name.endswith(".attention") else []
    switch = types.SimpleNamespace(get=lambda: False)
    modules[".srt.environ"].envs = type("Off", (), {"__getattr__": lambda *_: switch})()
    utils = modules[".srt.utils"] = types.ModuleType("sglang.srt.utils")
    utils.is_cuda = lambda: True
    utils.is_hip = utils.is_gfx95_supported = utils.is_gfx1250_supported = lambda: False
    utils.get_device_core_count = lambda device=0: (
        torch.cuda.get_device_properties(device).multi_processor_count
    )
    sys.modules.update({module.__name__: module for module in modules.values()})
    kernels = {}
    for name in ("decode_attention", "extend_attention", "kv_indices", "metadata"):
        kernels |= vars(importlib.import_module(f"sglang.kernels.ops.attention.{name}"))
    return kernels


class SGLangTriton(Library):
    """SGLang's Triton kernels as its back end calls them: one for decodes, and one for all other
    steps, which reads the keys of new tokens from tensors of their own."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        super().__init__(shape)
        self.kernels = import_sglang(folder)
        self.scale = shape.head_dim**-0.5
        self.num_sms = self.kernels["get_device_core_count"](0)
        parts = shape.max_batch, shape.qo_heads, SGLANG_MAX_SPLITS
        options = {"dtype": torch.float32, "device": shape.device}
        self.part_outputs = torch.empty(*parts, shape.head_dim, **options)
        self.part_lses = torch.empty(*parts, **options)
        self.num_splits = torch.empty(shape.max_batch, dtype=torch.int32, device=shape.device)

    def prepare(self, step: Step, k: torch.Tensor, v: torch.Tensor) -> None:
        self.table = self.to_device(block_table(step))
        self.rows = torch.arange(len(step.kv_lens), device=self.shape.device)
        if is_decode(step):
            return
        ids = np.concatenate(
            [new_slots(step, request, self.page_size) for request in range(len(step.kv_lens))]
        )
        slots = self.to_device(ids)
        self.new_k, self.new_v = (x.flatten(0, 1)[slots] for x in (k, v))

    def plan(self, step: Step) -> Run:
        shape, batch = self.shape, len(step.kv_lens)
        # The tokens whose keys lie in the cache.
        lens = step.kv_lens if is_decode(step) else step.kv_lens - np.diff(step.qo_indptr)
        indptr = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        kv_lens, kv_indptr = self.to_device(lens.astype(np.int32)), self.to_device(indptr)
        indices = torch.empty(int(indptr[-1]) + 1, dtype=torch.int64, device=shape.device)
        self.kernels["create_flashinfer_kv_indices_triton"][(batch,)](
            self.table,
            self.rows,
            kv_lens,
            kv_indptr,
            None,
            indices,
            self.table.stride(0),
            ENTRY_PAGE_SIZE=self.page_size,
        )
        if is_decode(step):
            return self.plan_decodes(kv_lens, kv_indptr, indices)
        max_rows = int(np.diff(step.qo_indptr).max())
        qo_indptr, new = self.to_device(step.qo_indptr), (self.new_k, self.new_v)
        extend = self.kernels["extend_attention_fwd"]

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor):
            k, v = k.flatten(0, 1), v.flatten(0, 1)
            lists = qo_indptr, kv_indptr, indices
            rest = None, True, None, max_rows, 1.0, 1.0, self.scale
            extend(q, *new, out, k, v, *lists, *rest, page_size=self.page_size)
            return out

        return run

    def plan_decodes(self, kv_lens: torch.Tensor, *lists: torch.Tensor) -> Run:
        shape, batch = self.shape, len(kv_lens)
        num_splits = self.num_splits[:batch]
        self.kernels["get_num_kv_splits_triton"][(1,)](
            num_splits,
            kv_lens,
            batch,
            1,
            shape.qo_heads,
            shape.kv_heads,
            SGLANG_MAX_SPLITS,
            self.num_sms,
            MAX_NUM_SEQ=max(256, 1 << (batch - 1).bit_length()),
        )
        decode = self.kernels["decode_attention_fwd"]
        parts = self.part_outputs[:batch], self.part_lses[:batch], num_splits, SGLANG_MAX_SPLITS

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor):
            k, v = k.flatten(0, 1), v.flatten(0, 1)
            decode(q, k, v, out, *lists, *parts, self.scale, 1.0, 1.0, page_size=self.page_size)
            return out

        return run


def new_slots(step: Step, request: int, page_size: int) -> np.ndarray:
    """The places in the cache of the tokens of one sequence that this step computes."""
    end = step.kv_lens[request]
    positions = np.arange(end - np.diff(step.qo_indptr)[request], end)
    pages = step.page_indices[step.page_indptr[request] + positions // page_size]
    return pages * page_size + positions % page_size


class Torch(Library):
    """torch reads no pages of 16: keys and values are gathered, then comes its FlashAttention-2."""

    def plan(self, step: Step) -> Run:
        qo_indptr, page_indptr = self.to_device(step.qo_indptr), self.to_device(step.page_indptr)
        lens, pages = self.to_device(step.kv_lens), self.to_device(step.page_indices)
        kv_indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
        total = int(step.kv_lens.sum())
        requests = torch.repeat_interleave(lens.long(), output_size=total)
        positions = torch.arange(total, device=self.shape.device) - kv_indptr[requests]
        slots = pages[page_indptr[requests] + positions // self.page_size] * self.page_size
        slots += positions % self.page_size
        max_rows, max_keys = int(np.diff(step.qo_indptr).max()), int(step.kv_lens.max())
        attention = torch.ops.aten._flash_attention_forward
        options = qo_indptr, kv_indptr, max_rows, max_keys, 0.0, True, False

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor):
            k, v = (x.flatten(0, 1).index_select(0, slots) for x in (k, v))
            return attention(q, k, v, *options)[0]

        return run


def libraries(shape: Shape, sglang: Path | None) -> Iterator[tuple[str, Callable[[], Library]]]:
    """Names, and what makes each: it raises an ImportError if the library is not installed."""
    schedule = os.environ.get("FLASHPLAN_SCHEDULE")
    yield f"flashplan, {schedule}" if schedule else "flashplan", lambda: Flashplan(shape)
    if shape.device.type != "cuda":
        return
    yield "FlashInfer, fa2", lambda: FlashInfer(shape, "fa2")
    yield "FlashInfer, fa3", lambda: FlashInfer(shape, "fa3")
    if sglang is not None:
        yield "SGLang, Triton", lambda: SGLangTriton(shape, sglang)
    yield "torch, gathered pages", lambda: Torch(shape)
    size = shape.page_size
    yield "FlashAttention-3", lambda: FlashAttention3(shape, size, plans=True)
    yield "FlashAttention-3, not planned", lambda: FlashAttention3(shape, size, plans=False)
    yield "FlashAttention-3, pages of 128", lambda: FlashAttention3(shape, 128, plans=True)
