# SPDX-License-Identifier: Apache-2.0
"""Packing of booleans into bits, in torch operations."""

import torch


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """The elements of x, taken flat, as bits of uint8 [ceil(n / 8)]; missing ones are 0.

    bitorder "big" puts the first element into the highest bit of a byte, "little" into the lowest.
    """
    if bitorder not in ("big", "little"):
        raise ValueError(f"bitorder: expected 'big' or 'little', got {bitorder!r}")
    bits = (x.flatten() != 0).to(torch.uint8)
    rows = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=x.device)
    shifts = places.flip(0) if bitorder == "big" else places
    return (rows << shifts).sum(1, dtype=torch.uint8)
