# SPDX-License-Identifier: Apache-2.0
"""The backend of attention for vLLM.

vLLM makes one builder for each group of layers, which describes each step to them, and one
implementation for each layer. The builder keeps an `Attention` for each kind of layer in its group,
and plans all of them in each step; so captured graphs serve every batch.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashplan._core import UnsupportedError
from flashplan.attention import Attention
from flashplan.ops import append_paged_kv
from flashplan.support import is_supported

# Imported without types: type checkers would take minutes, and vLLM is not installed where they
# run.
_vllm: Any = importlib.import_module("vllm.v1.attention.backend")

_FLOAT8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


class FlashplanBackend(_vllm.AttentionBackend):  # type: ignore[misc]
    """Tells vLLM what the backend supports, and which classes it consists of."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *_FLOAT8]
    accept_output_buffer = True
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashplanImpl]:
        return FlashplanImpl

    @staticmethod
    def get_builder_cls() -> type[FlashplanBuilder]:
        return FlashplanBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [_vllm.MultipleOf(8)]  # smaller pages would make prompts slower

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Releases up to 0.24 call this. Later ones choose the shape themselves: see `halves`."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether some GPU has a kernel; supports_combination() asks about the GPU in use."""
        return 0 < head_size <= 512

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """False: plan() takes the numbers of new tokens from the host, so these must be exact."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        *_others: Any,
        **_more: Any,
    ) -> str | None:
        """Why flashplan has no kernel for these options, or None."""
        page_size = 16 if block_size is None else block_size
        supported, reason = is_supported(
            num_qo_heads=1,
            num_kv_heads=1,
            head_dim=head_size,
            page_size=page_size,
            q_dtype=dtype,
            kv_dtype=stored_dtype(kv_cache_dtype, dtype),
        )
        return None if supported else reason


def stored_dtype(kv_cache_dtype: str | None, dtype: torch.dtype) -> Any:
    """The dtype of the values in a cache, from vLLM's name for it; "auto" is the model's dtype."""
    if kv_cache_dtype is None or kv_cache_dtype == "auto":
        return dtype
    return _FLOAT8.get(kv_cache_dtype, kv_cache_dtype)


def halves(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Views of a cache: keys and values, each [blocks, block_size, num_kv_heads, head_size].

    Args:
        kv_cache: [blocks, 2, block_size, num_kv_heads, head_size], or, after vLLM 0.24, [blocks,
            num_kv_heads, block_size, 2 * head_size], at any strides.
    """
    if kv_cache.ndim == 5:
        k_cache, v_cache = kv_cache.unbind(1)
        return k_cache, v_cache
    kv_cache = kv_cache.transpose(1, 2)
    return kv_cache[..., :head_size], kv_cache[..., head_size:]


