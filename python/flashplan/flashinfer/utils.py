# SPDX-License-Identifier: Apache-2.0
"""Functions of FlashInfer's utils that engines import."""

from __future__ import annotations

import enum

import torch

from flashplan.flash_plans import power_of_two as next_positive_power_of_2

__all__ = [
    "MaskMode",
    "PosEncodingMode",
    "TensorLayout",
    "device_support_pdl",
    "get_compute_capability",
    "get_device_sm_count",
    "is_sm90a_supported",
    "next_positive_power_of_2",
]


class PosEncodingMode(enum.Enum):
    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class MaskMode(enum.Enum):
    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class TensorLayout(enum.Enum):
    NHD = 0
    HND = 1


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU: (major, minor)."""
    if device.type != "cuda":
        raise ValueError(f"device: expected a GPU, got {device}")
    capability: tuple[int, int] = torch.cuda.get_device_capability(device)
    return capability


def get_device_sm_count(device: torch.device) -> int:
    """The number of SMs of a GPU."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def is_sm90a_supported(device: torch.device) -> bool:
    """Whether a GPU has compute capability 9."""
    return device.type == "cuda" and get_compute_capability(device)[0] == 9


def device_support_pdl(device: torch.device) -> bool:
    """Whether a GPU can begin a kernel while the previous one of its stream still runs."""
    return device.type == "cuda" and get_compute_capability(device)[0] >= 9
