"""
flashplan's C++ library; the documented surface is the package flashplan.
"""

from collections.abc import Sequence
import enum
from typing import NoReturn, SupportsIndex


class DType(enum.Enum):
    """Element types."""

    float32 = 0

    float16 = 1

    bfloat16 = 2

    float8_e4m3fn = 3

    float8_e5m2 = 4

    fp8_ds_mla = 8

class KernelGroup(enum.Enum):
    """Which kernels may run the batches of a plan."""

    all = 0

    general = 1

    hopper = 2

class Options:
    """AttentionOptions of include/flashplan/plan.h."""

    def __init__(self) -> None: ...

    @property
    def num_qo_heads(self) -> int: ...

    @num_qo_heads.setter
    def num_qo_heads(self, arg: int, /) -> None: ...

    @property
    def num_kv_heads(self) -> int: ...

    @num_kv_heads.setter
    def num_kv_heads(self, arg: int, /) -> None: ...

    @property
    def head_dim_qk(self) -> int: ...

    @head_dim_qk.setter
    def head_dim_qk(self, arg: int, /) -> None: ...

    @property
    def head_dim_vo(self) -> int: ...

    @head_dim_vo.setter
    def head_dim_vo(self, arg: int, /) -> None: ...

    @property
    def page_size(self) -> int: ...

    @page_size.setter
    def page_size(self, arg: int, /) -> None: ...

    @property
    def q_dtype(self) -> DType: ...

    @q_dtype.setter
    def q_dtype(self, arg: DType, /) -> None: ...

    @property
    def kv_dtype(self) -> DType: ...

    @kv_dtype.setter
    def kv_dtype(self, arg: DType, /) -> None: ...

    @property
    def o_dtype(self) -> DType: ...

    @o_dtype.setter
    def o_dtype(self, arg: DType, /) -> None: ...

    @property
    def causal(self) -> bool: ...

    @causal.setter
    def causal(self, arg: bool, /) -> None: ...

    @property
    def window_left(self) -> int: ...

    @window_left.setter
    def window_left(self, arg: int, /) -> None: ...

    @property
    def custom_mask(self) -> bool: ...

    @custom_mask.setter
    def custom_mask(self, arg: bool, /) -> None: ...

    @property
    def shared_kv(self) -> bool: ...

    @shared_kv.setter
    def shared_kv(self, arg: bool, /) -> None: ...

    @property
    def topk(self) -> int: ...

    @topk.setter
    def topk(self, arg: int, /) -> None: ...

    @property
    def softmax_scale(self) -> float | None: ...

    @softmax_scale.setter
    def softmax_scale(self, arg: float | None, /) -> None: ...

    @property
    def softcap(self) -> float: ...

    @softcap.setter
    def softcap(self, arg: float, /) -> None: ...

    @property
    def rope(self) -> Rope | None: ...

    @rope.setter
    def rope(self, arg: Rope | None, /) -> None: ...

    @property
    def variant(self) -> Variant: ...

    @variant.setter
    def variant(self, arg: Variant, /) -> None: ...

    @property
    def max_batch_size(self) -> int: ...

    @max_batch_size.setter
    def max_batch_size(self, arg: int, /) -> None: ...

    @property
    def max_qo_tokens(self) -> int: ...

    @max_qo_tokens.setter
    def max_qo_tokens(self, arg: int, /) -> None: ...

    @property
    def num_ctas(self) -> int: ...

    @num_ctas.setter
    def num_ctas(self, arg: int, /) -> None: ...

    @property
    def batch_invariant(self) -> bool: ...

    @batch_invariant.setter
    def batch_invariant(self, arg: bool, /) -> None: ...

    @property
    def lse_base2(self) -> bool: ...

    @lse_base2.setter
    def lse_base2(self, arg: bool, /) -> None: ...

    @property
    def kernels(self) -> KernelGroup: ...

    @kernels.setter
    def kernels(self, arg: KernelGroup, /) -> None: ...

    @property
    def hnd(self) -> bool: ...

    @hnd.setter
    def hnd(self, arg: bool, /) -> None: ...

    @property
    def cuda_device(self) -> int | None: ...

    @cuda_device.setter
    def cuda_device(self, arg: int | None, /) -> None: ...

def is_supported(options: Options) -> tuple[bool, str]: ...

def workspace_bytes(options: Options) -> int: ...

class Variant:
    """Variant of include/flashplan/variant.h."""

    def __init__(self, name: str, bodies: Sequence[str | None], softmax: bool, tensors: Sequence[tuple[str, str]], scalars: Sequence[tuple[str, float]]) -> None: ...

    def compile_log(self) -> str: ...

    def gpu_code(self, architecture: str, q_dtype: DType, kv_dtype: DType, head_dim_qk: int, head_dim_vo: int, softcap: bool, rope: Rope | None = None, family: str = 'sm80', few_rows_alone: bool = False) -> bytes:
        """
        The cubin for an architecture, such as 90 or 90a. Needs no GPU. For tests.
        """

