# SPDX-License-Identifier: Apache-2.0
"""flashplan as an implementation of attention for Hugging Face transformers.

    import flashplan.transformers

    implementation = flashplan.transformers.register()  # "fplan"
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=implementation)

Transformers calls a function for the mask once per step, and one for attention in each layer. The
first one describes the mask by one range of keys for each sequence, or by bits where that is not
possible. The second one plans in the first layer that gets a new description; later layers with the
same options reuse that plan. Keys and values are read where the cache has them.
"""

from __future__ import annotations

import importlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

try:
    import torch

    # Imported without types: type checkers would take longer to read them than all else here.
    transformers: Any = importlib.import_module("transformers")
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        "flashplan.transformers: expected PyTorch and transformers (pip install torch "
        f"transformers), got: {_error}",
        name=_error.name,
    ) from None
from torch import Tensor

from flashplan import hf_batching
from flashplan._core import UnsupportedError
from flashplan.attention import Attention
from flashplan.hf_masks import Mask, mask, packed

if TYPE_CHECKING:
    from collections.abc import Callable

# Transformers takes every name that has "flash" in it for FlashAttention, so this one has not.
NAME = "fplan"
_HIDDEN = -1e4


def register() -> str:
    """Makes attn_implementation="fplan" known to transformers. May be called again.

    It is for inference, on the CPU and on GPUs, in the dtypes and head dims that `Attention` has
    there. It serves prompts, chunks of prompts and decoding, over DynamicCache and StaticCache or
    without a cache; grouped-query attention, sliding windows, softcap and sinks; padding on either
    side, and any masks that are the same for all heads. Rows of padding get zeros.

    Under autocast, and where queries are float32 beside values of 16 bits, it attends in 16 bits.

    A model that asks for more raises UnsupportedError: attention weights, position biases, keys
    selected by index, masks that differ between heads, and any keyword that could change the
    result. So does one that computes with its mask, such as Doge. Models that do not call
    registered implementations (Bloom, Falcon, MPT) keep their own: `set_attn_implementation` then
    warns, and a model made with the name raises an error. The functions break the graphs of
    torch.compile, so give `generate(..., disable_compile=True)` with a StaticCache on a GPU.

    Continuous batching (`generate_batch`) takes this implementation, too. For that, this function
    replaces functions of transformers by ones that also plan if a model has this implementation.

    Each thread keeps an `Attention`, with its workspace, for each kind of layer it has run.

    Returns:
        The name, "fplan".
    """
    without_compiling: Any = torch.compiler.disable
    transformers.AttentionInterface.register(NAME, without_compiling(attention))
    transformers.AttentionMaskInterface.register(NAME, without_compiling(mask))
    hf_batching.install(NAME)
    return NAME


def _mask_of_layer(
    module: torch.nn.Module,
    attention_mask: Tensor | None,
    shape: tuple[int, int, int],
    is_causal: bool | None,
) -> Tensor:
    """The description of a layer's mask; see `Mask`. `shape`: batch size, queries and keys."""
    batch_size, q_length, kv_length = shape
    if isinstance(attention_mask, Mask):
        return _described_for(attention_mask, q_length, kv_length)
    if attention_mask is not None:
        return _pack_given(attention_mask, shape)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal and q_length not in (1, kv_length):
        raise ValueError(
            f"attention_mask: expected one where {q_length} queries meet {kv_length} keys, got None"
        )
    row = (0, kv_length, kv_length - q_length, int(causal), -1)
    return torch.tensor([row] * batch_size, dtype=torch.int32)


def _described_for(mask: Mask, q_length: int, kv_length: int) -> Tensor:
    """The description of a mask, for a layer that may have more or fewer keys than the mask."""
    described, num_keys = mask.described, mask.shape[3]
    if num_keys == kv_length:
        return described
    if described.dtype == torch.int32:
        if num_keys > kv_length:
            return described
        first, end, _, is_causal, _ = described.unbind(1)
        if num_keys == 1 and (q_length == 1 or not is_causal.any()):
            # Encoders that generate with a cache make a mask for one key. Their own attention adds
            # it to the logits of all keys by broadcasting, so here it stands for all keys.
            rows = torch.zeros_like(described)
            rows[:, 1] = kv_length * (end > first)
            rows[:, 4] = -1
            return rows
    raise ValueError(f"attention_mask: expected one of {kv_length} keys, got {num_keys}")


