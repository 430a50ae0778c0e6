# SPDX-License-Identifier: Apache-2.0
"""Joins the parts of uncompressed keys of latent attention, by operations of PyTorch.

`flashplan.Attention.run` takes the part that all heads share as `k_tail`, without a copy.
"""

from torch import Tensor

__all__ = ["concat_mla_k"]


def concat_mla_k(k: Tensor, k_nope: Tensor, k_rope: Tensor) -> None:
    """Writes to each head of k its own dims, then the dims that all heads share.

    Args:
        k: [tokens, heads, dim + shared dim], written.
        k_nope: [tokens, heads, dim].
        k_rope: [tokens, 1, shared dim].

    Raises:
        RuntimeError: the dtypes differ. Nothing was written.
    """
    for name, part in (("k_nope", k_nope), ("k_rope", k_rope)):
        if part.dtype != k.dtype:
            raise RuntimeError(f"{name}: expected the dtype of k, {k.dtype}, got {part.dtype}")
    dim = k_nope.shape[-1]
    k[..., :dim] = k_nope
    k[..., dim:] = k_rope
