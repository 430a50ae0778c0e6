# SPDX-License-Identifier: Apache-2.0
"""Attention of prompts with FlashInfer's names, of a batch of requests or of a single one."""

from flashplan.flashinfer._direct_fmha import trtllm_fmha_v2_prefill
from flashplan.flashinfer._direct_prompts import (
    trtllm_batch_context_with_kv_cache,
    trtllm_ragged_attention_deepseek,
)
from flashplan.flashinfer._missing import cudnn_batch_prefill_with_kv_cache
from flashplan.flashinfer._prefill import BatchPrefillWithPagedKVCacheWrapper
from flashplan.flashinfer._ragged import BatchPrefillWithRaggedKVCacheWrapper
from flashplan.flashinfer._single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "cudnn_batch_prefill_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
]
