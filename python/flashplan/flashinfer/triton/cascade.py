# SPDX-License-Identifier: Apache-2.0
"""The merges of `flashplan.flashinfer.cascade`, and a merge of segments of any lengths."""

import torch
from torch import Tensor

from flashplan.flashinfer.cascade import merge_state, merge_state_in_place, merge_states

__all__ = ["merge_state", "merge_state_in_place", "merge_states", "variable_length_merge_states"]


def variable_length_merge_states(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the states indptr[i] to indptr[i + 1] - 1 of each segment i, by operations of PyTorch.

    Args:
        v: [states, heads, head_dim].
        s: [states, heads] float32: log-sum-exp to base 2.
        indptr: [segments + 1].

    Returns:
        v [segments, heads, head_dim] and s [segments, heads]; an empty segment has 0 and -inf.
    """
    num_segments = len(indptr) - 1
    ids = torch.arange(num_segments, device=v.device)
    segment = ids.repeat_interleave(indptr.diff(), output_size=len(v))
    of_states = segment[:, None].expand_as(s)
    lowest = s.new_full((num_segments, s.shape[1]), -torch.inf)
    most = lowest.scatter_reduce(0, of_states, s, "amax")
    weights = torch.exp2(s - most[segment]).nan_to_num(0.0)  # without keys: -inf - -inf is NaN
    total = torch.zeros_like(most).index_add(0, segment, weights)
    sums = v.new_zeros(num_segments, *v.shape[1:], dtype=torch.float32)
    sums.index_add_(0, segment, weights[..., None] * v.float())
    merged = sums / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return merged.to(v.dtype), most + total.log2()