def set_nvrtc_path(path: str) -> None: ...

class Plan:
    """The schedule of the last plan(), and the means to run it."""

    def __init__(self, options: Options, workspace: object | None = None) -> None: ...

    def plan(self, qo_indptr: object | None, kv_lens: object | None, kv_indptr: object | None = None, shared_prefixes: object | None = None, mask_begin: object | None = None, stream: object | None = None, make_key_ranges: object | None = None) -> None: ...

    def run(self, tensors: tuple[object, ...], stream: object | None, pdl: object | None, variant_arguments: object | None) -> None: ...

    def bind(self, tensors: tuple[object, ...], pdl: object | None, variant_arguments: object | None, result: object | None) -> BoundRun: ...

    def check_device_data(self, block_table: object | None, page_indptr: object | None, page_indices: object | None, num_pages: int, kv_lens: object | None, slot_mapping: object | None, stream: object | None) -> None: ...

    def describe(self) -> str:
        """The schedule as text: totals, then the first queues."""

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        """Refused: a copy would share what it points to."""

    @property
    def options(self) -> Options: ...

    @property
    def workspace_bytes(self) -> int: ...

    @property
    def kernel_name(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def tile_q(self) -> int: ...

    @property
    def num_ctas(self) -> int: ...

    @property
    def num_partial_rows(self) -> int: ...

    @property
    def cta_costs(self) -> list[int]:
        """Predicted cost of each queue."""

    @property
    def work_tiles(self) -> list[tuple[int, int, int, int, int, int, int, int]]:
        """
        Tuples (cta, segment, row_tile, kv_head, num_kv_heads, kv_begin, kv_end, partial_row), in the order of the queues. Segment r is request r; segments after the requests are shared prefixes.
        """

class BoundRun:
    """What Attention.bind() returns."""

    def __call__(self, stream: object | None = None) -> object: ...

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        """Refused: a copy would share what it points to."""

def find_shared_prefixes(qo_indptr: object, kv_lens: object, page_size: int, block_table: object | None, page_indptr: object | None, page_indices: object | None) -> list[tuple[int, int, int]]: ...

def merge_pair(o_a: object | None, lse_a: object | None, o_b: object | None, lse_b: object | None, out: object | None, lse: object | None, base2: bool, stream: object | None) -> None: ...

def merge_stack(o_a: object | None, lse_a: object | None, out: object | None, lse: object | None, base2: bool, stream: object | None) -> None: ...

def append_paged_kv(k: object | None, v: object | None, k_cache: object | None, v_cache: object | None, indptr: object | None, kv_lens: object | None, block_table: object | None, page_indptr: object | None, page_indices: object | None, slot_mapping: object | None, batch_indices: object | None, positions: object | None, hnd: bool, kv_dtype: object | None, k_scale: object | None, v_scale: object | None, stream: object | None) -> None: ...

def rope_append_paged_kv(q: object | None, k: object | None, v: object | None, k_cache: object | None, v_cache: object | None, indptr: object | None, kv_lens: object | None, rope: Rope, block_table: object | None, page_indptr: object | None, page_indices: object | None, hnd: bool, kv_dtype: object | None, k_scale: object | None, v_scale: object | None, out_q: object | None, stream: object | None) -> None: ...

def set_num_threads(num_threads: int) -> None: ...

def get_num_threads() -> int: ...

def cuda_device_count() -> int: ...

def built_for_cuda() -> bool:
    """Whether kernels for GPUs are compiled in, for any architecture."""

def show_config() -> str: ...

def version() -> str: ...

def framework_of(tensor: object | None) -> str:
    """The name of the framework in which outputs for a tensor are made."""

def raise_gradient(name: str) -> None:
    """Raises the ValueError for an argument that requires a gradient."""

def check_number_without_gradient(name: str, number: object | None) -> None:
    """
    Raises ValueError if a number is a tensor of which PyTorch would record a gradient.
    """

class Activation(enum.Enum):
    silu = 0

    gelu = 1

    gelu_tanh = 2

class RopeScaling(enum.Enum):
    linear = 0

    llama3 = 1

    yarn = 2

class Rope:
    def __init__(self) -> None: ...

    @property
    def theta(self) -> float: ...

    @theta.setter
    def theta(self, arg: float, /) -> None: ...

    @property
    def scale(self) -> float: ...

    @scale.setter
    def scale(self, arg: float, /) -> None: ...

    @property
    def rotary_dim(self) -> int: ...

    @rotary_dim.setter
    def rotary_dim(self, arg: int, /) -> None: ...

    @property
    def interleaved(self) -> bool: ...

    @interleaved.setter
    def interleaved(self, arg: bool, /) -> None: ...

    @property
    def scaling(self) -> RopeScaling: ...

    @scaling.setter
    def scaling(self, arg: RopeScaling, /) -> None: ...

    @property
    def original_length(self) -> float: ...

    @original_length.setter
    def original_length(self, arg: float, /) -> None: ...

    @property
    def low_freq_factor(self) -> float: ...

    @low_freq_factor.setter
    def low_freq_factor(self, arg: float, /) -> None: ...

    @property
    def high_freq_factor(self) -> float: ...

    @high_freq_factor.setter
    def high_freq_factor(self, arg: float, /) -> None: ...

    @property
    def beta_fast(self) -> float: ...

    @beta_fast.setter
    def beta_fast(self, arg: float, /) -> None: ...

    @property
    def beta_slow(self) -> float: ...

    @beta_slow.setter
    def beta_slow(self, arg: float, /) -> None: ...

    @property
    def truncate(self) -> bool: ...

    @truncate.setter
    def truncate(self, arg: bool, /) -> None: ...

    @property
    def attention_factor(self) -> float: ...

    @attention_factor.setter
    def attention_factor(self, arg: float, /) -> None: ...

    def set_frequencies(self, arg: Sequence[float], /) -> None: ...

def apply_rope(q: object | None, k: object | None, positions: object | None, rope: Rope, out_q: object | None, out_k: object | None, out_dtype: object | None, q_scale: object | None, k_scale: object | None, stream: object | None) -> None: ...

def apply_rope_table(q: object | None, k: object | None, positions: object | None, cos_sin_cache: object | None, interleaved: bool, out_q: object | None, out_k: object | None, out_dtype: object | None, q_scale: object | None, k_scale: object | None, stream: object | None) -> None: ...

def rmsnorm(x: object | None, weight: object | None, out: object | None, eps: object | None, gemma: bool, out_dtype: object | None, scale: object | None, stream: object | None) -> None: ...

def add_rmsnorm(x: object | None, residual: object | None, weight: object | None, out: object | None, eps: object | None, gemma: bool, out_dtype: object | None, scale: object | None, stream: object | None) -> None: ...

def layernorm(x: object | None, weight: object | None, bias: object | None, out: object | None, eps: object | None, out_dtype: object | None, scale: object | None, stream: object | None) -> None: ...

def quantize_fp8(x: object | None, out: object | None, dtype: DType, scale: object | None, found: object | None, stream: object | None) -> None: ...

def gated_activation(activation: Activation, x: object | None, out: object | None, out_dtype: object | None, scale: object | None, stream: object | None) -> None: ...

def gather_rows(x: object | None, indices: object | None, out: object | None, stream: object | None) -> None: ...

def append_mla(kv_c: object | None, k_pe: object | None, cache: object | None, cache_tail: object | None, slot_mapping: object | None, stored: DType, is_given: bool, scale: object | None, norm_weight: object | None, eps: object | None, rope: Rope | None, positions: object | None, q_pe: object | None, stream: object | None) -> None: ...

def gather_mla(cache: object | None, cache_tail: object | None, stored: DType, is_given: bool, block_table: object | None, kv_indptr: object | None, starts: object | None, out: object | None, out_tail: object | None, scale: object | None, stream: object | None) -> None: ...

def sample(logits: object | None, temperature: object | None, top_k: object | None, top_p: object | None, min_p: object | None, seed: object | None, offset: object | None, from_probs: bool, joint: bool, logit_bias: object | None, rows: object | None, out: object | None, logprobs: object | None, status: object | None, raw: bool, top_ids: object | None, top_logprobs: object | None, stream: object | None) -> None: ...

def filtered_probs(logits: object | None, temperature: object | None, top_k: object | None, top_p: object | None, min_p: object | None, from_probs: bool, joint: bool, logit_bias: object | None, out: object | None, status: object | None, stream: object | None) -> None: ...

def top_k_mask(logits: object | None, top_k: object | None, out: object | None, stream: object | None) -> None: ...

def speculative_verify(draft_tokens: object | None, draft_probs: object | None, target_probs: object | None, draft_parents: object | None, seed: object | None, offset: object | None, out: object | None, num_accepted: object | None, nodes: object | None, status: object | None, stream: object | None) -> None: ...

def apply_penalties(logits: object | None, history: object | None, history_lens: object | None, repetition: object | None, presence: object | None, frequency: object | None, stream: object | None) -> None: ...

def softmax(logits: object | None, temperature: object | None, out: object | None, stream: object | None) -> None: ...

def xla_handlers(on_cuda: bool) -> dict[str, object]:
    """
    Handlers of XLA's foreign function interface, by the names that XLA calls them by.
    """

class UnsupportedError(NotImplementedError):
    """Valid, but no kernel of this build can do it."""

class CudaError(RuntimeError):
    """A CUDA call failed."""
