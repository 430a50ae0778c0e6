# SPDX-License-Identifier: Apache-2.0
"""The base of FlashInfer's wrappers: options, buffers, and runs of the planned batch."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashplan._core import UnsupportedError
from flashplan.attention import Attention
from flashplan.flashinfer._arguments import (
    check_aligned,
    is_8_bit,
    one_of,
    to_torch_dtype,
)
from flashplan.flashinfer._masks import Items, item_words, num_words, to_words
from flashplan.flashinfer._narrow_queries import kernel_dtype, read_queries
from flashplan.flashinfer._plans import Attentions, Batch
from flashplan.flashinfer._positions import (
    MODES,
    alibi_arguments,
    alibi_variant,
    rotation,
    wide_dtype,
    widened,
    widens_keys,
)

BACKENDS = ("auto", "fa2", "fa3")
_LN_2 = math.log(2)


class Shape(NamedTuple):
    """The options that only plan() sets."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int | None
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    kv_layout: str
    has_mask: bool
    batch_invariant: bool


class _PlanModule:
    """Stands for the compiled module of a wrapper, by which SGLang plans without the wrapper."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper

    def plan(self, *arguments: Any) -> int:
        """Plans the lengths qo_indptr, kv_indptr and kv_lens, arguments 3 to 5, counted from 0.

        A mask for CUDA graphs is read anew from custom_mask_buf, into which the caller has written
        the bits of this batch.
        """
        qo_indptr, kv_indptr, kv_lens = (tensor.cpu().numpy() for tensor in arguments[3:6])
        wrapper = self._wrapper
        batch = Batch(qo_indptr, kv_lens, kv_indptr if wrapper._is_ragged else None)
        if wrapper._use_cuda_graph and wrapper._shape is not None and wrapper._shape.has_mask:
            wrapper._set_mask(batch, None, wrapper._custom_mask_buf)
        return wrapper._plan_batch(batch)


class Wrapper:
    """The base of FlashInfer's wrappers.

    Engines read and set attributes with FlashInfer's names, so each run looks up the options in
    them. `backend` is accepted and not used: each batch runs on the kernel that is fastest for it.
    """

    _is_ragged = False
    plan: Any  # subclasses define it, each with its own arguments

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        jit_args: Any,
    ) -> None:
        one_of("kv_layout", kv_layout, ("NHD", "HND"))
        one_of("backend", backend, BACKENDS)
        self._takes_sinks = jit_args is not None
        if jit_args is not None and (len(jit_args) < 12 or jit_args[11] != "AttentionSink"):
            raise UnsupportedError(
                "jit_args: expected None or the variant AttentionSink, got another one; "
                "write it as a flashplan.Variant for flashplan.Attention"
            )
        check_aligned("float_workspace_buffer", float_workspace_buffer)
        self.device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._float_workspace_buffer = float_workspace_buffer
        # Engines read these attributes to share the buffers among wrappers. Nothing else uses them.
        self._int_workspace_buffer = torch.empty(16, dtype=torch.uint8, device=self.device)
        self._pin_memory_int_workspace_buffer = torch.empty(16, dtype=torch.uint8)
        self._use_cuda_graph = use_cuda_graph
        self._backend = "fa2" if backend == "auto" else backend
        self._attentions = Attentions(float_workspace_buffer, self.device, use_cuda_graph)
        self._forward_key: Any = None  # the options of the last forward(), as _key() gives them
        self._shape: Shape | None = None
        self._num_rows = 0
        self._fixed_batch_size = 0  # used with CUDA graphs alone
        self._bounds: tuple[int, int] | None = None  # (requests, rows), with CUDA graphs alone
        self._max_total_num_rows: int | None = None
        self._mask: Tensor | None = None
        self._custom_mask_buf: Tensor | None = None
        self._cached_module: Any = None
        self._plan_info: Any = None
        self._set_options(False, "NONE", -1, None, None, None, None)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """Sets other workspaces. The next run plans again; CUDA graphs must be captured again."""
        check_aligned("float_workspace_buffer", float_workspace_buffer)
        check_aligned("int_workspace_buffer", int_workspace_buffer)
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        self._attentions.set_workspace(float_workspace_buffer)

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Bytes that a plan() with these arguments uses of the two workspace buffers."""
        other = copy.copy(self)
        other._use_cuda_graph = False
        other._bounds = None
        other._attentions = Attentions(self._float_workspace_buffer, self.device, False)
        other._forward_key = None
        other.plan(*args, **kwargs)
        return other._attentions.workspace_bytes(), 16

    def end_forward(self) -> None:
        """Does nothing, since there is nothing to release."""

    def _set_options(
        self,
        causal: bool,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> None:
        one_of("pos_encoding_mode", pos_encoding_mode, MODES)
        self._causal = causal
        self._pos_encoding_mode = pos_encoding_mode
        self._window_left = window_left
        self._logits_soft_cap = 0.0 if logits_soft_cap is None else logits_soft_cap
        self._sm_scale = sm_scale
        self._rope_scale = 1.0 if rope_scale is None else rope_scale
        self._rope_theta = 1e4 if rope_theta is None else rope_theta

    def _set_shape(
        self,
        heads: tuple[int, int],
        head_dim_qk: int,
        head_dim_vo: int | None,
        page_size: int | None,
        q_data_type: Any,
        kv_data_type: Any,
        o_data_type: Any,
        *,
        has_mask: bool,
        fixed_split_size: int | None,
        disable_split_kv: bool,
    ) -> None:
        q_dtype = to_torch_dtype("q_data_type", q_data_type)
        kv_dtype = q_dtype if kv_data_type is None else to_torch_dtype("kv_data_type", kv_data_type)
        o_dtype = q_dtype if o_data_type is None else to_torch_dtype("o_data_type", o_data_type)
        if is_8_bit(o_dtype):
            raise UnsupportedError(f"o_data_type: expected 16 bits (32 on the CPU), got {o_dtype}")
        self._q_data_type = q_dtype
        self._shape = Shape(
            *heads,
            head_dim_qk,
            head_dim_qk if head_dim_vo is None else head_dim_vo,
            page_size,
            kernel_dtype(q_dtype, self.device),
            kv_dtype,
            o_dtype,
            self._kv_layout,
            has_mask,
            # Batch-invariant: FlashInfer's results for a request have the same bits in any batch if
            # keys are not split, or split at fixed places.
            disable_split_kv or (fixed_split_size is not None and fixed_split_size > 0),
        )

    def _check_batch_size(self, batch_size: int) -> None:
        if batch_size != self._fixed_batch_size:
            raise ValueError(
                f"indptr: expected {self._fixed_batch_size} requests, as the buffers have, since "
                f"the batch size should be fixed in cudagraph mode, got {batch_size}"
            )

    def _fix_bounds(self, batch: Batch) -> None:
        """With CUDA graphs, the first batch sets the bounds: no later one may have more rows."""
        batch_size, num_rows = len(batch.kv_lens), int(batch.qo_indptr[-1])
        if self._bounds is None:
            self._bounds = (batch_size, max(batch_size, num_rows))
            self._max_total_num_rows = num_rows
        elif self._max_total_num_rows is not None and num_rows > self._max_total_num_rows:
            raise ValueError(
                f"qo_indptr: expected at most {self._max_total_num_rows} rows, those of the first "
                f"plan, which others cannot exceed in cuda graph mode, got {num_rows}"
            )

    def _plan_batch(self, batch: Batch) -> int:
        """Plans a batch for the options that the next run is likely to have: those of the last
        forward(), or else the current ones."""
        self._num_rows = int(batch.qo_indptr[-1])
        self._attentions.set_batch(batch, self._bounds)
        if self._forward_key is None:
            options = functools.partial(self._options, self._shape)
            self._attentions.prepare(self._key(self._shape), options)
        else:
            self._attentions.prepare_again(self._forward_key)
        self._plan_info = self._attentions.generation
        if self._cached_module is None:
            self._cached_module = _PlanModule(self)
        return self._attentions.generation

    def _set_mask(
        self,
        batch: Batch,
        custom_mask: Tensor | None,
        packed_custom_mask: Tensor | None,
        items: Items | None = None,
    ) -> None:
        """Sets the mask for runs of this batch. CUDA graphs read it from a buffer that stays."""
        if items is not None:
            words = item_words(batch, items, self.device)
        elif custom_mask is not None or packed_custom_mask is not None:
            words = to_words(batch, custom_mask, packed_custom_mask, self.device)
        else:
            if not self._use_cuda_graph:
                self._mask = None
            return
        if not self._use_cuda_graph:
            self._mask = words
            return
        if self._mask is None:
            assert self._bounds is not None
            width = max(self._most_mask_words(), num_words(batch))
            with torch.inference_mode(False):  # so that it may be written in any mode
                zeros = torch.zeros(self._bounds[1], width, dtype=torch.int32, device=self.device)
                self._mask = zeros.view(torch.uint32)
        if words.shape[1] > self._mask.shape[1]:
            raise ValueError(
                f"custom_mask: expected requests of at most {32 * self._mask.shape[1]} keys, for "
                f"which there is a buffer in cudagraph mode, got {32 * words.shape[1]}"
            )
        place = self._mask.view(torch.int32)[: words.shape[0], : words.shape[1]]
        place.copy_(words.view(torch.int32))

    def _most_mask_words(self) -> int:
        """How many words a row of the mask that CUDA graphs read may need at most."""
        return 0

    def _key(self, shape: Shape | None) -> tuple[Any, ...]:
        """A value that is equal for equal options of `Attention`."""
        return (
            shape,
            self._causal,
            self._window_left,
            self._logits_soft_cap,
            self._sm_scale,
            self._pos_encoding_mode,
            self._rope_scale,
            self._rope_theta,
        )

    def _attention(self, shape: Shape | None) -> Attention:
        """The object that runs the planned batch with this shape."""
        return self._attentions.get(self._key(shape), functools.partial(self._options, shape))

    def _options(self, shape: Shape | None) -> dict[str, Any]:
        assert shape is not None
        softcap = float(self._logits_soft_cap)
        variant = rope = None
        q_dtype, kv_dtype = shape.q_dtype, shape.kv_dtype
        if self._pos_encoding_mode == "ALIBI":
            variant, softcap = alibi_variant(softcap), 0.0
        elif self._pos_encoding_mode == "ROPE_LLAMA":
            rope = rotation(self._rope_theta, self._rope_scale)
        if widens_keys(self._pos_encoding_mode, kv_dtype, self.device):
            q_dtype = kv_dtype = wide_dtype(q_dtype)
        return {
            "num_qo_heads": shape.num_qo_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": (shape.head_dim_qk, shape.head_dim_vo),
            "page_size": shape.page_size,
            "q_dtype": q_dtype,
            "kv_dtype": kv_dtype,
            "o_dtype": shape.o_dtype,
            "kv_layout": shape.kv_layout,
            "causal": self._causal and not shape.has_mask,  # FlashInfer's masks replace it
            "window_left": self._window_left,
            "custom_mask": shape.has_mask,
            "softcap": softcap,
            "softmax_scale": self._sm_scale,
            "variant": variant,
            "rope": rope,
            "batch_invariant": shape.batch_invariant,
            "lse_base2": True,
        }

    def _sinks_of(self, args: tuple[Any, ...]) -> Tensor:
        """Splits the positional arguments (sinks, sm_scale) of FlashInfer's variant AttentionSink:
        returns the sinks, and sets the scale of this run and later ones."""
        if not self._takes_sinks or len(args) != 2:
            raise UnsupportedError(
                "run: expected no arguments of a JIT variant but the sinks and sm_scale of "
                f"AttentionSink, got {len(args)}"
            )
        sinks: Tensor = args[0]
        self._sm_scale = float(args[1])
        return sinks

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        k_scale: float | Tensor,
        v_scale: float | Tensor | None,
        sinks: Tensor | None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        scale_q: float | Tensor | None = None,
        **tables: Any,
    ) -> Any:
        shape = read_as = self._shape
        if shape is not None:
            if q.dtype != self._q_data_type:
                raise ValueError(
                    f"q: expected the q_data_type of plan(), {self._q_data_type}, got {q.dtype}"
                )
            if is_8_bit(q.dtype):
                q, k_scale = read_queries(q, scale_q, shape.num_kv_heads, k_scale)
                read_as = shape._replace(q_dtype=q.dtype)
        attn = self._attention(read_as)
        assert shape is not None
        if k.dtype != shape.kv_dtype and k.dtype != torch.uint8:
            raise ValueError(
                f"k: expected the kv_data_type of plan(), {shape.kv_dtype}, got {k.dtype}"
            )
        if out is None and q.shape[0] != self._num_rows:  # q has more rows than were planned
            size = (q.shape[0], shape.num_qo_heads, shape.head_dim_vo)
            out = torch.empty(size, dtype=shape.o_dtype, device=q.device)
        mode = self._pos_encoding_mode
        if mode == "ALIBI":
            cap = float(self._logits_soft_cap)
            tables |= alibi_arguments(shape.num_qo_heads, cap, self.device)
        elif mode != "NONE" and widens_keys(mode, shape.kv_dtype, self.device):
            q = q.to(wide_dtype(q.dtype))
            k, v, tables = widened(k, v, tables, shape.kv_dtype, q.dtype)
        if lse_base != "log2" or lse_layout != "NH":
            one_of("lse_base", lse_base, ("log2", "ln"))
            one_of("lse_layout", lse_layout, ("NH", "HN"))
        given_lse, is_turned = lse, lse_layout == "HN"
        has_lse = return_lse or lse is not None
        if is_turned:
            lse = None
        elif has_lse and lse is None and q.shape[0] != self._num_rows:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        result = attn.run(
            q,
            k,
            v,
            out=out,
            lse=lse,
            return_lse=has_lse,
            k_scale=k_scale,
            v_scale=1.0 if v_scale is None else v_scale,
            mask=self._mask if shape.has_mask else None,
            sinks=sinks,
            **tables,
        )
        if not has_lse or (return_lse and lse_base == "log2" and not is_turned):
            return result
        converted = _converted(result[1], given_lse, lse_base, is_turned)
        return (result[0], converted) if return_lse else result[0]


def _converted(lse: Tensor, out: Tensor | None, lse_base: str, is_turned: bool) -> Tensor:
    """Converts lse, [tokens, heads] to base 2, to the base and the layout that the caller wants."""
    if lse_base == "ln":
        lse.mul_(_LN_2)
    if not is_turned:
        return lse
    return lse.t().contiguous() if out is None else out.copy_(lse.t())
