# SPDX-License-Identifier: Apache-2.0
"""Verifies the drafts of a small model by the probabilities of a large one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, overload

import numpy as np
import numpy.typing as npt

from flashplan import _core
from flashplan.outputs import given_or_new, shape_of
from flashplan.sampling import random_number
from flashplan.types import Stream, Tensor, TensorT

if TYPE_CHECKING:
    from typing_extensions import Unpack


class VerifyOptions(TypedDict, total=False):
    """The keyword arguments of `speculative_verify`."""

    draft_parents: Tensor | None
    seed: int | Tensor
    offset: int | Tensor
    out: Tensor | None
    num_accepted: Tensor | None
    nodes: Tensor | None
    status: Tensor | None
    stream: Stream | None


@overload
def speculative_verify(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: npt.NDArray[Any],
    **options: Unpack[VerifyOptions],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]: ...
@overload
def speculative_verify(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: TensorT,
    **options: Unpack[VerifyOptions],
) -> tuple[TensorT, TensorT]: ...
def speculative_verify(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    *,
    draft_parents: Tensor | None = None,
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
    out: Tensor | None = None,
    num_accepted: Tensor | None = None,
    nodes: Tensor | None = None,
    status: Tensor | None = None,
    stream: Stream | None = None,
) -> tuple[Any, Any]:
    """Verifies drafts of a small model; the tokens have exactly the large model's distribution.

    A draft x that was drawn from q is accepted with probability min(1, p(x) / q(x)), where p is the
    large model's distribution. If it is not accepted, p becomes max(p - q, 0), normalised, and the
    next draft with the same parent is verified. If none is left, a token is drawn from p. The same
    arguments give the same tokens on every device.

    Args:
        draft_tokens: [batch, n] int32 or int64, n <= 512; -1: there is no such draft.
        draft_probs: [batch, n, vocab] of target_probs' dtype: row i is the distribution that draft
            i was drawn from. None: the drafts were not drawn but looked up, as n-grams are; the
            distribution of each is 1 for its own token and 0 for the others.
        target_probs: [batch, n + 1, vocab] float32, float16 or bfloat16 (also as uint16 memory):
            row 0 is the large model's distribution before all drafts, row i + 1 that after draft i.
        draft_parents: [n] or [batch, n] int32, for trees: the index of the draft that each draft
            follows, which is smaller than its own, or -1 for drafts that follow none. Drafts that
            were drawn and have the same parent must have been drawn independently. Default: draft i
            follows draft i - 1.
        seed, offset: as in `sample`, which draws other random numbers from them.
        out: [batch, n + 1] int32, written; default: a new tensor in target_probs' framework.
        num_accepted: [batch] int32, written; default: a new tensor in target_probs' framework.
        nodes: [batch, n] int32, written: the indices of the drafts that are accepted, then -1.
        status: [batch] int32, written: 0 for a good request. On a GPU, a request with an error gets
            tokens of -1, no accepted draft, and the status 7 (a row of probabilities is no
            distribution) or 8 (a draft is no token, or follows one that is not before it).
        stream: as in `Attention`; default: the current one of target_probs' framework. None on the
            CPU.

    Returns:
        (tokens, num_accepted). tokens has the accepted drafts, then one token that is drawn from
        the large model, then -1; num_accepted counts the accepted drafts.

    Raises:
        ValueError, TypeError: an argument is malformed, or, on the CPU, a draft is no token or
            follows a later one, or a row of probabilities that was needed as a whole does not sum
            to 1 within 1 %. Nothing was written.

    Examples:
        >>> draft_probs = np.full((1, 2, 4), 0.25, np.float32)
        >>> target_probs = np.array([[[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]], np.float32)
        >>> drafts = np.array([[1, 2]])
        >>> tokens, num_accepted = fp.speculative_verify(drafts, draft_probs, target_probs)
        >>> tokens, num_accepted
        (array([[1, 2, 3]], dtype=int32), array([2], dtype=int32))
    """
    parameters = (random_number("seed", seed), random_number("offset", offset))
    batch, *rows = shape_of(target_probs)[:2]
    tokens, finish = given_or_new(out, target_probs, (batch, *rows), "int32")
    counts, finish_counts = given_or_new(num_accepted, target_probs, (batch,), "int32")
    _core.speculative_verify(
        draft_tokens,
        draft_probs,
        target_probs,
        draft_parents,
        *parameters,
        tokens,
        counts,
        nodes,
        status,
        stream,
    )
    return finish(tokens), finish_counts(counts)
