# SPDX-License-Identifier: Apache-2.0
"""Attention: options once, plan() once per step, run() once per layer."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, overload

from flashplan import _core
from flashplan.handles import new_handle
from flashplan.options import make_options, options_dict
from flashplan.outputs import given_or_kept, new_output, shape_of
from flashplan.rope import Rope
from flashplan.types import (
    BoundRun,
    Device,
    FloatDType,
    KvDType,
    KvLayout,
    Lengths,
    PrefixRows,
    Stream,
    Tensor,
    TensorT,
)
from flashplan.variant import Variant, packed_arguments


class Attention:
    """Attention of ragged query batches over a paged or ragged KV cache.

    Make one object for all layers that have the same options. Call plan() once per step with the
    lengths of the requests, and run() once per layer with the tensors.

    Args:
        num_qo_heads, num_kv_heads: number of heads of q and o, and of k and v. num_qo_heads is a
            multiple of num_kv_heads (grouped-query attention).
        head_dim: elements of a head in q, k, v and o; a pair (qk, vo) if q and k have another
            number than v and o. On a GPU at most 256.
        page_size: tokens per page of the cache; None if k and v are ragged tensors.
        q_dtype: "float16" or "bfloat16", on the CPU also "float32"; or a framework's dtype of that
            name.
        kv_dtype: dtype of k and v: that of q (default), "float8_e4m3fn" or "float8_e5m2".
        o_dtype: "float32", "float16" or "bfloat16"; default: that of q.
        causal: key j is visible to query i iff j <= i + kv_len - qo_len (bottom-right aligned).
        window_left: key j is visible iff j >= i + kv_len - qo_len - window_left; -1: no window. A
            window of W tokens that counts the query's own is window_left = W - 1.
        custom_mask: each run() takes a mask of bits, which hides further keys; see `pack_mask`.
        softmax_scale: multiplies q.k; a normal float32 > 0; default: 1 / sqrt(head_dim_qk).
        softcap: logits become softcap * tanh(logits / softcap); a normal float32 > 0, or 0 to turn
            this off.
        variant: an attention of your own; see `Variant`. It is compiled here: for the CPU by the
            machine's C++ compiler ($CXX, c++), for a GPU by NVRTC. This takes seconds once; the
            result is kept in FLASHPLAN_CACHE_DIR (~/.cache/flashplan).
        rope: queries and keys are rotated by their positions as they are read: the cache holds keys
            before rotation. Key j has position j, query i of a request kv_len - qo_len + i. When
            pages are removed from a page table, those after them get new positions, as StreamingLLM
            needs it. Shared prefixes are checked and not used. On a GPU keys have the dtype of q,
            and NVRTC compiles the kernel here, as it does for a variant.
        kv_layout: "NHD", pages [page_size, num_kv_heads, head_dim], or "HND".
        max_batch_size, max_qo_tokens: the most requests and rows of q that a plan() may have. All
            buffers are allocated for these bounds, once. On Hopper GPUs an object for decodes alone
            is faster if both are equal.
        device: `"cuda:<index>"` or `"cpu"`, or a framework's device; default: the first GPU, or the
            CPU where there is none.
        workspace: contiguous memory on the device (a NumPy, PyTorch or CuPy tensor of any dtype),
            used instead of memory that the object allocates. The object keeps the tensor alive; do
            not resize it. With less than workspace_bytes, long requests are split into fewer
            pieces. Objects may share a workspace if no two of their runs overlap: on the CPU a run
            that overlaps another one raises RuntimeError; on a GPU you must keep them in order,
            most simply by using one stream.
        num_ctas: number of work queues; default: as many CTAs as the GPU runs at once, or four
            queues per processor on the CPU.
        batch_invariant: the bits of a request's results do not depend on the other requests of the
            batch or on num_ctas.

    One thread at a time may use an object; a second one gets a RuntimeError. Objects can not be
    copied or pickled: make another one with the same options.

    On a GPU, plan() and run() put their work on a stream and return. `stream` is an int (a
    cudaStream_t) or an object with `__cuda_stream__`, .ptr (CuPy) or .cuda_stream (PyTorch).
    Without `stream`, run() uses the current stream of q's framework. plan() uses the current stream
    of the framework of the last run(); before the first run(), that of PyTorch if it is imported,
    else that of CuPy. JAX has no current stream: with its arrays both use a stream of the library,
    and run() returns when its work is done. The streams of plan() and run() may differ: the work of
    run() always waits for the plan. Tensors of PyTorch and CuPy must be ready on the stream of the
    call; the call waits for JAX arrays.

    A captured run() (torch.cuda.graph, CuPy's capture) computes, when it is replayed, whatever was
    planned last, so one graph serves every batch. Each replay must come after its plan() and before
    the next plan(): use one stream for both.

    Raises:
        ValueError, TypeError: an option is out of range or of the wrong type, or the variant does
            not compile.
        UnsupportedError: there is no kernel for the options, or no compiler for the variant.
        CudaError: a CUDA call failed.

    Examples:
        >>> attn = fp.Attention(8, 2, 64, page_size=None, q_dtype="float32", device="cpu")
        >>> plan = attn.plan([0, 1, 4], [30, 4])  # a decode over 30 keys, a prompt of 3 over 4
        >>> attn.run(np.ones((4, 8, 64), np.float32), *np.ones((2, 34, 2, 64), np.float32)).shape
        (4, 8, 64)
    """

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int | tuple[int, int],
        *,
        page_size: int | None = 16,
        q_dtype: FloatDType = "bfloat16",
        kv_dtype: KvDType | None = None,
        o_dtype: FloatDType | None = None,
        causal: bool = True,
        window_left: int = -1,
        custom_mask: bool = False,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        variant: Variant | None = None,
        rope: Rope | None = None,
        kv_layout: KvLayout = "NHD",
        max_batch_size: int = 256,
        max_qo_tokens: int = 8192,
        device: Device | None = None,
        workspace: Tensor | None = None,
        num_ctas: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        options = make_options(
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size=page_size,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            o_dtype=o_dtype,
            causal=causal,
            window_left=window_left,
            custom_mask=custom_mask,
            softmax_scale=softmax_scale,
            softcap=softcap,
            variant=variant,
            rope=rope,
            kv_layout=kv_layout,
            max_batch_size=max_batch_size,
            max_qo_tokens=max_qo_tokens,
            device=device,
            num_ctas=num_ctas,
            batch_invariant=batch_invariant,
        )
        self._plan = _core.Plan(options, workspace)
        filled = self._plan.options
        self._o_heads_and_dim = (filled.num_qo_heads, filled.head_dim_vo)
        self._o_dtype = filled.o_dtype.name
        self._num_qo_heads = filled.num_qo_heads
        self._variant = variant
        self._make_key_ranges = None if variant is None else variant._make_key_ranges
        self._rope = rope
        self._handle = new_handle(self)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}({options})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: expected a new object with the same options, "
            "got a request to copy or pickle this one"
        )

    @property
    def options(self) -> dict[str, Any]:
        """All options, defaults filled in: Attention(**attn.options) makes an equal object."""
        return options_dict(self._plan.options, self._variant, self._rope)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace in use. They depend on the options alone, not on the batches."""
        return self._plan.workspace_bytes

    def plan(
        self,
        qo_indptr: Lengths,
        kv_lens: Lengths,
        kv_indptr: Lengths | None = None,
        *,
        shared_prefixes: PrefixRows | None = None,
        mask_begin: Lengths | None = None,
        stream: Stream | None = None,
    ) -> _core.Plan:
        """Schedules one step on the host. Allocates nothing, and does not wait for the GPU.

        Args:
            qo_indptr: [batch_size + 1], begins with 0, ascends: request r has rows qo_indptr[r] to
                qo_indptr[r + 1] - 1 of q, possibly none.
            kv_lens: [batch_size]: number of keys of each request, with the keys of this step.
            kv_indptr: [batch_size + 1], ragged k and v only: the row of k and v at which each
                request begins; default: the running sum of kv_lens.
            shared_prefixes: [n, 3], n <= 2 * max_batch_size. A row (first_request, num_requests,
                num_tokens) says that these neighbouring requests begin with the same num_tokens
                keys. Two prefixes are nested or have no request in common. A prefix is no longer
                than kv_len - qo_len of each of its requests. Where it saves time, the keys of a
                prefix are read once for all of its requests, at the place of the first request's
                keys; results are the same up to rounding. Page tables need no change.
                `find_shared_prefixes` finds prefixes, and describe() of the plan says which of them
                are used. With a sliding window, a variant, `rope` or batch_invariant they are
                checked but not used.
            mask_begin: [batch_size] >= 0, with custom_mask only: the key of each request that bit 0
                of its mask stands for; default: kv_len - qo_len, the position of its first query,
                where the keys of a draft tree begin.
            stream: where the schedule is copied to the GPU; see the class. plan() waits only if
                four earlier copies are still under way. None on the CPU.

        Lengths are lists, tuples or ranges of ints (prefixes: lists of rows), or NumPy arrays or
        other tensors on the host, of any integer dtype.

        Returns:
            The current plan. It has describe(), kernel_name and work_tiles, and notebooks show it
            as a picture. The next plan() changes it.

        If plan() raises, the last plan stays valid.

        Raises:
            ValueError: a length or a shared prefix is out of range or over the bounds.
            TypeError: an argument has other elements than integers, or is not on the host.
            RuntimeError: `stream` is being captured into a CUDA graph.

        Examples:
            >>> attn = fp.Attention(8, 2, 64, q_dtype="float32", device="cpu")
            >>> plan = attn.plan([0, 1, 9], [200, 8])  # one new token of 200, a prompt of 8
            >>> print(plan.describe().splitlines()[2])
            2 requests, 9 query tokens, 208 keys
        """
        self._plan.plan(
            qo_indptr,
            kv_lens,
            kv_indptr,
            shared_prefixes,
            mask_begin,
            stream,
            self._make_key_ranges,
        )
        return self._plan

    @overload
    def run(
        self,
        q: TensorT,
        k: Tensor,
        v: Tensor,
        *,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: Literal[False] = False,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        stream: Stream | None = None,
        pdl: bool = False,
        **variant_arguments: Tensor | float,
    ) -> TensorT: ...
    @overload
    def run(
        self,
        q: TensorT,
        k: Tensor,
        v: Tensor,
        *,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: Literal[True],
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        stream: Stream | None = None,
        pdl: bool = False,
        **variant_arguments: Tensor | float,
    ) -> tuple[TensorT, TensorT]: ...
    @overload
    def run(
        self,
        q: TensorT,
        k: Tensor,
        v: Tensor,
        *,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: bool,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        stream: Stream | None = None,
        pdl: bool = False,
        **variant_arguments: Tensor | float,
    ) -> TensorT | tuple[TensorT, TensorT]: ...
    def run(
        self,
        q: TensorT,
        k: Tensor,
        v: Tensor,
        *,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: bool = False,
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
                [num_pages, num_kv_heads, page_size, head_dim] (HND). Any strides, the last
                dimension contiguous.
            block_table: [batch_size, max_pages] int32 page ids of each request, or
            page_indptr, page_indices: the same as CSR, [batch_size + 1] and [num_ids] int32.
                On a GPU their contents are not checked; only that block_table has enough columns
                for the longest request of the plan.
            kv_lens: [batch_size] int32 on the device: the real lengths, where plan() was given
                upper bounds. The result is that of a plan with these lengths: the position of query
                i among the keys is kv_len - qo_len + i. A length above the planned one counts as
                the planned one, a negative one as 0. A request with a shared prefix must have at
                least num_tokens + qo_len keys. Ragged k and v stay where they were planned. A
                captured run reads the lengths when it is replayed. None with a variant that has a
                key_range, which belongs to the planned lengths.
            mask: [tokens, words] uint32, with custom_mask: bit j % 32 of word j // 32 of row t says
                whether query t sees key mask_begin + j of its request. All queries see the keys
                before mask_begin. causal and window_left hide further keys.
            sinks: [num_qo_heads] float32 on the device: attention sinks, a logit for each query
                head that belongs to no key. exp(sink) is added to the denominator of the softmax of
                each row, and lse includes it; -inf adds nothing. softmax_scale and softcap do not
                apply to it. Of states that `merge_states` merges, only one may include sinks.
            out: [tokens, num_qo_heads, head_dim_vo]: where o is written; default: a new tensor in
                q's framework, on its current stream.
            lse: [tokens, num_qo_heads] float32: where the log-sum-exp of the logits is written
                (natural logarithm); default: nowhere, or a new tensor if return_lse.
            return_lse: whether to return (o, lse) instead of o.
            k_scale, v_scale: real key = k_scale * stored key. A number, or a float32 tensor on the
                device, [1] or [num_kv_heads], which the kernels read: a captured run reads it when
                it is replayed, and on a GPU its values are not checked. A tensor without dimensions
                is taken as one of [1] on a GPU, and as a number on the host.
            stream: where the work goes; see the class. None on the CPU.
            pdl: programmatic dependent launch, on GPUs of compute capability 9.0 and later: the
                kernel may begin while the one before it in the stream ends, which hides the latency
                of its launch. Results are the same: tensors are read and written only when all
                kernels before it have ended. Captured graphs keep it.
            variant_arguments: the tensors of the variant, contiguous and of the dtypes that it
                names, and those of its scalars that differ from their defaults. A captured run
                keeps the values of the scalars.

        All tensors are on one device. A uint8 or uint16 tensor is read as the dtype in the options,
        for frameworks that lack this dtype (CuPy: bfloat16 as uint16, 8-bit caches as uint8).
        Negated views of PyTorch are refused: pass their resolve_neg(). There is no backward pass:
        tensors of PyTorch that require grad are refused where gradients are recorded, so use
        torch.no_grad(). JAX arrays must have values: under jit and vmap call flashplan.jax.run.

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
        finish_o = finish_lse = None  # make the caller's kind of tensor of a new output
        if out is None:
            shape = (self._plan.num_tokens, *self._o_heads_and_dim)
            out, finish_o = new_output(q, shape, self._o_dtype)
        if lse is None and return_lse:
            lse, finish_lse = new_output(q, (self._plan.num_tokens, self._num_qo_heads), "float32")
        self._plan.run(
            q,
            k,
            v,
            block_table,
            page_indptr,
            page_indices,
            kv_lens,
            mask,
            sinks,
            out,
            lse,
            k_scale,
            v_scale,
            stream,
            pdl,
            own,
        )
        o = finish_o(out) if finish_o else out
        if not return_lse:
            return o
        return o, finish_lse(lse) if finish_lse else lse

    @overload
    def bind(
        self,
        q: TensorT,
        k: Tensor,
        v: Tensor,
        *,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: Literal[False] = False,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        pdl: bool = False,
        **variant_arguments: Tensor | float,
    ) -> BoundRun[TensorT]: ...
    @overload
    def bind(
        self,
        q: TensorT,
        k: Tensor,
        v: Tensor,
        *,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: Literal[True],
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        pdl: bool = False,
        **variant_arguments: Tensor | float,
    ) -> BoundRun[tuple[TensorT, TensorT]]: ...
    def bind(
        self,
        q: TensorT,
        k: Tensor,
        v: Tensor,
        *,
        block_table: Tensor | None = None,
        page_indptr: Tensor | None = None,
        page_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: bool = False,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        pdl: bool = False,
        **variant_arguments: Tensor | float,
    ) -> Any:
        """Prepares a run() on tensors that stay the same from step to step.

        bind() imports the tensors once, where run() imports them at each call. So a call of the
        result takes less time on the host. Otherwise it does what run() does with these arguments:
        it executes the plan that is current at the call, on the values that the tensors have then,
        with the same checks. A call may be captured into a CUDA graph.

        Args: those of run() except `stream`, which each call takes: `call(stream=None)`.

        The tensors are kept alive, and the memory that they have now is used: do not resize them.
        Make them as large as the bounds: a call is refused if the current plan needs larger ones.
        Rows of `out` and `lse` after those of the plan are not written.

        Returns:
            A function. It returns what run() returns, the same tensors at each call. Outputs that
            are not given are made here, with as many rows as q has.

        Raises:
            RuntimeError, ValueError, TypeError: as run(); what depends on the plan is raised by the
                call. `out` must be given if q is a JAX array, since those can not be written.

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
        own = packed_arguments(self._variant, variant_arguments)
        num_rows = shape_of(q)[:1]
        out = given_or_kept("out", out, q, (*num_rows, *self._o_heads_and_dim), self._o_dtype)
        if return_lse:
            lse = given_or_kept("lse", lse, q, (*num_rows, self._num_qo_heads), "float32")
        return self._plan.bind(
            q,
            k,
            v,
            block_table,
            page_indptr,
            page_indices,
            kv_lens,
            mask,
            sinks,
            out,
            lse,
            k_scale,
            v_scale,
            pdl,
            own,
            (out, lse) if return_lse else out,
        )
