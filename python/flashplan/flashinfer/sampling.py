# SPDX-License-Identifier: Apache-2.0
"""Sampling with FlashInfer's names.

A parameter is a number, or a tensor [batch]. Random numbers follow from seed and offset, if both
are given, else from the generator, by default PyTorch's for the device. `deterministic` and
`enable_pdl` have no effect: equal arguments give equal tokens. Rows of NaN get the token 0, and
False in `valid`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashplan as fp
from flashplan.flashinfer._renorm import (
    top_k_mask_logits,
    top_k_renorm_probs,
    top_p_renorm_probs,
)
from flashplan.flashinfer._sampling import draw, parameter, random_numbers

__all__ = [
    "chain_speculative_sampling",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

top_k_renorm_prob = top_k_renorm_probs
top_p_renorm_prob = top_p_renorm_probs


def softmax(
    logits: Tensor, temperature: float | Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """Calls `flashplan.softmax`: float32 probabilities of logits [batch, vocab] / temperature."""
    temperature = parameter("temperature", temperature, logits, torch.float32)
    return fp.softmax(logits, temperature)


def sampling_from_logits(
    logits: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> Tensor:
    """Draws a token from softmax(logits) of each row: [batch], int32 or of the dtype of indices.

    Args:
        indices: int32 or int64 [batch]: token i is drawn from row indices[i], with its parameters;
            default: from row i.

    Raises:
        ValueError: check_nan is True and there is NaN, for which the host waits; or, on the CPU,
            logits or a parameter are out of range.
    """
    return draw(logits, indices, generator, check_nan, seed, offset)[0]


def sampling_from_probs(
    probs: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """Draws a token from each row of probs [batch, vocab]: int32 [batch].

    Args:
        return_valid: also return bool [batch]: whether a row could be drawn from.

    The other arguments, and the errors, are those of `sampling_from_logits`.
    """
    results = draw(probs, indices, generator, check_nan, seed, offset, from_probs=True)
    return results if return_valid else results[0]


def top_p_sampling_from_probs(
    probs: Tensor,
    top_p: float | Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """Draws by `sampling_from_probs` among the fewest largest probabilities with a sum >= top_p."""
    results = draw(probs, indices, generator, check_nan, seed, offset, from_probs=True, top_p=top_p)
    return results if return_valid else results[0]


def top_k_sampling_from_probs(
    probs: Tensor,
    top_k: int | Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """Draws by `sampling_from_probs` among the top_k largest probabilities."""
    results = draw(probs, indices, generator, check_nan, seed, offset, from_probs=True, top_k=top_k)
    return results if return_valid else results[0]


def min_p_sampling_from_probs(
    probs: Tensor,
    min_p: float | Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """Draws by `sampling_from_probs` among probabilities >= min_p * the largest one."""
    results = draw(probs, indices, generator, check_nan, seed, offset, from_probs=True, min_p=min_p)
    return results if return_valid else results[0]


def top_k_top_p_sampling_from_probs(
    probs: Tensor,
    top_k: int | Tensor,
    top_p: float | Tensor,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """Draws by `sampling_from_probs` among the tokens that both filters keep.

    Args:
        filter_apply_order: "top_k_first": top_p applies to what top_k leaves, renormalised.
            "joint": both apply to probs.
    """
    _check_order(filter_apply_order)
    filters: Any = {"top_k": top_k, "top_p": top_p, "joint": filter_apply_order == "joint"}
    results = draw(probs, indices, generator, check_nan, seed, offset, from_probs=True, **filters)
    return results if return_valid else results[0]


def top_k_top_p_sampling_from_logits(
    logits: Tensor,
    top_k: int | Tensor,
    top_p: float | Tensor,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> Tensor:
    """Draws by `top_k_top_p_sampling_from_probs` with the probabilities softmax(logits)."""
    _check_order(filter_apply_order)
    filters: Any = {"top_k": top_k, "top_p": top_p, "joint": filter_apply_order == "joint"}
    return draw(logits, indices, generator, check_nan, seed, offset, **filters)[0]


def _check_order(filter_apply_order: str) -> None:
    if filter_apply_order not in ("top_k_first", "joint"):
        raise ValueError(
            f"filter_apply_order: expected 'top_k_first' or 'joint', got {filter_apply_order!r}"
        )


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verifies n drafts of each request by `flashplan.speculative_verify`.

    Args:
        draft_probs: [batch, n, vocab].
        draft_token_ids: [batch, n] int32 or int64.
        target_probs: [batch, n + 1, vocab].
        maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num: int32 [batch], to
            which the numbers are added.

    Returns:
        the tokens [batch, n + 1], -1 after the last one; how many drafts would be accepted if each
        was judged by itself; how many were accepted.
    """
    batch_size = draft_probs.shape[0]
    random = random_numbers(generator, seed, offset, batch_size, draft_probs.device)
    tokens, emitted = fp.speculative_verify(
        draft_token_ids, draft_probs, target_probs, seed=random[0], offset=random[1]
    )
    ids = draft_token_ids.long().unsqueeze(2)
    p, q = (x[:, : ids.shape[1]].gather(2, ids).squeeze(2) for x in (target_probs, draft_probs))
    uniform = torch.rand(p.shape, device=p.device, generator=generator)
    accepted = (uniform * q < p).sum(1).int()
    given = maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num
    numbers = [
        number if total is None else total.add_(number)
        for total, number in zip(given, (accepted, emitted))
    ]
    return tokens, numbers[0], numbers[1]
