# SPDX-License-Identifier: Apache-2.0
"""Attention: options once, plan() once per step, run() once per layer."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload
from weakref import WeakValueDictionary

from flashplan import _core
from flashplan.options import Options, make_options, options_dict, options_from
from flashplan.outputs import new_output
from flashplan.types import (
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

if TYPE_CHECKING:
    from typing_extensions import Unpack


# What stands for an object where none can go, as through operators of PyTorch.
_handles = itertools.count()
_attentions: WeakValueDictionary[int, Attention] = WeakValueDictionary()


class Attention:
    """Attention of ragged query batches over a paged or ragged KV cache.

    The FlashInfer paper's system: the KV cache is a block-sparse matrix whose column blocks are
    pages, partial results are attention states (o, lse), and a scheduler on the host turns the
    lengths of each step into balanced work (Algorithm 1).

    Args:
        num_qo_heads, num_kv_heads: heads of q and of k and v; the first is a multiple of the
            second (grouped-query attention).
        head_dim: of q and k, and of v and o; or a pair (qk, vo).
        page_size: tokens per page of the cache; None if k and v are ragged tensors.
        q_dtype: "float32", "float16" or "bfloat16", or a framework's dtype of that name.
        kv_dtype: as q (default), or "float8_e4m3fn" or "float8_e5m2".
        o_dtype: as q (default), or another of q's choices.
        causal: key j is visible to query i iff j <= i + kv_len - qo_len (bottom-right aligned).
        window_left: key j is visible iff j >= i + kv_len - qo_len - window_left; -1: all.
        custom_mask: each run() is given a mask of bits besides; see `pack_mask`.
        softmax_scale: multiplies q.k, a normal float32 > 0; default 1 / sqrt(head_dim_qk).
        softcap: logits become softcap * tanh(logits / softcap); a normal float32 > 0, or 0: off.
        variant: None; reserved for attention variants.
        kv_layout: "NHD", pages [page_size, num_kv_heads, head_dim], or "HND".
        max_batch_size, max_qo_tokens: bounds of every batch; they size all buffers, once.
        device: "cuda:<index>" or "cpu", or a framework's device; default: the first GPU, or the
            CPU where there is none.
        workspace: contiguous memory on the device (a NumPy, PyTorch or CuPy tensor of any dtype) to
            use instead of memory of the object's own. It is held, and must not be resized. Less
            than workspace_bytes means that long requests are split less. Objects may share one
            if their runs follow each other: on the CPU a run beside another one raises
            RuntimeError, on a GPU the order is yours to keep, most simply by one stream.
        num_ctas: work queues; default: as many as the device runs at once, several per processor
            on the CPU.
        batch_invariant: a request's results are bit-equal whatever its neighbours and num_ctas.

    An object is for one thread at a time; a second one gets a RuntimeError. It is not copied or
    pickled: make another one with the same options.

    On a GPU, plan() and run() put their work on a stream and return. `stream` is an int (a
    cudaStream_t) or an object with __cuda_stream__, .ptr (CuPy) or .cuda_stream (PyTorch). Without
    it run() takes the current stream of q's framework, and plan() that of the framework of the
    last run(): before the first one of PyTorch if it is imported, else of CuPy. Where a framework
    has no current stream (JAX) both take a stream of the library's own, and run() returns when it
    is done. The two streams may differ: run() always follows the plan. Tensors of PyTorch and CuPy
    must be ready on the stream of the call; JAX arrays are waited for.

    A captured run() (torch.cuda.graph, CuPy's capture) computes whatever was planned last when it
    is replayed, so one graph serves every batch. Only its replays are yours to order after plan()
    and before the next one: use one stream.

    Raises:
        ValueError, TypeError: an option is out of range or of the wrong type.
        UnsupportedError: there is no kernel for the options.
        CudaError: a CUDA call failed.
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
        variant: None = None,
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
        self._handle = next(_handles)
        _attentions[self._handle] = self

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
        """The options in use, every default filled in: Attention(**attn.options) is the same."""
        return options_dict(self._plan.options)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace in use: exact, from the bounds alone."""
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
        """Schedules one step. No synchronisation, no allocation.

        Args:
            qo_indptr: [batch_size + 1], from 0, ascending: rows of q of each request.
            kv_lens: [batch_size]: keys of each request, those of this step included.
            kv_indptr: [batch_size + 1], ragged k and v only: first row of each request; default:
                kv_lens cumulated.
            shared_prefixes: [n, 3] rows (first_request, num_requests, num_tokens): these requests
                are neighbours and begin with the same num_tokens keys. Prefixes are inside one
                another or apart, and no longer than kv_len - qo_len of a request that has them; n
                is up to 2 * max_batch_size. Where it pays, a prefix is read once for all of its
                requests, from the keys of the first; results are the same up to rounding. Page
                tables stay as they are. `find_shared_prefixes` finds prefixes, and describe() of
                the plan says what was made of them. With a window, in batch-invariant plans and by
                the sm90 kernels (Hopper, where max_qo_tokens > max_batch_size) they are checked
                and not used.
            mask_begin: [batch_size] >= 0, with custom_mask only: the key of each request that bit 0
                of its mask stands for; default: that at which its first query stands, kv_len -
                qo_len, where the keys of a draft tree begin.
            Each a list of ints (of rows), a NumPy array or any tensor on the host, of any integer
                dtype.
            stream: where the schedule is copied to the GPU; see the class. Several plans may be
                made ahead of the GPU; only with four copies under way does plan() wait for one.
                None on the CPU.

        Returns:
            A view of the current plan, for people: describe(), kernel_name, work_tiles, and a
            picture of the queues in notebooks. The next plan() changes it.

        Raises:
            ValueError: a length or a shared prefix is out of range or over the bounds. The last
                plan stays valid.
            TypeError: not integers, or not on the host.
            RuntimeError: the stream is being captured. The last plan stays valid.
        """
        self._plan.plan(qo_indptr, kv_lens, kv_indptr, shared_prefixes, mask_begin, stream)
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
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: Literal[False] = False,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        stream: Stream | None = None,
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
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: Literal[True],
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        stream: Stream | None = None,
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
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: bool,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        stream: Stream | None = None,
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
        out: TensorT | None = None,
        lse: TensorT | None = None,
        return_lse: bool = False,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        stream: Stream | None = None,
    ) -> Any:
        """Runs the planned attention. A row with no visible key gets o = 0, lse = -inf.

        NaN and infinity are results. A visible logit of NaN or +inf (before softcap: NaN) makes
        lse and all of o NaN in its row, a visible value of NaN its dim of o. A logit of -inf gives
        its key the weight 0, and lse = -inf says that no key has another weight.

        Args:
            q: [tokens, num_qo_heads, head_dim_qk]; may have more rows than were planned.
            k, v: ragged [kv_tokens, num_kv_heads, head_dim], or pages
                [num_pages, page_size, num_kv_heads, head_dim] (NHD) or
                [num_pages, num_kv_heads, page_size, head_dim] (HND). Any strides, the last
                dimension contiguous.
            block_table: [batch_size, max_pages] int32 page ids of each request, or
            page_indptr, page_indices: the same as CSR, [batch_size + 1] and [num_ids] int32.
                On a GPU what they contain is not checked; that block_table has columns for the
                longest request of the plan is.
            kv_lens: [batch_size] int32 on the device: the real lengths, where plan() was given
                upper bounds. The result is that of a plan with these lengths: query i of a request
                stands at key kv_len - qo_len + i. A length beyond the planned one counts as that
                one, a negative one as 0, and none may be too short for a shared prefix. Ragged k
                and v stay where they were planned. A captured run reads the lengths when it is
                replayed.
            mask: [tokens, words] uint32, with custom_mask: bit j % 32 of word j // 32 of row t says
                whether query t sees key mask_begin + j of its request. Keys before mask_begin are
                seen; causal and window_left hold besides.
            out: [tokens, num_qo_heads, head_dim_vo] to write to; default: a new tensor in q's
                framework, on its current stream.
            lse: [tokens, num_qo_heads] float32 to write the log-sum-exp of the logits to
                (natural logarithm).
            return_lse: return (o, lse); allocates lse unless it is given.
            k_scale, v_scale: real key = k_scale * stored key.
            stream: where the work goes; see the class. None on the CPU.

        Tensors are on one device. Memory of uint8 or uint16 stands for the dtype that was planned,
        for frameworks without it (CuPy: bfloat16 as uint16, 8-bit caches as uint8). Of a negated
        view of PyTorch give its resolve_neg(). There is no backward pass: tensors of PyTorch that
        require grad are refused where gradients are recorded, so use torch.no_grad(). JAX arrays
        must have values: run() does not work under jit, vmap or grad.

        Returns:
            o, or (o, lse).

        Raises:
            RuntimeError: no plan() yet; on the CPU, another run is using the workspace.
            ValueError, TypeError: a tensor disagrees with the plan, or what is written shares
                memory with another argument. Nothing was written.
        """
        if out is not None and (lse is not None or not return_lse):
            self._plan.run(
                q,
                k,
                v,
                block_table,
                page_indptr,
                page_indices,
                kv_lens,
                mask,
                out,
                lse,
                k_scale,
                v_scale,
                stream,
            )
            return (out, lse) if return_lse else out

        o, finish_o, finish_lse = out, None, None
        if out is None:
            shape = (self._plan.num_tokens, *self._o_heads_and_dim)
            o, finish_o = new_output(q, shape, self._o_dtype)
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
            o,
            lse,
            k_scale,
            v_scale,
            stream,
        )
        o = finish_o(o) if finish_o else o
        if not return_lse:
            return o
        return o, finish_lse(lse) if finish_lse else lse


def attention_of(handle: int) -> Attention:
    """The object that has this handle."""
    attn = _attentions.get(handle)
    if attn is None:
        raise RuntimeError("attn: expected an Attention of this process, got one that is gone")
    return attn


def is_supported(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int | tuple[int, int],
    **options: Unpack[Options],
) -> tuple[bool, str]:
    """Whether `Attention` has a kernel for the options, and if not, why.

    Takes the options of `Attention` but workspace. Options that are wrong rather than
    unsupported raise as they do there.
    """
    try:
        return _core.is_supported(options_from(num_qo_heads, num_kv_heads, head_dim, options))
    except _core.UnsupportedError as error:
        return False, str(error)


def workspace_bytes(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int | tuple[int, int],
    **options: Unpack[Options],
) -> int:
    """The `workspace_bytes` of an `Attention`, before there is one.

    Takes the options of `Attention` but workspace, and raises as it does.
    """
    return _core.workspace_bytes(options_from(num_qo_heads, num_kv_heads, head_dim, options))
