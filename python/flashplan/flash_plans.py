# SPDX-License-Identifier: Apache-2.0
"""Plans, a workspace, and lengths that were copied to the host. Functions without a plan() of their
own, those of `flashplan.flash_attn` and some of `flashplan.flashinfer`, keep them between calls."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from flashplan.attention import Attention
from flashplan.support import workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

# The arguments qo_indptr, kv_lens and kv_indptr of `Attention.plan`.
Lengths: TypeAlias = tuple[list[int], list[int], list[int] | None]

# How many objects of `Attention` are kept. Calls use the same object if they have equal options and
# equal bounds, after the bounds are rounded up to powers of two. An object that a CUDA graph runs
# is kept for ever and not counted.
MAX_KEPT = 64
# How many copies of lengths are kept: several, because layers of one step may have different
# lengths, as those of encoders and decoders have.
MAX_LENGTHS = 8


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def power_of_two(number: int) -> int:
    """The smallest power of two that is >= number."""
    return 1 << max(number - 1, 0).bit_length()


def large_enough(workspace: Tensor | None, num_bytes: int, device: torch.device) -> Tensor:
    """`workspace` if it has at least num_bytes, else a new one."""
    if workspace is not None and workspace.nbytes >= num_bytes:
        return workspace
    # Makes an ordinary tensor even if the caller is in inference mode: later calls may not be.
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class _Planned:
    """An Attention, and the step that it is planned for."""

    def __init__(self, attn: Attention) -> None:
        self.attn = attn
        self.step: Hashable = None


class _Copied:
    """Tensors of lengths on a GPU, and their values."""

    def __init__(self, tensors: tuple[Tensor, ...], values: list[list[int]]) -> None:
        self._references = [weakref.ref(tensor) for tensor in tensors]
        self._states = [_state(tensor) for tensor in tensors]
        self.values = values

    def is_of(self, tensors: tuple[Tensor, ...]) -> bool:
        return (
            len(tensors) == len(self._references)
            and all(reference() is tensor for reference, tensor in zip(self._references, tensors))
            and self._states == [_state(tensor) for tensor in tensors]
        )


def _state(tensor: Tensor) -> tuple[int, int, torch.Size]:
    """A value that differs after PyTorch has written to the tensor, unless it was made in inference
    mode: such tensors do not count writes."""
    version = -1 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.shape


class Plans(threading.local):
    """The plans of one thread, because an Attention is for one thread at a time."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, _Planned] = OrderedDict()
        self._captured: dict[Hashable, list[_Planned]] = {}
        self._workspaces: dict[torch.device, Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._copied: deque[_Copied] = deque(maxlen=MAX_LENGTHS)

    def attention(
        self,
        device: torch.device,
        options: dict[str, Any],
        bounds: tuple[int, int],
        step: Hashable,
        lengths: Callable[[], Lengths],
        mask_begin: list[int] | None = None,
    ) -> Attention:
        """An Attention that is planned for `step`. Steps that are equal have equal lengths.

        While a CUDA graph is captured, this returns the object of an earlier call with the same
        step. That object is never planned again, since replays of the graph need its plan.

        Args:
            device: the device of the tensors.
            options: the options of `Attention` except bounds, device and workspace.
            bounds: the numbers of requests and of rows of q in this step.
            step: a value that is equal for equal lengths.
            lengths: a function that returns the lengths.
            mask_begin: with custom_mask: as in `Attention.plan`.

        Raises:
            RuntimeError: in a capture, without an earlier call.
        """
        max_batch_size = power_of_two(bounds[0])
        max_qo_tokens = max(max_batch_size, power_of_two(bounds[1]))
        key = (device, max_batch_size, max_qo_tokens, *options.values())
        for planned in self._captured.get(key, ()):
            if planned.step == step:
                return planned.attn
        kept = self._kept.get(key)
        if is_capturing(device):
            if kept is None or kept.step != step:
                raise RuntimeError(
                    "q: expected a call with the same shapes and options just before the capture "
                    "of a CUDA graph, got none"
                )
            self._captured.setdefault(key, []).append(self._kept.pop(key))
            return kept.attn
        self._wait_for_last_stream(device)
        if kept is None:
            bounded = {**options, "max_batch_size": max_batch_size, "max_qo_tokens": max_qo_tokens}
            kept = self._kept[key] = _Planned(self._new(device, bounded))
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        if kept.step != step:
            kept.step = None
            stream = None if device.type == "cpu" else torch.cuda.current_stream(device)
            kept.attn.plan(*lengths(), mask_begin=mask_begin, stream=stream)
            kept.step = step
        return kept.attn

    def _new(self, device: torch.device, options: dict[str, Any]) -> Attention:
        """A new Attention. All objects of a device share a workspace; when it becomes too small,
        new objects get a larger one, and earlier objects keep the old one."""
        num_bytes = workspace_bytes(**options, device=device)
        workspace = large_enough(self._workspaces.get(device), num_bytes, device)
        self._workspaces[device] = workspace
        return Attention(**options, device=device, workspace=workspace)

    def _wait_for_last_stream(self, device: torch.device) -> None:
        """Orders the current stream behind the last one: runs that share a workspace must not
        overlap."""
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        last = self._streams.get(device)
        if last is not None and last != stream:
            stream.wait_stream(last)
        self._streams[device] = stream

    def on_host(self, *tensors: Tensor) -> list[list[int]]:
        """The values of each tensor as a flat list. Tensors on a GPU are copied by one copy, for
        which the host waits. The values are remembered until PyTorch writes to a tensor, so that
        the layers of a step share the copy. Must not be called in a capture.
        """
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return [tensor.flatten().tolist() for tensor in tensors]
        for copied in self._copied:
            if copied.is_of(tensors):
                return copied.values
        numbers = torch.cat([tensor.flatten() for tensor in tensors]).tolist()
        values, begin = [], 0
        for tensor in tensors:
            values.append(numbers[begin : begin + tensor.numel()])
            begin += tensor.numel()
        self._copied.appendleft(_Copied(tensors, values))
        return values
