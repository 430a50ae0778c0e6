# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's names: modules, arguments by place, install(), and what raises."""

import inspect
import subprocess
import sys

import pytest

from flashinfer_cases import workspace

torch = pytest.importorskip("torch")

import flashplan as fp  # noqa: E402
import flashplan.flashinfer.logits_processor  # noqa: E402
from flashplan import flashinfer  # noqa: E402
from flashplan.flashinfer import _missing  # noqa: E402

MODULES = {
    "activation": ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"],
    "attention": ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"],
    "cascade": ["MultiLevelCascadeAttentionWrapper", "merge_state", "merge_states"],
    "decode": [
        "BatchDecodeWithPagedKVCacheWrapper",
        "fast_decode_plan",
        "trtllm_batch_decode_with_kv_cache",
    ],
    "mla": ["BatchMLAPagedAttentionWrapper"],
    "norm": ["rmsnorm", "fused_add_rmsnorm", "layernorm_quant"],
    "pod": ["PODWithPagedKVCacheWrapper", "BatchPODWithPagedKVCacheWrapper"],
    "page": ["append_paged_kv_cache", "get_seq_lens"],
    "prefill": [
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_fmha_v2_prefill",
    ],
    "quantization": ["packbits", "segment_packbits"],
    "rope": ["apply_rope_pos_ids", "apply_rope_with_cos_sin_cache_inplace"],
    "sampling": ["softmax", "top_k_top_p_sampling_from_probs"],
    "sparse": ["BlockSparseAttentionWrapper"],
    "topk": ["TopKTieBreak", "top_k"],
    "triton.cascade": ["merge_state"],
    "utils": ["get_compute_capability", "PosEncodingMode"],
}
# The positional arguments of FlashInfer 0.7.2, in its order.
ARGUMENTS = {
    "BatchDecodeWithPagedKVCacheWrapper": "float_workspace_buffer kv_layout use_cuda_graph "
    "use_tensor_cores paged_kv_indptr_buffer paged_kv_indices_buffer paged_kv_last_page_len_buffer "
    "backend jit_args",
    "BatchDecodeWithPagedKVCacheWrapper.plan": "self indptr indices last_page_len num_qo_heads "
    "num_kv_heads head_dim page_size pos_encoding_mode window_left logits_soft_cap q_data_type "
    "kv_data_type o_data_type data_type sm_scale rope_scale rope_theta non_blocking block_tables "
    "seq_lens fixed_split_size disable_split_kv q_len_per_req",
    "BatchPrefillWithPagedKVCacheWrapper": "float_workspace_buffer kv_layout use_cuda_graph "
    "qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf paged_kv_last_page_len_buf "
    "custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask",
    "BatchPrefillWithPagedKVCacheWrapper.plan": "self qo_indptr paged_kv_indptr paged_kv_indices "
    "paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk page_size head_dim_vo "
    "custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction sm_scale "
    "window_left logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type "
    "non_blocking prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr "
    "seq_lens seq_lens_q block_tables max_token_per_sequence max_sequence_kv fixed_split_size "
    "disable_split_kv",
    "BatchPrefillWithRaggedKVCacheWrapper.plan": "self qo_indptr kv_indptr num_qo_heads "
    "num_kv_heads head_dim_qk head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode "
    "use_fp16_qk_reduction window_left logits_soft_cap sm_scale rope_scale rope_theta q_data_type "
    "kv_data_type o_data_type non_blocking prefix_len_ptr token_pos_in_items_ptr "
    "token_pos_in_items_len max_item_len_ptr fixed_split_size disable_split_kv seq_lens "
    "seq_lens_q max_token_per_sequence max_sequence_kv v_indptr o_indptr",
    "BatchPODWithPagedKVCacheWrapper.plan": "self qo_indptr_p kv_indptr_p kv_indices_p "
    "last_page_len_p qo_indptr_d kv_indptr_d kv_indices_d last_page_len_d num_qo_heads "
    "num_kv_heads head_dim page_size pos_encoding_mode window_left q_data_type kv_data_type "
    "data_type sm_scale rope_scale rope_theta non_blocking",
    "BatchPODWithPagedKVCacheWrapper.run": "self q_p paged_kv_cache_p q_d paged_kv_cache_d "
    "custom_mask_p packed_custom_mask_p causal_p q_scale k_scale v_scale return_lse "
    "use_fp16_qk_reduction enable_pdl",
    "fast_decode_plan": "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim "
    "page_size pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type data_type "
    "sm_scale rope_scale rope_theta non_blocking fixed_split_size disable_split_kv q_len_per_req "
    "global_override_indptr_cpu",
    "single_decode_with_kv_cache": "q k v kv_layout pos_encoding_mode use_tensor_cores q_scale "
    "k_scale v_scale window_left logits_soft_cap sm_scale rope_scale rope_theta return_lse",
    "single_prefill_with_kv_cache": "q k v scale_q scale_k scale_v o_dtype custom_mask "
    "packed_custom_mask causal kv_layout pos_encoding_mode use_fp16_qk_reduction sm_scale "
    "window_left logits_soft_cap rope_scale rope_theta backend return_lse kv_cache_sf k_scale "
    "v_scale",
    "rope_quantize_fp8": "q_rope k_rope q_nope k_nope cos_sin_cache pos_ids is_neox quantize_dtype "
    "quant_scale_q quant_scale_kv q_rope_out k_rope_out q_nope_out k_nope_out enable_pdl backend",
    "mla_rope_quantize_fp8": "q_rope k_rope q_nope k_nope cos_sin_cache pos_ids is_neox "
    "quantize_dtype quant_scale_q quant_scale_kv q_rope_out k_rope_out q_nope_out k_nope_out "
    "enable_pdl",
    "rope_quantize_fp8_append_paged_kv_cache": "q_rope k_rope q_nope k_nope v cos_sin_cache "
    "pos_ids paged_kv_cache kv_indices kv_indptr batch_indices positions is_neox quantize_dtype "
    "quant_scale_q quant_scale_kv page_size kv_layout q_rope_out q_nope_out enable_pdl",
    "trtllm_fmha_v2_prefill": "qkv input_layout workspace_buffer seq_lens max_q_len max_kv_len "
    "bmm1_scale bmm2_scale batch_size cum_seq_lens_q cum_seq_lens_kv block_tables out out_dtype "
    "sinks pos_encoding_mode logits_soft_cap_scale mask_mode window_left chunked_attention_size "
    "save_softmax_stats skip_softmax_threshold_scale_factor",
    "logits_processor.LogitsPipe": "processors compile input_type custom_fusion_rules "
    "custom_validity_checks",
    "append_paged_kv_cache": "append_key append_value batch_indices positions paged_kv_cache "
    "kv_indices kv_indptr kv_last_page_len kv_layout",
    "top_k": "input k sorted deterministic tie_break dsa_graph_safe",
    "top_k_top_p_sampling_from_probs": "probs top_k top_p indices filter_apply_order deterministic "
    "generator check_nan seed offset return_valid",
}


