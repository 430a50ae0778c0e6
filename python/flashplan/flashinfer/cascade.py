# SPDX-License-Identifier: Apache-2.0
"""Merges of attention states, whose log-sum-exp s is a logarithm to base 2."""

import torch

import flashplan as fp


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flashplan.merge_states` of two states: v [tokens, heads, dim], s [tokens, heads]."""
    return fp.merge_states(v_a, s_a, v_b, s_b, base2=True)


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """`merge_state` into v and s. Tokens whose mask [tokens] is false keep their state."""
    if mask is not None:
        s_other = s_other.masked_fill(~mask.bool()[:, None], -torch.inf)
    fp.merge_states(v, s, v_other, s_other, out=v, lse=s, base2=True)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`flashplan.merge_states`: v [tokens, states, heads, dim], s [tokens, states, heads]."""
    states, lse = v.transpose(0, 1).contiguous(), s.transpose(0, 1).contiguous()
    return fp.merge_states(states, lse, base2=True)
