# SPDX-License-Identifier: Apache-2.0
"""Keeps the objects of `Attention` that a wrapper runs, and plans them.

plan() of FlashInfer's wrappers takes options, and each forward() may replace them, so a batch is
planned for each set of options that its runs have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flashplan.attention import Attention
from flashplan.flash_plans import is_capturing, large_enough, power_of_two
from flashplan.support import workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

# How many objects of `Attention` are kept at most, one for each set of options. If CUDA graphs may
# refer to them, all are kept.
MAX_KEPT = 32


class Batch(NamedTuple):
    """The lengths of a step, on the host: arguments of `Attention.plan`."""

    qo_indptr: npt.NDArray[Any]
    kv_lens: npt.NDArray[Any]
    kv_indptr: npt.NDArray[Any] | None


class _Planned:
    """An Attention, and the number (generation) of the batch that it is planned for."""

    def __init__(self, attn: Attention, has_mask: bool) -> None:
        self.attn = attn
        self.has_mask = has_mask
        self.generation = 0
        self.was_run = False


class Attentions:
    """The objects of `Attention` of one wrapper, one for each set of options, in one workspace.

    Args:
        workspace: the caller's; memory is allocated if it is too small.
        device: the device of the tensors.
        for_graphs: whether CUDA graphs may refer to the objects. Then each new batch is planned at
            once for all objects that have run, and none is dropped. Otherwise an object is planned
            before its first run of a batch, and all are dropped when a batch exceeds their bounds.
    """

    def __init__(self, workspace: Tensor, device: torch.device, for_graphs: bool) -> None:
        self.device = device
        self.generation = 0  # the number of the current batch
        self._workspace = workspace
        self._for_graphs = for_graphs
        self._kept: dict[Hashable, _Planned] = {}
        self._bounds = (0, 0)
        self._batch: Batch | None = None

    def set_workspace(self, workspace: Tensor) -> None:
        """Sets the workspace of objects, and drops all objects that use the old one."""
        self._workspace = workspace
        self._kept.clear()

    def set_batch(self, batch: Batch, bounds: tuple[int, int] | None = None) -> None:
        """Makes a batch the current one.

        Args:
            bounds: (requests, rows of q): how many of each a batch may have at most; default:
                powers of two, which grow with the batches.
        """
        if bounds is None:
            batch_size, num_rows = len(batch.kv_lens), int(batch.qo_indptr[-1])
            bounds = self._bounds
            if batch_size > bounds[0] or num_rows > bounds[1]:
                size = power_of_two(max(batch_size, bounds[0]))
                bounds = (size, max(size, power_of_two(max(num_rows, bounds[1]))))
        if bounds != self._bounds:
            self._bounds = bounds
            self._kept.clear()
        # Copies, because the caller may change its tensors before a later run is planned.
        kv_indptr = None if batch.kv_indptr is None else batch.kv_indptr.copy()
        self._batch = Batch(batch.qo_indptr.copy(), batch.kv_lens.copy(), kv_indptr)
        self.generation += 1
        if self._for_graphs:
            for planned in self._kept.values():
                if planned.was_run:
                    self._plan(planned)

    def get(self, key: Hashable, options: Callable[[], dict[str, Any]]) -> Attention:
        """Returns the object for these options, planned for the current batch, to be run now.

        Args:
            key: a value that is equal for equal options.
            options: a function that makes the options of `Attention` except bounds, device and
                workspace.

        Raises:
            RuntimeError: there is no batch, or a CUDA graph is being captured and the object was
                not planned before.
        """
        planned = self._kept.get(key)
        if planned is None or planned.generation != self.generation:
            planned = self.prepare(key, options)
        planned.was_run = True
        return planned.attn

    def prepare(self, key: Hashable, options: Callable[[], dict[str, Any]]) -> _Planned:
        """Plans the current batch for these options, unless it is planned for them."""
        if self._batch is None:
            raise RuntimeError("run: expected a plan() before, got none")
        planned = self._kept.get(key)
        if planned is None:
            self._check_no_capture()
            planned = self._kept[key] = self._new(options())
            if len(self._kept) > MAX_KEPT and not self._for_graphs:
                del self._kept[next(iter(self._kept))]
        if planned.generation != self.generation:
            self._plan(planned)
        return planned

    def prepare_again(self, key: Hashable) -> None:
        """Plans the current batch for these options, if an earlier batch was planned for them."""
        planned = self._kept.get(key)
        if planned is not None and planned.generation != self.generation:
            self._plan(planned)

    def workspace_bytes(self) -> int:
        """Bytes of the workspace that the object with the largest need uses."""
        return max((planned.attn.workspace_bytes for planned in self._kept.values()), default=0)

    def _new(self, options: dict[str, Any]) -> _Planned:
        max_batch_size, max_qo_tokens = (max(bound, 1) for bound in self._bounds)
        bounded = {**options, "max_batch_size": max_batch_size, "max_qo_tokens": max_qo_tokens}
        num_bytes = workspace_bytes(**bounded, device=self.device)
        self._workspace = large_enough(self._workspace, num_bytes, self.device)
        attn = Attention(**bounded, device=self.device, workspace=self._workspace)
        return _Planned(attn, options["custom_mask"])

    def _plan(self, planned: _Planned) -> None:
        self._check_no_capture()
        assert self._batch is not None
        mask_begin = None
        if planned.has_mask:  # FlashInfer's masks have a bit for each key, from key 0 on
            mask_begin = np.zeros(len(self._batch.kv_lens), np.int32)
        stream = None
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
        planned.attn.plan(*self._batch, mask_begin=mask_begin, stream=stream)
        planned.generation = self.generation

    def _check_no_capture(self) -> None:
        if is_capturing(self.device):
            raise RuntimeError(
                "run: expected a plan() and a run with the same options before the capture of a "
                "CUDA graph, got the first one in it"
            )


def on_host(*tensors: Tensor) -> list[npt.NDArray[Any]]:
    """The integers of tensors. Tensors on a GPU are copied by one copy, for which the host waits.

    Raises:
        TypeError: an argument is no tensor.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"plan: expected lengths and indptr as torch.Tensor, got {type(tensor).__name__}"
            )
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    there = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    copied = torch.cat([tensor.flatten().int() for tensor in there]).cpu().numpy()
    parts = iter(np.split(copied, np.cumsum([tensor.numel() for tensor in there])[:-1]))
    return [tensor.numpy() if tensor.device.type == "cpu" else next(parts) for tensor in tensors]


def paged_kv_lens(
    page_indptr: npt.NDArray[Any], last_page_len: npt.NDArray[Any] | None, page_size: int
) -> npt.NDArray[Any]:
    """Keys of each request: (pages - 1) * page_size + last_page_len, 0 without pages. If there is
    no last_page_len, the number of pages of each request.

    Raises:
        ValueError: page_indptr does not ascend, is not one longer than last_page_len, or a last
            page is longer than a page.
    """
    pages: npt.NDArray[Any] = page_indptr[1:] - page_indptr[:-1]
    if pages.size and pages.min() < 0:
        raise ValueError(f"indptr: expected to ascend, got {page_indptr.tolist()}")
    if last_page_len is None:
        return pages
    if last_page_len.size != pages.size:
        raise ValueError(
            f"last_page_len: expected {pages.size} elements, one less than indptr has, got "
            f"{last_page_len.size}"
        )
    if pages.size and last_page_len.max() > page_size:
        raise ValueError(
            f"last_page_len: expected <= page_size = {page_size}, got {last_page_len.max()}"
        )
    lens: npt.NDArray[Any] = ((pages - 1) * page_size + last_page_len) * (pages > 0)
    return lens
