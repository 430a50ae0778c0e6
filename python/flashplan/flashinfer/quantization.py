# SPDX-License-Identifier: Apache-2.0
"""Packs booleans into bits, by operations of PyTorch."""

import torch


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """The elements of x, taken flat, as bits of uint8 [ceil(n / 8)]; the last byte ends with 0s.

    bitorder "big" puts the first element into the highest bit of a byte, "little" into the lowest.
    """
    if bitorder not in ("big", "little"):
        raise ValueError(f"bitorder: expected 'big' or 'little', got {bitorder!r}")
    bits = (x.flatten() != 0).to(torch.uint8)
    rows = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=x.device)
    shifts = places.flip(0) if bitorder == "big" else places
    return (rows << shifts).sum(1, dtype=torch.uint8)


def segment_packbits(
    x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs each segment of x [indptr[-1]] as `packbits` does. Each begins at a byte of its own.

    Returns the bytes, and at which of them each segment begins, shaped like indptr [segments + 1].
    The host waits for the lengths.
    """
    lens = indptr.diff()
    begins = torch.nn.functional.pad(((lens + 7) // 8).cumsum(0), (1, 0)).to(indptr.dtype)
    num_bits, num_bytes = torch.stack((indptr[-1], begins[-1])).tolist()
    shifts = torch.repeat_interleave(begins[:-1] * 8 - indptr[:-1], lens, output_size=num_bits)
    spread = torch.zeros(8 * num_bytes, dtype=torch.bool, device=x.device)
    places = torch.arange(num_bits, device=x.device) + shifts
    spread[places] = x.flatten()[:num_bits] != 0
    return packbits(spread, bitorder), begins
