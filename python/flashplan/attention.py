# SPDX-License-Identifier: Apache-2.0
"""The class Attention: it takes options once, and plans once per step. runs.py has its run()."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from flashplan import _core
from flashplan.compiled import not_traced
from flashplan.handles import new_handle
from flashplan.options import make_options, options_dict
from flashplan.profiling import event
from flashplan.rope import Rope
from flashplan.runs import Runs
from flashplan.types import (
    Device,
    FloatDType,
    KernelGroup,
    KvDType,
    KvLayout,
    Lengths,
    MlaDType,
    PrefixRows,
    Stream,
    Tensor,
)
from flashplan.variant import Variant

_logger = logging.getLogger("flashplan")


class Attention(Runs):
    """Attention of ragged query batches over a paged or ragged KV cache.

    Make one object for all layers that have the same options. Call plan() once per step with the
    lengths of the requests, and run() once per layer with the tensors.

    Args:
        num_qo_heads, num_kv_heads: number of heads of q and o, and of k and v. num_qo_heads is a
            multiple of num_kv_heads (grouped-query attention).
        head_dim: elements of a head in q, k, v and o; a pair (qk, vo) if q and k have another
            number than v and o. At most 4096, on a GPU 256, on Hopper 512.
        page_size: tokens per page of the cache; None if k and v are ragged tensors.
        q_dtype: "float16" or "bfloat16", on the CPU also "float32"; or a framework's dtype of that
            name. With an 8-bit cache also "float8_e4m3fn", and on the CPU "float8_e5m2".
        kv_dtype: dtype of k and v: that of q (default), "float8_e4m3fn" or "float8_e5m2". With
            shared_kv and head_dim (576, 512) also "fp8_ds_mla", the format of DeepSeek V3.2: keys
            of 656 bytes (uint8), which are 512 float8_e4m3fn, 4 float32 scales of 128 dims each,
            and 64 bfloat16.
        o_dtype: "float32", "float16" or "bfloat16"; default: that of q, with 8-bit queries
            "bfloat16".
        causal: key j is visible to query i iff j <= i + kv_len - qo_len (bottom-right aligned).
        window_left: key j is visible iff j >= i + kv_len - qo_len - window_left; -1: no window. A
            window of W tokens that counts the query's own is window_left = W - 1.
        custom_mask: each run() takes a mask of bits, which hides further keys; see `pack_mask`.
        shared_kv: values are the first head_dim_vo dims of the keys, as in multi-head latent
            attention (MLA): run() takes no v. It needs num_kv_heads=1 and a softmax_scale, and
            allows neither `variant` nor `rope`. It runs on the CPU, and on Hopper GPUs for head_dim
            (576, 512) and (512, 512), there without softcap and not over "float8_e5m2".
        topk: with shared_kv and pages: the most keys that a query sees; each run() lists them
            (topk_indices). causal does not hide listed keys, and there are neither a window nor a
            mask. kv_lens of plan() are upper bounds, and plan() counts min(topk, kv_len) keys for
            each token.
        softmax_scale: multiplies q.k; a normal float32 > 0; default: 1 / sqrt(head_dim_qk), and
            none with shared_kv, because models scale by the head dim before compression.
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
            buffers are allocated for these bounds, once. For CUDA graphs of decodes let both be
            equal: on Hopper GPUs such graphs have one kernel instead of two.
        device: `"cuda:<index>"` or `"cpu"`, or a framework's device; default: the first GPU, or the
            CPU where there is none.
        workspace: contiguous memory on the device (a NumPy, PyTorch or CuPy tensor of any dtype),
            used instead of memory that the object allocates. The object keeps the tensor alive; do
            not resize it. With less than workspace_bytes, keys of long prompts may be rotated, or
            gathered from small pages, several times, and long requests are split into fewer pieces.
            Objects may share a workspace if no two of their runs overlap: on the CPU a run that
            overlaps another one raises RuntimeError; on a GPU you must keep them in order, most
            simply by using one stream.
        num_ctas: number of work queues. On a GPU a queue is a CTA or, for latent attention of more
            than 64 query rows of a request over an 8-bit cache, a pair of CTAs. With more queues
            than the GPU runs at once, some CTAs wait for others that can not start, so runs take
            longer. Default: as many as the GPU runs at once; on the CPU four queues per processor.
        batch_invariant: the bits of a request's results do not depend on the other requests of the
            batch or on num_ctas. On a Hopper GPU a batch of decodes and prompts then takes two
            kernels, as it does over an 8-bit cache; kernel_name and work_tiles are those of the
            prompts.
        lse_base2: the log-sum-exp that run() writes is a logarithm to base 2, as FlashInfer has it,
            not the natural one; `merge_states` takes such states with base2=True. Sinks are to base
            e all the same.
        kernels: "general" or "hopper": every batch runs on a kernel of this group, also where one
            of the other is faster, to compare them. "general" is for every GPU from compute
            capability 8.0 on, and for the CPU; "hopper" for compute capability 9.0 alone. Default:
            each batch runs on the faster one.

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
    the next plan(): use one stream for both. The graph refers to memory of this object and to its
    workspace: keep the object as long as the graph. A replay after it is gone reads freed memory,
    which nothing can notice.

    The stream of a plan() must exist until the next plan() on another stream has returned, or this
    object is gone: the other stream waits for the work on it. An object that was given as `stream`
    is kept alive until then. If you give an int, or make a stream of CuPy the current one, keep the
    stream yourself: CUDA crashes on a handle that was destroyed.

    The logger "flashplan" of Python's logging says at the level DEBUG what was made, and what each
    plan() chose: the kernel, why no other one, the tiles, the balance of the queues.

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
        q_dtype: KvDType = "bfloat16",
        kv_dtype: MlaDType | None = None,
        o_dtype: FloatDType | None = None,
        causal: bool = True,
        window_left: int = -1,
        custom_mask: bool = False,
        shared_kv: bool = False,
        topk: int | None = None,
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
        lse_base2: bool = False,
        kernels: KernelGroup | None = None,
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
            shared_kv=shared_kv,
            topk=topk,
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
            lse_base2=lse_base2,
            kernels=kernels,
        )
        super().__init__(_core.Plan(options, workspace), variant)
        self._make_key_ranges = None if variant is None else variant._make_key_ranges
        self._rope = rope
        self._handle = new_handle(self)
        if _logger.isEnabledFor(logging.DEBUG):
            # Logs a text: a handler that keeps the record must not keep this object alive.
            _logger.debug("made %s with %d bytes of workspace", repr(self), self.workspace_bytes)

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

    @not_traced("call it before")
    @event("flashplan.plan")
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
        """Schedules one step on the host. Allocates nothing.

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
            stream: where the schedule is copied to the GPU; see the class. plan() waits for the
                GPU only if four earlier copies are still under way. None on the CPU.

        Lengths are lists, tuples or ranges of ints (prefixes: lists of rows), or NumPy arrays or
        other tensors on the host, of any integer dtype.

        Returns:
            The current plan. It has describe(), kernel_name and work_tiles, and notebooks show it
            as a picture. The next plan() changes it.

        If plan() raises, the last plan stays valid; after a CudaError there may be none until the
        next plan(), and run() then raises RuntimeError.

        Raises:
            ValueError: a length or a shared prefix is out of range or over the bounds.
            TypeError: an argument has other elements than integers, or is not on the host.
            RuntimeError: `stream` is being captured into a CUDA graph.
            CudaError: a call of CUDA, or work that was on the GPU, failed.

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
        self._plan_stream = stream  # kept alive: a later plan() may wait for work on it
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug("planned: %s", self._plan.describe())
        return self._plan

    def _plan_on(self, _device: int) -> _core.Plan:
        """The plan for a call of XLA. There is only one, for one device: it refuses to run on
        tensors of another device."""
        return self._plan