@pytest.mark.parametrize("module", MODULES)
def test_modules(module):
    imported = __import__(f"flashplan.flashinfer.{module}", fromlist=["x"])
    for name in MODULES[module]:
        assert hasattr(imported, name)
        if module not in ("utils", "triton.cascade"):
            assert getattr(flashinfer, name) is getattr(imported, name)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_by_place(name):
    found = flashinfer
    for part in name.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters.values()
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_place == ARGUMENTS[name].split()


def test_every_name_is_there():
    assert all(hasattr(flashinfer, name) for name in flashinfer.__all__)
    assert flashinfer.__version__ == "0.7.2"


MISSING = [name for name in vars(_missing) if name[0] != "_" and name.islower() and "_" in name]


@pytest.mark.parametrize("name", sorted(set(MISSING) - {"annotations"}))
def test_what_is_missing(name):
    with pytest.raises(fp.UnsupportedError, match=f"^{name}: expected a function of flashplan"):
        getattr(flashinfer, name)(1, 2, any_argument=3)


INSTALLED = """
import flashplan.flashinfer
flashplan.flashinfer.install()
flashplan.flashinfer.install()  # again
import flashinfer
import flashinfer.decode as decode
import flashinfer.triton.cascade
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.cascade import merge_state
from flashinfer.logits_processor import LogitsPipe, Sample
from flashinfer.sampling import softmax
assert flashinfer is flashplan.flashinfer
assert decode is flashplan.flashinfer.decode
assert merge_state is flashinfer.triton.cascade.merge_state
import doctest
from flashplan.flashinfer import _install
results = doctest.testmod(_install)
assert (results.failed, results.attempted) == (0, 4)
"""
REFUSED = """
import sys, types
sys.modules["flashinfer"] = types.ModuleType("flashinfer")
import flashplan.flashinfer
try:
    flashplan.flashinfer.install()
except RuntimeError as error:
    assert "install: expected a process that has not imported flashinfer, got" in str(error)
else:
    raise SystemExit("was installed over another one")
assert "flashinfer.decode" not in sys.modules
"""


