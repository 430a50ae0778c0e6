# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's classes and functions on flashplan: code for it can import this instead.

    import flashplan.flashinfer as flashinfer

Classes and functions have the names, arguments, modules and errors of FlashInfer 0.7.2, on GPUs and
on the CPU, for PyTorch's tensors. Arguments that only choose among FlashInfer's kernels, or allow
them to be less exact, do not change results: backend, use_tensor_cores, enable_pdl,
use_fp16_qk_reduction, non_blocking, deterministic, skip_softmax_threshold_scale_factor. What
flashplan can not do raises UnsupportedError, which names the argument.
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        f"flashplan.flashinfer: expected PyTorch (pip install torch), got: {_error}",
        name=_error.name,
    ) from None

from flashplan.flashinfer import topk, triton, utils
from flashplan.flashinfer._install import install
from flashplan.flashinfer.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from flashplan.flashinfer.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from flashplan.flashinfer.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from flashplan.flashinfer.concat_ops import concat_mla_k
from flashplan.flashinfer.decode import (
    BatchDecodeMlaWithPagedKVCacheWrapper,
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    cudnn_batch_decode_with_kv_cache,
    fast_decode_plan,
    single_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from flashplan.flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashplan.flashinfer.norm import (
    fused_add_rmsnorm,
    fused_add_rmsnorm_quant,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    layernorm,
    layernorm_quant,
    rmsnorm,
    rmsnorm_quant,
)
from flashplan.flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)
from flashplan.flashinfer.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from flashplan.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    cudnn_batch_prefill_with_kv_cache,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
    trtllm_batch_context_with_kv_cache,
    trtllm_fmha_v2_prefill,
    trtllm_ragged_attention_deepseek,
)
from flashplan.flashinfer.quantization import packbits, segment_packbits
from flashplan.flashinfer.rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
    mla_rope_quantize_fp8,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
)
from flashplan.flashinfer.sampling import (
    chain_speculative_sampling,
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from flashplan.flashinfer.sparse import (
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
)
from flashplan.flashinfer.topk import (
    TopKTieBreak,
    top_k,
    top_k_page_table_transform,
    top_k_ragged_transform,
)

# Programs that look for FlashInfer compare its version: this is the one whose interface is here.
__version__ = "0.7.2"
__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "TopKTieBreak",
    "VariableBlockSparseAttentionWrapper",
    "__version__",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "chain_speculative_sampling",
    "concat_mla_k",
    "cudnn_batch_decode_with_kv_cache",
    "cudnn_batch_prefill_with_kv_cache",
    "fast_decode_plan",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_quant",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "get_batch_indices_positions",
    "get_seq_lens",
    "install",
    "layernorm",
    "layernorm_quant",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "min_p_sampling_from_probs",
    "mla_rope_quantize_fp8",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "packbits",
    "rmsnorm",
    "rmsnorm_quant",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
    "sampling_from_logits",
    "sampling_from_probs",
    "segment_packbits",
    "silu_and_mul",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "softmax",
    "top_k",
    "top_k_mask_logits",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
    "topk",
    "triton",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
    "utils",
    "xqa_batch_decode_with_kv_cache",
]