@dataclasses.dataclass(frozen=True)
class Kind:
    """The options in which all layers that share an `Attention` agree."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    window_left: int
    softcap: float
    kv_cache_dtype: str


@dataclasses.dataclass
class FlashplanMetadata:
    """What the layers of a group need to know of a step."""

    attentions: dict[Kind, Attention]
    seq_lens: Tensor  # int32 [num_reqs] on the device: the real lengths
    block_table: Tensor  # int32 [num_reqs, max_blocks]
    slot_mapping: Tensor  # int64 [num_tokens]


class FlashplanBuilder(_vllm.AttentionMetadataBuilder):  # type: ignore[misc]
    """Plans a step for the layers of a group."""

    _cudagraph_support = _vllm.AttentionCGSupport.ALWAYS
    reorder_batch_threshold = None
    supports_update_block_table = False

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self._kinds = {layers[name].impl.kind for name in layer_names}
        dtype = vllm_config.model_config.dtype
        self._options: dict[str, Any] = {
            "page_size": kv_cache_spec.block_size,
            "q_dtype": dtype,
            "max_batch_size": vllm_config.scheduler_config.max_num_seqs,
            "max_qo_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
            "device": device,
            "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1",
        }
        self._attentions: dict[bool, dict[Kind, Attention]] = {}
        self._planned_for(is_causal=True)  # takes its memory now, before vLLM measures what is free

    def _planned_for(self, is_causal: bool) -> dict[Kind, Attention]:
        attentions = self._attentions.get(is_causal)
        if attentions is None:
            attentions = self._attentions[is_causal] = {}
            for kind in self._kinds:
                options = dataclasses.asdict(kind)
                name = options.pop("kv_cache_dtype")
                attentions[kind] = Attention(
                    **options,
                    kv_dtype=stored_dtype(name, self._options["q_dtype"]),
                    causal=is_causal,
                    **self._options,
                )
        return attentions

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashplanMetadata:
        """Plans a step for the lengths on the host, which may be upper bounds.

        Args:
            common_prefix_len: not used: vLLM counts a prefix for cascade attention only, which the
                backend does not ask for.
            common_attn_metadata: CommonAttentionMetadata.
            fast_build: not used: a plan takes microseconds.
        """
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise UnsupportedError("causal: expected a bool for all requests, got one for each")
        bounds = getattr(common, "seq_lens_cpu_upper_bound", None)
        if bounds is None:
            bounds = common.seq_lens_cpu  # in older releases; these lengths are exact
        attentions = self._planned_for(common.causal)
        for attn in attentions.values():
            attn.plan(common.query_start_loc_cpu, bounds)
        return FlashplanMetadata(
            attentions,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
        )


class FlashplanImpl(_vllm.AttentionImpl):  # type: ignore[misc]
    """Computes the attention of a layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise UnsupportedError("alibi_slopes: expected None with flashplan, got slopes")
        if attn_type != "decoder":
            raise UnsupportedError(f"attn_type: expected 'decoder', got {str(attn_type)!r}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        window_left = -1 if sliding_window is None else sliding_window - 1
        self.sliding_window = (window_left, -1 if window_left < 0 else 0)
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.kind = Kind(
            num_heads,
            self.num_kv_heads,
            head_size,
            self.scale,
            window_left,
            self.logits_soft_cap,
            kv_cache_dtype,
        )
        self._writes = kv_sharing_target_layer_name is None
        self._sinks = None if sinks is None else sinks.float()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: FlashplanMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Appends the new keys and values, and attends.

        Args:
            query: [num_tokens, num_heads, head_size]; rows that pad the batch are not read.
            key, value: [num_tokens, num_kv_heads, head_size].
            kv_cache: as `halves` takes it.
            attn_metadata: None in vLLM's measurement of memory, where the output is 0.
            output: [num_tokens, num_heads * head_size], or as query; written.
        """
        for name, scale in (
            ("output_scale", output_scale),
            ("output_block_scale", output_block_scale),
        ):
            if scale is not None:
                raise UnsupportedError(f"{name}: expected None with flashplan, got a tensor")
        if attn_metadata is None:
            return output.fill_(0)
        k_cache, v_cache = halves(kv_cache, self.head_size)
        scales: dict[str, Any] = {}
        if self.kv_cache_dtype in _FLOAT8:
            scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        if self._writes and key is not None and value is not None:
            append_paged_kv(
                key.view(-1, self.num_kv_heads, self.head_size),
                value.view(-1, self.num_kv_heads, self.head_size),
                k_cache,
                v_cache,
                slot_mapping=attn_metadata.slot_mapping,
                kv_dtype=stored_dtype(self.kv_cache_dtype, query.dtype),
                **scales,
            )
        attn_metadata.attentions[self.kind].run(
            query.view(-1, self.num_heads, self.head_size),
            k_cache,
            v_cache,
            block_table=attn_metadata.block_table,
            kv_lens=attn_metadata.seq_lens,
            sinks=self._sinks,
            out=output.view(-1, self.num_heads, self.head_size),
            **scales,
        )
        return output
