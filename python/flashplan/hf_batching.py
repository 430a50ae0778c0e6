# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers (`generate_batch`) with flashplan's attention.

Transformers prepares a batch, whose lengths it knows on the host, and then computes it, maybe by
replaying a CUDA graph. It calls no function between the two, so `install` puts one there: it plans
all kinds of layers for the lengths of the batch. Layers, and graphs that were captured from them,
then only run.
"""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flashplan._core import UnsupportedError
from flashplan.attention import Attention
from flashplan.ops import append_paged_kv

if TYPE_CHECKING:
    from collections.abc import Callable

    # The type of a function that takes a function of transformers and returns its replacement.
    _Replacement = Callable[[Callable[..., Any]], Callable[..., Any]]

_PACKAGE = "transformers.generation.continuous_batching"
# Modules of that package that ask whether an implementation takes lengths instead of masks.
_ASKING = ("cache", "continuous_api", "initialization")
# Keyword arguments that transformers gives to each layer, and that attention does not need.
_UNUSED = (
    "cu_seq_lens_k",  # plan() gets the lengths of the requests on the host instead
    "max_length_q",
    "max_length_k",
    "read_index",
    "write_index",
    "logits_indices",
    "logits_processor_args",
)


class Batches:
    """The attention of one ModelRunner of transformers, and the lengths of its current batch."""

    def __init__(self, runner: Any) -> None:
        self._cache = runner.cache
        # Bounds for every batch: an Attention that a CUDA graph runs can not be replaced by a
        # larger one.
        self._bounds: dict[str, Any] = {
            "max_batch_size": runner.cb_config.max_requests_per_batch,
            "max_qo_tokens": runner.cache.max_batch_tokens,
        }
        self._is_padded: bool = runner.pad_inputs
        self._attentions: dict[tuple[Any, ...], Attention] = {}

    def begin(self, inputs: Any, num_requests: int) -> None:
        """Plans the attention of all kinds of layers for the batch that was just prepared.

        Args:
            inputs: ContinuousBatchingIOs or ContinuousBatchingAsyncIOs.
            num_requests: the number of requests, including those of length 0 that pad the batch.
        """
        self._stream = inputs.compute_stream
        pairs = getattr(inputs, "io_pairs", None)
        prepared = inputs if pairs is None else pairs[inputs.current_pair].host_io
        self._uses_pages: bool = prepared.use_block_table
        requests = prepared.requests_in_batch
        padding = [0] * (num_requests - len(requests))
        self._qo_indptr = [0]
        for length in [request.query_length for request in requests] + padding:
            self._qo_indptr.append(self._qo_indptr[-1] + length)
        self._kv_lens = {
            layer_type: [
                # position_offset already counts the queries of this batch, so they are subtracted
                allocator.get_seqlen_k(
                    request.state.position_offset - request.query_length, request.query_length
                )
                for request in requests
            ]
            + padding
            for layer_type, allocator in self._cache.cache_allocators.items()
        }
        for (layer_type, page_size, *_), attn in self._attentions.items():
            if (page_size is not None) == self._uses_pages:
                self._plan(attn, layer_type)

    def _plan(self, attn: Attention, layer_type: str) -> None:
        attn.plan(self._qo_indptr, self._kv_lens[layer_type], stream=self._stream)

    def run(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        *,
        cu_seq_lens: tuple[Tensor, Tensor],
        pages: tuple[Tensor, Tensor, Tensor] | None,
        **options: Any,
    ) -> Tensor:
        """The attention of a layer.

        Args:
            query: [1, num_qo_heads, tokens, head_dim].
            key, value: [1, num_kv_heads, tokens, head_dim]: those of all requests, one after the
                other; or, with pages, only new ones, which are written to their pages first.
            cu_seq_lens: cumulative lengths of queries and keys, int32 [num_requests + 1].
            pages: caches [pages, page_size, num_kv_heads, head_dim] and the page table, int32
                [num_requests, pages of a request]; transformers' pages of keys and values
                alternate in one tensor, and both caches are views of it.

        Returns:
            [1, tokens, num_qo_heads, head_dim]; queries that pad the batch get zeros.
        """
        layer_type = self._cache.layer_to_allocator[module.layer_idx].layer_type
        q = query[0].transpose(0, 1).contiguous()
        k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
        page_size = None if pages is None else pages[0].shape[1]
        heads_and_dims = (q.shape[1], k.shape[1], (q.shape[2], v.shape[2]))
        made_for = (layer_type, page_size, *heads_and_dims, q.dtype, k.dtype, *options.values())
        attn = self._attentions.get(made_for)
        if attn is None:
            attn = Attention(
                num_qo_heads=heads_and_dims[0],
                num_kv_heads=heads_and_dims[1],
                head_dim=heads_and_dims[2],
                page_size=page_size,
                q_dtype=q.dtype,
                kv_dtype=k.dtype,
                device=q.device,
                **options,
                **self._bounds,
            )
            self._plan(attn, layer_type)
            self._attentions[made_for] = attn
        block_table = None
        if pages is not None:
            # The views have every second page, so keys and values do not overlap. The table has
            # only even numbers, which are halved, and -1 behind the pages of a request.
            k_cache, v_cache, block_table = pages[0][::2], pages[1][::2], pages[2] // 2
            append_paged_kv(
                k,
                v,
                k_cache,
                v_cache,
                cu_seq_lens[0],
                cu_seq_lens[1].diff(),
                block_table=block_table,
            )
            k, v = k_cache, v_cache
        out = q.new_zeros(*q.shape[:2], v.shape[-1]) if self._is_padded else None
        return attn.run(q, k, v, block_table=block_table, sinks=sinks, out=out)[None]


class _Current(threading.local):
    """The batch that the ModelRunner of this thread computes now; None: it computes none."""

    batches: Batches | None = None


_current = _Current()
_of_runners: weakref.WeakKeyDictionary[Any, Batches] = weakref.WeakKeyDictionary()


def take(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Removes the keywords that describe a batch from those of a layer. Returns the ones that
    `attention` needs, or None if the layer does not compute a batch of `generate_batch`."""
    if _current.batches is None:
        return None
    lengths = (arguments.pop("cu_seq_lens_q"), arguments["cu_seq_lens_k"])
    pages = tuple(arguments.pop(name, None) for name in ("k_cache", "v_cache", "block_table"))
    for name in _UNUSED:
        arguments.pop(name, None)
    window = arguments.pop("sliding_window", None)
    return {
        "cu_seq_lens": lengths,
        "pages": None if pages[0] is None else pages,
        "window_left": -1 if window is None else window - 1,
    }