@pytest.mark.parametrize("program", [INSTALLED, REFUSED], ids=["installed", "refused"])
def test_install(program):
    subprocess.run([sys.executable, "-c", program], check=True)


def wrapper(name="BatchPrefillWithPagedKVCacheWrapper", **options):
    return getattr(flashinfer, name)(workspace(torch), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "cudnn"}, "backend: expected one of 'auto', 'fa2', 'fa3', got 'cudnn'"),
        ({"kv_layout": "BHND"}, "kv_layout: expected one of 'NHD', 'HND', got 'BHND'"),
        ({"jit_args": ["x"] * 13}, "jit_args: expected None or the variant AttentionSink"),
    ],
)
def test_options_of_wrappers(options, message):
    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"):
        with pytest.raises(fp.UnsupportedError, match=message):
            wrapper(name, **options)
    with pytest.raises(fp.UnsupportedError, match="kv_layout: expected one of 'NHD', got 'HND'"):
        wrapper("BatchPrefillWithRaggedKVCacheWrapper", kv_layout="HND")


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def plan(kind, indptr=(0, 2), last=(3,), rows=(0, 1), page_size=4, **options):
    options = {"q_data_type": torch.float32} | options
    heads = (4, 2, 64)
    if kind == "ragged":
        made = wrapper("BatchPrefillWithRaggedKVCacheWrapper")
        made.plan(ints(*rows), ints(*indptr), *heads, **options)
    elif kind == "decode":
        made = wrapper("BatchDecodeWithPagedKVCacheWrapper")
        made.plan(ints(*indptr), ints(0, 1), ints(*last), *heads, page_size, **options)
    else:
        made = wrapper()
        made.plan(ints(*rows), ints(*indptr), ints(0, 1), ints(*last), *heads, page_size, **options)
    return made


KINDS = ["paged", "ragged", "decode"]
NOT_SUPPORTED = [
    (KINDS, {"q_data_type": "float8_e4m3fn"}, "o_data_type: expected 16 bits"),
    (KINDS, {"pos_encoding_mode": "YARN"}, "pos_encoding_mode: expected one of .* got 'YARN'"),
    (["decode"], {"window_right": 3}, "window_right: expected <= 0, got 3"),
    (["ragged"], {"v_indptr": ints(0, 2)}, "v_indptr: expected None, got a tensor"),
    (["ragged"], {"o_indptr": ints(0, 1)}, "o_indptr: expected None, got a tensor"),
]


@pytest.mark.parametrize(("kinds", "options", "message"), NOT_SUPPORTED)
def test_plans_that_are_not_supported(kinds, options, message):
    for kind in kinds:
        with pytest.raises(fp.UnsupportedError, match=message):
            plan(kind, **options)