def _pack_given(attention_mask: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The bits of a mask of four dims that the caller of the model has given."""
    expected = (shape[0], 1, *shape[1:])
    given = tuple(attention_mask.shape)
    if len(given) == 4 and given[1] != 1:
        raise UnsupportedError(f"attention_mask: expected one for all heads, got {given[1]}")
    if given not in (expected, (1, *expected[1:])):
        raise ValueError(f"attention_mask: expected shape {expected}, got {given}")
    if attention_mask.dtype == torch.bool:
        visible = attention_mask
    elif attention_mask.is_floating_point():
        visible = attention_mask == 0
        # Models hide a key by adding a very low number to its logit, often the lowest of their
        # dtype. From _HIDDEN down, the key's weight is 0 in float32 beside any visible key.
        if not bool((visible | (attention_mask <= _HIDDEN)).all()):
            raise UnsupportedError(
                f"attention_mask: expected 0 and numbers <= {_HIDDEN:g} (no bias), got others"
            )
    else:
        dtype = str(attention_mask.dtype).removeprefix("torch.")
        raise TypeError(f"attention_mask: expected dtype bool or a float, got {dtype}")
    return packed(visible.expand(expected))


class _Planned:
    """The `Attention` of all layers that have the same options, and the step it is planned for."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._attn: Attention | None = None
        self._max_batch_size = self._max_tokens = 0
        self._step: object = None

    def plan(self, step: object, num_tokens: int, lengths: Callable[[], _Lengths]) -> Attention:
        """Plans a step, unless it equals the step of the last call: equal steps have equal lengths.
        `lengths` returns the lengths of the step."""
        if self._attn is not None and step == self._step:
            return self._attn
        batch = lengths()
        if self._attn is None or batch.size > self._max_batch_size or num_tokens > self._max_tokens:
            # The bounds are powers of two, so that growing batches seldom need another object.
            self._max_batch_size = max(self._max_batch_size, 1 << (batch.size - 1).bit_length())
            self._max_tokens = max(self._max_tokens, 1 << (num_tokens - 1).bit_length())
            self._attn = None  # frees its memory before the new object allocates its own
            self._attn = Attention(
                **self._options,
                max_batch_size=self._max_batch_size,
                max_qo_tokens=self._max_tokens,
            )
        self._step = None
        self._attn.plan(
            batch.qo_indptr, batch.kv_lens, batch.kv_begins, mask_begin=batch.mask_begin
        )
        self._step = step
        return self._attn


class _Lengths:
    """The lists of lengths that `Attention.plan` gets."""

    def __init__(self) -> None:
        self.qo_indptr = [0]
        self.kv_lens: list[int] = []
        self.kv_begins: list[int] = []
        self.mask_begin: list[int] | None = None

    @property
    def size(self) -> int:
        return len(self.kv_lens)

    def add(self, qo_len: int, kv_len: int, kv_begin: int) -> None:
        if qo_len > 0:
            self.qo_indptr.append(self.qo_indptr[-1] + qo_len)
            self.kv_lens.append(kv_len)
            self.kv_begins.append(kv_begin)

    def finish(self) -> _Lengths:
        """Adds the last entry of kv_begins, which as kv_indptr must have one more than requests."""
        self.kv_begins.append(self.kv_begins[-1] + self.kv_lens[-1])
        return self


def _lengths_of_ranges(rows: list[list[int]], q_length: int, apart: int) -> _Lengths:
    """The lengths for masks that are ranges. Each sequence becomes a request with the keys of its
    range. If it has queries behind the last key, these become a second request, without keys."""
    lengths = _Lengths()
    for sequence, (first, end, q_begin, is_causal, _) in enumerate(rows):
        begin = sequence * apart + first
        num_queries = q_length
        if is_causal:
            num_queries = min(max(end - q_begin, 0), q_length)
            end = min(end, q_begin + q_length)
        kv_len = max(end - first, 0) if num_queries > 0 else 0
        lengths.add(num_queries, kv_len, begin)
        lengths.add(q_length - num_queries, 0, begin + kv_len)
    return lengths.finish()


def _lengths_of_bits(batch_size: int, q_length: int, kv_length: int, apart: int) -> _Lengths:
    """The lengths for masks of bits. Each request has all keys: the bits say which are seen."""
    lengths = _Lengths()
    for sequence in range(batch_size):
        lengths.add(q_length, kv_length, sequence * apart)
    lengths.mask_begin = [0] * batch_size
    return lengths.finish()


class _PerThread(threading.local):
    """The plans of each thread, since an Attention is for one thread at a time."""

    def __init__(self) -> None:
        self.planned: dict[tuple[Any, ...], _Planned] = {}


_per_thread = _PerThread()


def _planned_for(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> _Planned:
    """This thread's object for layers with these heads, dims, dtypes and options."""
    heads_and_dims = (q.shape[1], k.shape[1], (q.shape[3], v.shape[3]))
    key = (*heads_and_dims, q.dtype, k.dtype, q.device, *options.values())
    planned = _per_thread.planned.get(key)
    if planned is None:
        planned = _Planned(
            num_qo_heads=heads_and_dims[0],
            num_kv_heads=heads_and_dims[1],
            head_dim=heads_and_dims[2],
            page_size=None,
            q_dtype=q.dtype,
            kv_dtype=k.dtype,
            device=q.device,
            **options,
        )
        _per_thread.planned[key] = planned
    return planned


def _ragged(x: Tensor) -> tuple[Tensor, int]:
    """Keys or values [batch, heads, tokens, dim] as ragged rows [rows, heads, dim], and the number
    of rows from one sequence to the next.

    The rows are a view of x if the stride between sequences is a whole number of rows; rows between
    sequences then belong to other tokens or heads of the cache. Otherwise x is copied.
    """
    batch_size, num_heads, num_tokens, head_dim = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    apart, stride = num_tokens, x.stride(2)
    if num_tokens == 1:
        apart, stride = 1, x.stride(0)
    elif batch_size > 1:
        apart, rest = divmod(x.stride(0), max(stride, 1))
        if rest != 0 or apart < num_tokens:
            x = x.contiguous()
            apart, stride = num_heads * num_tokens, head_dim
    num_rows = (batch_size - 1) * apart + num_tokens
    return x.as_strided((num_rows, num_heads, head_dim), (stride, x.stride(1), 1)), apart


# Keyword arguments of layers that do not change the result of attention: the mask already describes
# sliding windows, and queries and keys are already rotated by their positions.
_HARMLESS = frozenset(
    {
        "sliding_window",
        "position_ids",
        "cache_position",
        "use_cache",
        "deterministic",
        "output_hidden_states",
        "output_router_logits",
        "num_items_in_batch",
        "return_dict",
        "logits_to_keep",
    }
)


def _check_inference(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout > 0:
        raise ValueError(f"dropout: expected 0 (inference only: model.eval()), got {dropout}")
    for name, value in kwargs.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise UnsupportedError(f"{name}: expected none with flashplan, got one")


def _common_dtype(module: torch.nn.Module, q: Tensor, v: Tensor) -> torch.dtype:
    """The dtype to which queries, keys and values are converted. Under autocast, or after a norm in
    float32, layers may give float32 queries beside values of 16 bits; and attention on GPUs takes
    no float32."""
    device = q.device.type
    if q.dtype != torch.float32:
        return q.dtype
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    if v.dtype != torch.float32 or device == "cpu":
        return v.dtype
    config: Any = getattr(module, "config", None)
    if hasattr(config, "_is_quantized"):  # its weights are not of the dtype that it computes in
        dtype: torch.dtype = config.dtype
        return dtype
    linear = next((m for m in module.modules() if isinstance(m, torch.nn.Linear)), None)
    return q.dtype if linear is None else linear.weight.dtype


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls for the attention of a layer.

    Args:
        query: [batch, num_qo_heads, q_length, head_dim].
        key, value: [batch, num_kv_heads, kv_length, head_dim], those of the cache included.
        attention_mask: the result of `mask`; or the caller's, bool or float [batch or 1, 1,
            q_length, kv_length]; or None for all keys, up to the diagonal if the layer is causal.
        s_aux: [num_qo_heads], the attention sinks: a logit for each head that belongs to no key.

    Returns:
        [batch, q_length, num_qo_heads, head_dim], and None in place of attention weights.
    """
    batch = hf_batching.take(kwargs)
    _check_inference(dropout, kwargs)
    dtype = _common_dtype(module, query, value)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch_size, num_qo_heads, q_length, _ = query.shape
    if batch_size * q_length == 0:
        return query.new_empty(batch_size, q_length, num_qo_heads, value.shape[3]), None
    sinks = None if s_aux is None else s_aux.detach().float()
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0}
    if batch is not None:
        return hf_batching.attention(module, query, key, value, sinks, **batch, **options), None
    shape = (batch_size, q_length, key.shape[2])
    described = _mask_of_layer(module, attention_mask, shape, is_causal)
    (k, apart), (v, v_apart) = _ragged(key), _ragged(value)
    if apart != v_apart:
        (k, apart), (v, _) = _ragged(key.contiguous()), _ragged(value.contiguous())

    step: tuple[Any, ...] = (*shape, apart)
    words, causal, window_left = None, False, -1
    if described.dtype == torch.uint32:
        words = described.to(query.device).view(batch_size * q_length, -1)
        lengths = partial(_lengths_of_bits, *step)
    else:
        ranges = described.tolist()
        causal, window_left = bool(ranges[0][3]), ranges[0][4]
        step = (*step, ranges)
        lengths = partial(_lengths_of_ranges, ranges, q_length, apart)
    planned = _planned_for(
        query,
        key,
        value,
        causal=causal,
        window_left=window_left,
        custom_mask=words is not None,
        **options,
    )
    attn = planned.plan(step, batch_size * q_length, lengths)
    q = query.transpose(1, 2).contiguous().flatten(0, 1)  # a projection's result is not copied
    o = attn.run(q, k, v, mask=words, sinks=sinks)
    return o.view(batch_size, q_length, *o.shape[1:]), None
