# SPDX-License-Identifier: Apache-2.0
"""Penalties of tokens that have occurred."""

from flashplan import _core
from flashplan.compiled import not_traced
from flashplan.sampling import penalty
from flashplan.types import Stream, Tensor


@not_traced("call flashplan.torch.apply_penalties")
def apply_penalties(
    logits: Tensor,
    history: Tensor,
    history_lens: Tensor,
    repetition: float | Tensor | None = None,
    presence: float | Tensor | None = None,
    frequency: float | Tensor | None = None,
    *,
    stream: Stream | None = None,
) -> None:
    """Changes the logits of tokens that have occurred, in place.

    In this order, in float32: positive logits are divided by `repetition`, others multiplied by it;
    `frequency` is subtracted for each time that the token occurred; `presence` is subtracted once.
    A parameter is a number for all requests, or a float32 tensor [batch] with one for each.

    Args:
        logits: [batch, vocab] float32, float16 or bfloat16 (also as uint16 memory), rows at any
            stride, written.
        history: [batch, max_len] int32 or int64: the tokens of each request, repeated ones as often
            as they occurred. On a GPU, tokens outside of the vocabulary are skipped.
        history_lens: [batch] int32: how many entries of each row of history count.
        repetition: finite, > 0; default: 1.
        presence, frequency: finite; default: 0.
        stream: as in `Attention`; default: the current one of logits' framework. None on the CPU.

    Raises:
        ValueError, TypeError: an argument is malformed, or shares memory with logits, or, on the
            CPU, a value is out of its range. Nothing was written.

    Examples:
        >>> logits = np.array([[2.0, -2.0, 1.0]], np.float32)
        >>> history, history_lens = np.array([[0, 1, 1]]), np.array([3], np.int32)
        >>> fp.apply_penalties(logits, history, history_lens, 2.0, 0.25, 0.5)
        >>> logits
        array([[ 0.25, -5.25,  1.  ]], dtype=float32)
    """
    _core.apply_penalties(
        logits,
        history,
        history_lens,
        penalty("repetition", repetition, 1.0),
        penalty("presence", presence, 0.0),
        penalty("frequency", frequency, 0.0),
        stream,
    )