def test_wrong_plans():
    for kind in KINDS:
        with pytest.raises(TypeError, match="q_data_type: expected a torch.dtype .* got 'float17'"):
            plan(kind, q_data_type="float17")
        with pytest.raises(TypeError, match="kv_data_type: expected a torch.dtype .* got 7"):
            plan(kind, kv_data_type=7)
    for kind in ("paged", "decode"):
        with pytest.raises(ValueError, match=r"indptr: expected to ascend, got \[2, 0\]"):
            plan(kind, indptr=(2, 0))
        with pytest.raises(ValueError, match="last_page_len: expected <= page_size = 4, got 5"):
            plan(kind, last=(5,))
        with pytest.raises(ValueError, match="last_page_len: expected 1 elements, .* got 2"):
            plan(kind, last=(3, 1), rows=(0, 1, 2))
    ragged = wrapper("BatchPrefillWithRaggedKVCacheWrapper")
    with pytest.raises(TypeError, match="plan: expected lengths .* as torch.Tensor, got list"):
        ragged.plan([0, 1], ints(0, 1), 4, 2, 64)
    with pytest.raises(ValueError, match="q_len_per_req: .* without use_tensor_cores=True, got 2"):
        plan("decode", q_len_per_req=2)
    with pytest.raises(ValueError, match="q_len_per_req: expected >= 1, got 0"):
        plan("decode", q_len_per_req=0)
    decode = wrapper("BatchDecodeWithPagedKVCacheWrapper", use_tensor_cores=True)
    assert decode.use_tensor_cores
    few = (ints(0, 1), ints(0), ints(2), 4, 2, 64, 4)
    with pytest.raises(ValueError, match="q_len_per_req: expected a prior plan"):
        flashinfer.fast_decode_plan(decode, *few, q_data_type=torch.float32, q_len_per_req=2)
    with pytest.raises(ValueError, match="q_len_per_req: .* an empty KV range, got 2"):
        decode.plan(*few, q_data_type=torch.float32, q_len_per_req=3)


def test_dtypes_of_decodes():
    """data_type is that of k and v; of q only if q_data_type is None, as in FlashInfer."""
    for given, meant in (
        ({"data_type": "bfloat16", "q_data_type": None}, (torch.bfloat16, torch.bfloat16)),
        ({"q_data_type": "bfloat16"}, (torch.bfloat16, torch.bfloat16)),
        (
            {"data_type": torch.float8_e4m3fn, "q_data_type": "bfloat16"},
            (torch.bfloat16, torch.float8_e4m3fn),
        ),
        ({"q_data_type": None}, (torch.float16, torch.float16)),
    ):
        shape = plan("decode", **given)._shape
        assert (shape.q_dtype, shape.kv_dtype) == meant


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_runs(kind):
    q, cache = torch.ones(1, 4, 64), torch.ones(2, 4, 2, 64)
    sides = [torch.ones(2, 2, 64)] * 2 if kind == "ragged" else [(cache, cache)]
    made = plan(kind)
    made.run(q, *sides)
    with pytest.raises(ValueError, match=r"q: expected the q_data_type of plan\(\), torch.float32"):
        made.run(q.half(), *sides)
    halves = [x.half() for x in sides] if kind == "ragged" else [(cache.half(), cache.half())]
    with pytest.raises(ValueError, match=r"k: expected the kv_data_type of plan\(\)"):
        made.run(q, *halves)
    with pytest.raises(fp.UnsupportedError, match="kv_cache_sf: expected none, got a tensor"):
        made.run(q, *sides, kv_cache_sf=q)
    with pytest.raises(fp.UnsupportedError, match="run: expected no arguments of a JIT variant"):
        made.run(q, *sides, q, 0.5)
    if kind == "ragged":
        with pytest.raises(fp.UnsupportedError, match="o_scale: expected None or 1, got 2.0"):
            made.run(q, *sides, o_scale=2.0)
    else:
        exact = made.run(q, *sides)
        assert torch.equal(made.run(q, *sides, skip_softmax_threshold_scale_factor=0.5), exact)
    if kind == "paged":
        with pytest.raises(fp.UnsupportedError, match="use_fp16_softmax: expected none, got True"):
            made.run(q, *sides, use_fp16_softmax=True)
        with pytest.raises(RuntimeError, match=r"run: expected a plan\(\) before, got none"):
            wrapper().run(q, *sides)


def test_utilities():
    utils = flashinfer.utils
    cpu = torch.device("cpu")
    assert utils.next_positive_power_of_2(5) == 8
    assert not utils.is_sm90a_supported(cpu)
    assert not utils.device_support_pdl(cpu)
    with pytest.raises(ValueError, match="device: expected a GPU, got cpu"):
        utils.get_compute_capability(cpu)
    assert utils.PosEncodingMode["ALIBI"].value == 2
    assert utils.MaskMode.CUSTOM.value == 2
    assert utils.TensorLayout.HND.value == 1
