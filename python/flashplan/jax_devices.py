# SPDX-License-Identifier: Apache-2.0
"""An Attention for each of several devices of JAX, planned together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from flashplan import _core
from flashplan.attention import Attention
from flashplan.handles import new_handle
from flashplan.options import to_cuda_device
from flashplan.types import Lengths, PrefixRows


class AttentionOnDevices:
    """An Attention for each of several devices, which `flashplan.jax.on_devices` makes.

    One thread at a time may plan.

    Attributes:
        devices: those of JAX, each with an Attention of its own.
    """

    def __init__(self, attn: Attention, devices: Sequence[Any]) -> None:
        self.devices = _checked_devices(attn, devices)
        options = attn.options
        self._attentions = [Attention(**options | {"device": device}) for device in self.devices]
        numbers = [device.local_hardware_id for device in self.devices]
        self._plans = {x: attn._plan for x, attn in zip(numbers, self._attentions)}
        self._handle = new_handle(self)

    def __repr__(self) -> str:
        return f"on_devices({self._attentions[0]!r}, {list(self.devices)!r})"

    @property
    def options(self) -> dict[str, Any]:
        """The options of the first device's Attention: each device has these heads and bounds."""
        return self._attentions[0].options

    def plan(
        self,
        qo_indptr: Lengths,
        kv_lens: Lengths,
        kv_indptr: Lengths | None = None,
        *,
        shared_prefixes: PrefixRows | None = None,
        mask_begin: Lengths | None = None,
    ) -> _core.Plan:
        """Plans the same step on all devices.

        The arguments and errors are those of `Attention.plan`; there is no stream. Call it when the
        results of the step before are ready on all devices.

        Returns:
            The current plan of the first device. Those of the other devices are alike.
        """
        plans = [
            attn.plan(
                qo_indptr,
                kv_lens,
                kv_indptr,
                shared_prefixes=shared_prefixes,
                mask_begin=mask_begin,
            )
            for attn in self._attentions
        ]
        return plans[0]

    def _plan_on(self, device: int) -> _core.Plan:
        """The plan of the device that has this number in XLA."""
        if device not in self._plans:
            raise RuntimeError(
                f"attn: expected a call on a device with a number of {list(self._plans)}, "
                f"got {device}"
            )
        return self._plans[device]


def _checked_devices(attn: Any, devices: Sequence[Any]) -> tuple[Any, ...]:
    if not isinstance(attn, Attention):
        raise TypeError(f"attn: expected an Attention, got {type(attn).__name__}")
    wants_gpu = attn._plan.options.cuda_device is not None
    if not len(devices):
        raise ValueError("devices: expected one or more devices of JAX, got none")
    for i, device in enumerate(devices):
        if not isinstance(device, jax.Device):
            raise TypeError(f"devices[{i}]: expected a device of JAX, got {type(device).__name__}")
        if device.process_index != jax.process_index():
            raise ValueError(f"devices[{i}]: expected a device of this process, got {device}")
        if (to_cuda_device(device) is not None) != wants_gpu:
            kind = "GPU" if wants_gpu else "CPU"
            raise ValueError(f"devices[{i}]: expected a {kind}, as attn is for, got {device}")
        if device in devices[:i]:
            raise ValueError(f"devices[{i}]: expected each device once, got {device} again")
    return tuple(devices)
