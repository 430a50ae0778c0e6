# SPDX-License-Identifier: Apache-2.0
"""flashplan: an attention engine for LLM serving.

Plan once per step, run once per layer, on tensors of any framework that speaks DLPack.
"""

from flashplan import variants
from flashplan._core import CudaError, UnsupportedError
from flashplan._core import version as _version
from flashplan.attention import Attention
from flashplan.device_data import check_device_data
from flashplan.filtering import filtered_probs, top_k_mask, top_k_renorm, top_p_renorm
from flashplan.masks import pack_mask
from flashplan.mla import append_mla, gather_mla
from flashplan.ops import append_paged_kv, merge_states, rope_append_paged_kv
from flashplan.penalties import apply_penalties
from flashplan.prefixes import find_shared_prefixes
from flashplan.quantize import quantize_fp8
from flashplan.rope import Rope, apply_rope
from flashplan.rows import (
    add_rmsnorm,
    gather_rows,
    gelu_and_mul,
    gelu_tanh_and_mul,
    layernorm,
    rmsnorm,
    silu_and_mul,
)
from flashplan.runtime import get_num_threads, set_num_threads, show_config
from flashplan.sampling import sample, softmax
from flashplan.speculative import speculative_verify
from flashplan.support import is_supported, workspace_bytes
from flashplan.variant import Variant

__version__ = _version()

__all__ = [
    "Attention",
    "CudaError",
    "Rope",
    "UnsupportedError",
    "Variant",
    "add_rmsnorm",
    "append_mla",
    "append_paged_kv",
    "apply_penalties",
    "apply_rope",
    "check_device_data",
    "filtered_probs",
    "find_shared_prefixes",
    "gather_mla",
    "gather_rows",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "get_num_threads",
    "is_supported",
    "layernorm",
    "merge_states",
    "pack_mask",
    "quantize_fp8",
    "rmsnorm",
    "rope_append_paged_kv",
    "sample",
    "set_num_threads",
    "show_config",
    "silu_and_mul",
    "softmax",
    "speculative_verify",
    "top_k_mask",
    "top_k_renorm",
    "top_p_renorm",
    "variants",
    "workspace_bytes",
]
