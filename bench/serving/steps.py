# SPDX-License-Identifier: Apache-2.0
"""Reads the steps that the engine has written (`serving --step-log FILE`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int32]


class Step(NamedTuple):
    """What attention was asked for in one step."""

    qo_indptr: Indices  # [batch + 1]
    kv_lens: Indices  # [batch]
    page_indptr: Indices  # [batch + 1]
    page_indices: Indices


def read_steps(path: Path | str) -> Iterator[Step]:
    """The steps of a log, in their order."""
    words = np.memmap(path, np.int32, "r")
    begin = 0
    while begin < len(words):
        batch, num_pages = int(words[begin]), int(words[begin + 2])
        begin += 3
        parts = []
        for size in (batch + 1, batch, batch + 1, num_pages):
            parts.append(np.array(words[begin : begin + size]))
            begin += size
        yield Step(*parts)
