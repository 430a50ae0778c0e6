# SPDX-License-Identifier: Apache-2.0
"""The part of `Attention` that runs layers: run(), and bind() for many runs on the same memory."""

from __future__ import annotations

import inspect
from typing import Any, Literal, overload

from flashplan import _core
from flashplan.compiled import not_traced
from flashplan.mla import parts
from flashplan.outputs import given_or_kept, new_output, shape_of
from flashplan.profiling import event
from flashplan.types import BoundRun, Stream, Tensor, TensorT
from flashplan.variant import Variant, packed_arguments


class Runs:
    """The part of `Attention` that executes its current plan.

    Args:
        plan: the plan that run() and bound runs execute, as it is at each call.
        variant: the variant in the plan's options. It converts the arguments that it adds to run().
    """

    def __init__(self, plan: _core.Plan, variant: Variant | None) -> None:
        options = plan.options
        self._plan = plan
        self._variant = variant
        self._o_heads_and_dim = (options.num_qo_heads, options.head_dim_vo)
        self._o_dtype = options.o_dtype.name
        self._num_qo_heads = options.num_qo_heads

    @overload
    def run(
        self,
        q: TensorT | tuple[TensorT, Tensor],
        k: Tensor | tuple[Tensor, Tensor],
        v: Tensor | None = None,
        *,
        k_tail: Tensor | None = None,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        topk_indices: Tensor | None = None,
        topk_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: Literal[False] = False,
        q_scale: float | Tensor = 1.0,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        stream: Stream | None = None,
        pdl: bool = False,
        **variant_arguments: Tensor | float,
    ) -> TensorT: ...
    @overload
    def run(
        self,
        q: TensorT | tuple[TensorT, Tensor],
        k: Tensor | tuple[Tensor, Tensor],
        v: Tensor | None = None,
        *,
        k_tail: Tensor | None = None,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        topk_indices: Tensor | None = None,
        topk_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: Literal[True],
        q_scale: float | Tensor = 1.0,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        stream: Stream | None = None,
        pdl: bool = False,
        **variant_arguments: Tensor | float,
    ) -> tuple[TensorT, TensorT]: ...
    @overload
    def run(
        self,
        q: TensorT | tuple[TensorT, Tensor],
        k: Tensor | tuple[Tensor, Tensor],
        v: Tensor | None = None,
        *,
        k_tail: Tensor | None = None,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        topk_indices: Tensor | None = None,
        topk_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: bool,
        q_scale: float | Tensor = 1.0,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        stream: Stream | None = None,
        pdl: bool = False,
        **variant_arguments: Tensor | float,
    ) -> TensorT | tuple[TensorT, TensorT]: ...
    @not_traced("call flashplan.torch.run")
    @event("flashplan.run")
    def run(
        self,
        q: TensorT | tuple[TensorT, Tensor],
        k: Tensor | tuple[Tensor, Tensor],
        v: Tensor | None = None,
        *,
        k_tail: Tensor | None = None,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        topk_indices: Tensor | None = None,
        topk_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: bool = False,
        q_scale: float | Tensor = 1.0,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        stream: Stream | None = None,
        pdl: bool = False,
        **variant_arguments: Tensor | float,
    ) -> Any:
        """Runs the planned attention on the tensors of a layer.

        A row with no visible key gets o = 0 and lse = -inf; with sinks, lse is its sink. NaN and
        infinity raise no error. A visible logit of NaN or +inf (with softcap: of NaN) makes lse and
        all of o NaN in its row, and so does a sink of NaN or +inf; a visible value of NaN makes its
        dim of o NaN. A logit of -inf gives its key the weight 0; lse = -inf where all weights are
        0.

        Args:
            q: [tokens, num_qo_heads, head_dim_qk]; may have more rows than were planned.
            k, v: ragged [kv_tokens, num_kv_heads, head_dim], or pages
                [num_pages, page_size, num_kv_heads, head_dim] (NHD) or
                [num_pages, num_kv_heads, page_size, head_dim] (HND). The last dimension is
                contiguous, the other strides are any that are not negative. With shared_kv there is
                no v; q and k may each be a pair of tensors, with the first head_dim_vo dims and
                with the others; and k may lack the dimension of heads. With "fp8_ds_mla" the last
                dimension of k has 656 bytes.
            k_tail: [kv_tokens, any]: the last dims of ragged k, if all kv heads share them, as
                DeepSeek's heads share the rotated dims; k then has only the other dims. GPUs refuse
                it for keys of up to 128 dims, and Hopper's kernels refuse it with a variant or
                rope.
            block_table: [batch_size, max_pages] int32 page ids of each request, or
            page_indptr, page_indices: the page table as CSR, [batch_size + 1] and [num_ids] int32.
                An id that no query sees may be anything. On the CPU a visible id outside of the
                cache is an error; on a GPU its keys have the weight 0, and run() checks only that
                block_table has enough columns for the longest request of the plan. "What the
                device's data may hold" in docs/reference/errors.md has the rules, and
                `check_device_data` looks for violations.
            kv_lens: [batch_size] int32 on the device: the real lengths, where plan() was given
                upper bounds. The result is that of a plan with these lengths: the position of query
                i among the keys is kv_len - qo_len + i. A length above the planned one counts as
                the planned one, a negative one as 0. A request with a shared prefix must have at
                least num_tokens + qo_len keys. Ragged k and v stay where they were planned. A
                captured run reads the lengths when it is replayed. Must be None with a variant that
                has a key_range, because that was computed for the planned lengths.
            topk_indices: [tokens, 1 to topk] int32 on the device, with topk and instead of a page
                table: the keys that each token sees, page * page_size + row in page. Entries that
                name no key of the cache, such as -1, are skipped; a key that is listed twice counts
                twice. The first min(topk, kv_len) entries count, with the kv_len of plan(); on the
                CPU a key behind them is an error.
            topk_lens: [tokens] int32 on the device: how many entries of each list count; default:
                all. Later entries may be anything.
            mask: [tokens, words] uint32, with custom_mask: bit j % 32 of word j // 32 of row t says
                whether query t sees key mask_begin + j of its request. All queries see the keys
                before mask_begin. causal and window_left hide further keys.
            sinks: [num_qo_heads] float32 or bfloat16 (also as uint16 memory) on the device:
                attention sinks, a logit for each query head that belongs to no key. exp(sink) is
                added to the denominator of the softmax of each row, and lse includes it; -inf adds
                nothing. softmax_scale and softcap do not apply to it. Of states that `merge_states`
                merges, only one may include sinks.
            out: [tokens, num_qo_heads, head_dim_vo]: where o is written; default: a new tensor in
                q's framework, on its current stream.
            lse: [tokens, num_qo_heads] float32: where the log-sum-exp of the logits is written
                (natural logarithm, or to base 2 with lse_base2); default: nowhere, or a new tensor
                if return_lse.
            return_lse: whether to return (o, lse) instead of o.
            q_scale, k_scale, v_scale: real key = k_scale * stored key. A number, or a float32
                tensor on the device, [1] or [num_kv_heads], which the kernels read: a captured run
                reads it when it is replayed, and on a GPU its values are not checked. A tensor
                without dimensions is taken as one of [1] on a GPU, and as a number on the host.
                q_scale is for 8-bit queries; the query heads of a kv head share a scale.
            stream: where the work goes; see the class, which says how long streams and objects must
                live. None on the CPU.
            pdl: programmatic dependent launch, on GPUs of compute capability 9.0 and later: the
                kernel may begin while the one before it in the stream ends, which hides the latency
                of its launch. Results are the same: tensors are read and written only when all
                kernels before it have ended. Captured graphs keep it.
            variant_arguments: the tensors of the variant, contiguous and of the dtypes that it
                names, and scalars of the variant that differ from their defaults. A captured run
                keeps the values of the scalars.

        All tensors are on one device. A uint8 or uint16 tensor is read as the dtype in the options
        (sinks: as bfloat16), for frameworks that lack this dtype (CuPy: bfloat16 as uint16, 8-bit
        caches as uint8).
        Negated views of PyTorch, such as x.conj().imag, are refused: pass their resolve_neg().
        Negated views of as_strided() and torch._neg_view() are not recognised: their memory is read
        as it is. There is no backward pass: tensors of PyTorch that require grad are refused where
        gradients are recorded, so use torch.no_grad(). JAX arrays must have values: under jit and
        vmap call flashplan.jax.run.

        Returns:
            o, or (o, lse).

        Raises:
            RuntimeError: there was no plan() yet; on the CPU, another run is using the workspace.
            ValueError, TypeError: a tensor does not fit the plan, or out or lse shares memory with
                another argument. Nothing was written.

        Examples:
            >>> cache = np.ones((2, 4, 16, 2, 64), np.float32)  # k and v: 4 pages of 16 tokens
            >>> attn = fp.Attention(8, 2, 64, page_size=16, q_dtype="float32", device="cpu")
            >>> plan = attn.plan([0, 1, 2], [20, 3])
            >>> table = np.array([[2, 0], [3, 0]], np.int32)  # page ids; the second request has one
            >>> q = np.ones((2, 8, 64), np.float32)
            >>> o, lse = attn.run(q, *cache, block_table=table, return_lse=True)
            >>> o.shape, lse.shape
            ((2, 8, 64), (2, 8))
        """
        own = packed_arguments(self._variant, variant_arguments)
        q, q_tail = parts("q", q)
        k, k_tail = parts("k", k, k_tail)
        finish_o = finish_lse = None  # these convert new outputs to the caller's kind of tensor
        if out is None:
            shape = (self._plan.num_tokens, *self._o_heads_and_dim)
            out, finish_o = new_output(q, shape, self._o_dtype)
        if lse is None and return_lse:
            lse, finish_lse = new_output(q, (self._plan.num_tokens, self._num_qo_heads), "float32")
        tensors = (
            q,
            k,
            v,
            q_tail,
            k_tail,
            block_table,
            page_indptr,
            page_indices,
            kv_lens,
            topk_indices,
            topk_lens,
            mask,
            sinks,
            q_scale,
            k_scale,
            v_scale,
            out,
            lse,
        )
        self._plan.run(tensors, stream, pdl, own)
        o = finish_o(out) if finish_o else out
        if not return_lse:
            return o
        return o, finish_lse(lse) if finish_lse else lse

    @overload
    def bind(
        self,
        q: TensorT | tuple[TensorT, Tensor],
        k: Tensor | tuple[Tensor, Tensor],
        v: Tensor | None = None,
        *,
        k_tail: Tensor | None = None,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        topk_indices: Tensor | None = None,
        topk_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: Literal[False] = False,
        q_scale: float | Tensor = 1.0,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        pdl: bool = False,
        **variant_arguments: Tensor | float,
    ) -> BoundRun[TensorT]: ...
    @overload
    def bind(
        self,
        q: TensorT | tuple[TensorT, Tensor],
        k: Tensor | tuple[Tensor, Tensor],
        v: Tensor | None = None,
        *,
        k_tail: Tensor | None = None,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        topk_indices: Tensor | None = None,
        topk_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: Literal[True],
        q_scale: float | Tensor = 1.0,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        pdl: bool = False,
        **variant_arguments: Tensor | float,
    ) -> BoundRun[tuple[TensorT, TensorT]]: ...
    @not_traced("call flashplan.torch.run")
    def bind(
        self,
        q: TensorT | tuple[TensorT, Tensor],
        k: Tensor | tuple[Tensor, Tensor],
        v: Tensor | None = None,
        *,
        k_tail: Tensor | None = None,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        topk_indices: Tensor | None = None,
        topk_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: bool = False,
        q_scale: float | Tensor = 1.0,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        pdl: bool = False,
        **variant_arguments: Tensor | float,
    ) -> Any:
        """Prepares a run() on tensors that stay the same from step to step.

        bind() imports the tensors once, while run() imports them at each call. So a call of the
        function that bind() returns takes less time on the host. Otherwise it does what run() does
        with these arguments: it executes the plan that is current at the call, on the values that
        the tensors have then, with the same checks. A call may be captured into a CUDA graph.

        Args: those of run() except `stream`, which each call takes: `call(stream=None)`.

        The tensors are kept alive, and the memory that they have now is used: do not resize them.
        Make them as large as the bounds: a call is refused if the current plan needs larger ones.
        Rows of `out` and `lse` after those of the plan are not written.

        Returns:
            A function. It returns what run() returns, the same tensors at each call. Outputs that
            are not given are made here, with as many rows as q has.

        Raises:
            TypeError, ValueError: an argument has a wrong type or an unknown name, or q is a JAX
                array, which can not be written, and `out` is not given. Each call of the result
                makes the other checks of run(), against the plan that is current then.

        Examples:
            >>> attn = fp.Attention(8, 2, 64, page_size=None, q_dtype="float32", device="cpu")
            >>> q, out = np.ones((4, 8, 64), np.float32), np.zeros((4, 8, 64), np.float32)
            >>> k, v = np.ones((2, 34, 2, 64), np.float32)
            >>> call = attn.bind(q, k, v, out=out)
            >>> for kv_len in (31, 32, 33):
            ...     plan = attn.plan([0, 1], [kv_len])
            ...     o = call()
            >>> o is out, out[:2, 0, 0]
            (True, array([1., 0.], dtype=float32))
        """
        if "stream" in variant_arguments:
            raise TypeError("stream: expected none, since each call takes it, got one")
        own = packed_arguments(self._variant, variant_arguments)
        q, q_tail = parts("q", q)
        k, k_tail = parts("k", k, k_tail)
        num_rows = shape_of(q)[:1]
        out = given_or_kept("out", out, q, (*num_rows, *self._o_heads_and_dim), self._o_dtype)
        if return_lse:
            lse = given_or_kept("lse", lse, q, (*num_rows, self._num_qo_heads), "float32")
        tensors = (
            q,
            k,
            v,
            q_tail,
            k_tail,
            block_table,
            page_indptr,
            page_indices,
            kv_lens,
            topk_indices,
            topk_lens,
            mask,
            sinks,
            q_scale,
            k_scale,
            v_scale,
            out,
            lse,
        )
        return self._plan.bind(tensors, pdl, own, (out, lse) if return_lse else out)


# The methods are renamed so that Python's own errors about arguments name the class Attention,
# which users know.
for _method in (Runs.run, inspect.unwrap(Runs.run), Runs.bind):
    _method.__qualname__ = f"Attention.{_method.__name__}"
