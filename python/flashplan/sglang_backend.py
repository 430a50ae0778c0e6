# SPDX-License-Identifier: Apache-2.0
"""The backend of attention for SGLang. It needs a release that calls
`init_forward_metadata_out_graph`, as 0.5.23 does; 0.5.16 does not.

SGLang describes a step, or a step that a captured graph is about to compute, by one call outside of
the graph. All kinds of layers are planned there. Layers then append and run.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from flashplan._core import UnsupportedError
from flashplan.attention import Attention
from flashplan.support import workspace_bytes

# Imported without types: type checkers would take minutes, and SGLang is not installed where they
# run.
_base: Any = importlib.import_module("sglang.srt.layers.attention.base_attn_backend")
_pools: Any = importlib.import_module("sglang.srt.mem_cache.memory_pool")

# The smallest max_qo_tokens, except for decodes. All steps of fewer tokens share the objects that
# are made for this bound.
_MIN_TOKENS = 8192
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class FlashplanAttnBackend(_base.AttentionBackend):  # type: ignore[misc]
    """The attention of all layers of a model.

    Args:
        runner: ModelRunner.

    Raises:
        UnsupportedError: the model has multi-head latent attention, an encoder, or a separate cache
            for layers with a sliding window.
    """

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any) -> None:
        super().__init__()
        if runner.use_mla_backend:
            raise UnsupportedError("model: expected no multi-head latent attention, got it")
        if runner.model_config.is_encoder_decoder:
            raise UnsupportedError("model: expected a decoder alone, got an encoder beside it")
        if hasattr(runner.token_to_kv_pool, "translate_loc_from_full_to_swa"):
            raise UnsupportedError(
                "token_to_kv_pool: expected one cache for all layers, got another one for sliding "
                "windows (start SGLang with --disable-hybrid-swa-memory)"
            )
        self._req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self._pool = runner.token_to_kv_pool
        self._page_size: int = runner.page_size or 1
        self._options: dict[str, Any] = {
            "page_size": self._page_size,
            "q_dtype": runner.dtype,
            "kv_dtype": runner.kv_cache_dtype,
            "device": runner.device,
        }
        self._has_scales = runner.kv_cache_dtype in _FLOAT8
        self._max_requests: int = runner.req_to_token_pool.size
        self._attentions: dict[tuple[Any, ...], Attention] = {}
        self._workspace: Tensor | None = None  # shared by the objects, which run one by one
        self._table: Tensor | None = None  # the page table that graphs refer to
        self._bounds = (1, 1)
        self._step: tuple[list[int], list[int]] = ([0], [])
        self._block_table: Tensor | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes the page table that captured graphs refer to. SGLang calls this once, before the
        first capture."""
        num_pages = -(-self._req_to_token.shape[1] // self._page_size)
        device = self._req_to_token.device
        self._table = torch.zeros((max_bs, num_pages), dtype=torch.int32, device=device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The number of keys of a request that pads a graph: that of its one query."""
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans a step that is computed without a graph."""
        self._begin(forward_batch, table=None)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plans a step that a graph captures, or is about to compute."""
        self._begin(forward_batch, self._table)

    def _begin(self, batch: Any, table: Tensor | None) -> None:
        mode = batch.forward_mode
        if mode.is_idle():
            return
        if mode.is_target_verify() or mode.is_draft_extend_v2():
            raise UnsupportedError("forward_mode: expected no speculative decoding, got it")
        lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        kv_lens: list[int] = lengths.tolist()
        new = (
            [1] * len(kv_lens) if mode.is_decode() else [int(n) for n in batch.extend_seq_lens_cpu]
        )
        qo_indptr = [0]
        for number in new:
            qo_indptr.append(qo_indptr[-1] + number)
        self._step = (qo_indptr, kv_lens)
        self._bounds = self._bounds_of(qo_indptr[-1], mode.is_decode())
        # Slots of a page are consecutive, so the first slot of each page of a request is enough.
        columns = max(kv_lens, default=0)
        slots = self._req_to_token[batch.req_pool_indices, : columns : self._page_size]
        pages = slots if self._page_size == 1 else slots // self._page_size
        if table is None:
            self._block_table = pages.int()
        else:
            table[: pages.shape[0], : pages.shape[1]].copy_(pages)
            self._block_table = table[: pages.shape[0]]
        for (bounds, *_), attn in self._attentions.items():
            if bounds == self._bounds:
                attn.plan(*self._step)

    def _bounds_of(self, num_tokens: int, is_decode: bool) -> tuple[int, int]:
        """The bounds (requests, tokens) of the objects for a step. There are few different bounds,
        so that few objects are made. All steps that one graph computes have the same bounds."""
        if is_decode:
            return self._max_requests, self._max_requests
        size = 1 << max(num_tokens - 1, 0).bit_length()
        return self._max_requests, max(size, self._max_requests, _MIN_TOKENS)

    def _attention_of(self, layer: Any) -> Attention:
        """The object that is planned for this kind of layer."""
        window = layer.sliding_window_size
        options: dict[str, Any] = {
            **self._options,
            "num_qo_heads": layer.tp_q_head_num,
            "num_kv_heads": layer.tp_k_head_num,
            "head_dim": (layer.qk_head_dim, layer.v_head_dim),
            "softmax_scale": layer.scaling,
            "softcap": layer.logit_cap,
            "window_left": -1 if window is None else window,  # keys before the query's own
        }
        key = (self._bounds, *options.values())
        attn = self._attentions.get(key)
        if attn is None:
            options["max_batch_size"], options["max_qo_tokens"] = self._bounds
            num_bytes = workspace_bytes(**options)
            if self._workspace is None or self._workspace.numel() < num_bytes:
                self._workspace = torch.empty(
                    num_bytes, dtype=torch.uint8, device=self._options["device"]
                )
            attn = self._attentions[key] = Attention(**options, workspace=self._workspace)
            attn.plan(*self._step)
        return attn

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Appends the new keys and values, and attends.

        Args:
            q: [num_tokens, tp_q_head_num * qk_head_dim]; rows that pad the batch are not read.
            k, v: [num_tokens, tp_k_head_num, head_dim]; None where another layer has written them.
            layer: RadixAttention.
            forward_batch: ForwardBatch.
            save_kv_cache: whether k and v are to be written.
            sinks: [tp_q_head_num].

        Returns:
            [num_tokens, tp_q_head_num * v_head_dim]; rows that pad the batch are 0.
        """
        for name, value in others.items():
            if value is not None:
                raise UnsupportedError(f"{name}: expected None with flashplan, got one")
        attn_type = getattr(layer.attn_type, "value", layer.attn_type)
        if layer.is_cross_attention or attn_type != "decoder":
            raise UnsupportedError(f"attn_type: expected 'decoder', got {attn_type!r}")
        scales: dict[str, Any] = {}
        if self._has_scales:
            scales = {
                "k_scale": 1.0 if layer.k_scale_float is None else layer.k_scale_float,
                "v_scale": 1.0 if layer.v_scale_float is None else layer.v_scale_float,
            }
        if save_kv_cache and k is not None and v is not None:
            where = _pools.KVWriteLoc.for_layer(forward_batch, layer)
            self._pool.set_kv_buffer(layer, where, k, v, *scales.values())
        k_cache, v_cache = (self._pages(x) for x in self._pool.get_kv_buffer(layer.layer_id))
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        self._attention_of(layer).run(
            q,
            k_cache,
            v_cache,
            block_table=self._block_table,
            sinks=sinks,
            out=out,
            **scales,
        )
        return out.flatten(1)

    def _pages(self, slots: Tensor) -> Tensor:
        """A cache [slots, heads, dim] as [pages, page_size, heads, dim]; slots behind the last
        whole page belong to no request."""
        num_pages = slots.shape[0] // self._page_size
        whole = slots[: num_pages * self._page_size]
        return whole.view(num_pages, self._page_size, *slots.shape[1:])

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Does what `forward_extend` does, for one new token of each request."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, sinks, **others)