def attention(*arguments: Any, **options: Any) -> Tensor:
    """Calls `Batches.run` for the batch that this thread computes."""
    assert _current.batches is not None
    return _current.batches.run(*arguments, **options)


def install(name: str) -> None:
    """Makes `generate_batch` take an implementation of attention by this name.

    In a release of transformers that has other internals than those below, `generate_batch` refuses
    the name: transformers could otherwise compute with another implementation instead.
    """
    try:
        manager = importlib.import_module(f"{_PACKAGE}.continuous_api").ContinuousBatchingManager
    except (AttributeError, ModuleNotFoundError):
        return  # a release without continuous batching
    try:
        modules = {
            module: importlib.import_module(f"{_PACKAGE}.{module}")
            for module in (*_ASKING, "model_runner")
        }
        replaced = [
            (modules[module], "is_flash_attention_requested", _asked(name)) for module in _ASKING
        ]
        replaced += [
            (
                modules["initialization"],
                "ensure_decode_fast_path_is_available",
                _keeping_block_tables(name, modules["initialization"]),
            ),
            (modules["model_runner"].ModelRunner, "compute_batch", _planning(name)),
        ]
        originals = [getattr(owner, attribute) for owner, attribute, _ in replaced]
        for attribute in ("ATTN_TYPE_TO_ALLOCATOR", "group_layers_by_attn_type"):
            getattr(modules["initialization"], attribute)  # `_keeping_block_tables` needs them
    except (AttributeError, ModuleNotFoundError) as error:
        replaced, originals = [(manager, "__init__", _refusing(name, error))], [manager.__init__]
    for (owner, attribute, replacement), original in zip(replaced, originals):
        if not hasattr(original, "_flashplan"):  # not replaced by an earlier call
            function: Any = functools.wraps(original)(replacement(original))
            function._flashplan = True
            setattr(owner, attribute, function)


def _uses(name: str, config: Any) -> bool:
    implementation: str | None = config.get_text_config()._attn_implementation
    return implementation == name


def _asked(name: str) -> _Replacement:
    """Replaces is_flash_attention_requested(), by which transformers asks whether an implementation
    takes lengths as keywords instead of masks: the one of this name does."""

    def replacement(original: Callable[..., bool]) -> Callable[..., bool]:
        def is_flash_attention_requested(
            config: Any = None, requested_attention_implementation: str | None = None, **others: Any
        ) -> bool:
            if config is not None and _uses(name, config):
                return True
            if requested_attention_implementation == name:
                return True
            return original(config, requested_attention_implementation, **others)

        return is_flash_attention_requested

    return replacement


def _keeping_block_tables(name: str, initialization: Any) -> _Replacement:
    """Replaces a function that decides whether decodes read pages. By the replacement they do if
    all layers have full attention, on any device. The original also requires FlashAttention's
    function and CUDA."""

    def replacement(original: Callable[..., None]) -> Callable[..., None]:
        def ensure(config: Any, cb_config: Any, user_requested: bool) -> None:
            kinds = initialization.group_layers_by_attn_type(config)
            allocators = initialization.ATTN_TYPE_TO_ALLOCATOR
            if not _uses(name, config) or not all(
                allocators[kind].supports_block_table for kind in kinds
            ):
                original(config, cb_config, user_requested)

        return ensure

    return replacement


def _planning(name: str) -> _Replacement:
    def replacement(original: Callable[..., None]) -> Callable[..., None]:
        def compute_batch(runner: Any, model: Any, batch_data: dict[str, Any]) -> None:
            if not _uses(name, model.config):
                return original(runner, model, batch_data)
            batches = _of_runners.get(runner)
            if batches is None:
                batches = _of_runners[runner] = Batches(runner)
            batches.begin(runner.inputs_and_outputs, batch_data["cu_seq_lens_q"].numel() - 1)
            _current.batches = batches
            try:
                original(runner, model, batch_data)
            finally:
                _current.batches = None

        return compute_batch

    return replacement


def _refusing(name: str, error: Exception) -> _Replacement:
    def replacement(original: Callable[..., None]) -> Callable[..., None]:
        def initialize(manager: Any, model: Any, *arguments: Any, **options: Any) -> None:
            if _uses(name, model.config):
                version = importlib.import_module("transformers").__version__
                raise UnsupportedError(
                    "generate_batch: expected a release of transformers with the internals that "
                    f"flashplan.transformers knows, got {version} ({error})"
                )
            original(manager, model, *arguments, **options)

        return initialize

    return replacement
