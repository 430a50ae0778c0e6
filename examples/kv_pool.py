# SPDX-License-Identifier: Apache-2.0
"""A pool of KV cache pages, with reference counts and an index of the prefixes that pages hold."""

from collections.abc import Sequence
from typing import Any

import numpy as np


class KvPool:
    """Pages of keys and values for all layers, and who uses them.

    k, v: [layers, pages, page_size, kv_heads, d], arrays of `xp`. A page id means the same page in
    every layer, so one block table serves them all.

    A full page is known by all tokens up to its end, for its keys and values depend on no others.
    A request whose prompt starts with these tokens takes the page instead of computing it. A page
    without users keeps its contents, and can be found, until it is handed out again.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        xp: Any = np,
        dtype: str = "float32",
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        self.k = xp.empty(shape, dtype=getattr(xp, dtype))
        self.v = xp.empty_like(self.k)
        self._num_users = [0] * num_pages
        self._free = dict.fromkeys(range(num_pages))  # an ordered set, longest unused first
        self._page_of: dict[tuple[int, ...], int] = {}  # prefix -> the page that holds its end
        self._prefix_of: dict[int, tuple[int, ...]] = {}  # the inverse

    @property
    def num_used_pages(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def acquire(self, tokens: Sequence[int], num_tokens: int) -> tuple[list[int], int] | None:
        """Takes pages for `num_tokens` tokens that will start with `tokens`.

        Returns the pages and how many of `tokens` they hold already, or None if too few pages are
        free. The last of `tokens` always has to be computed: its logits are wanted.
        """
        shared = self._find_prefix(tokens[:-1])
        num_new = self.pages_for(num_tokens) - len(shared)
        if num_new > len(self._free.keys() - set(shared)):
            return None
        for page in shared:
            self._num_users[page] += 1
            self._free.pop(page, None)
        pages = shared + [self._take_free_page() for _ in range(num_new)]
        return pages, len(shared) * self.page_size

    def publish(self, tokens: Sequence[int], pages: Sequence[int], begin: int) -> None:
        """Makes those `pages` of `tokens` findable that tokens[begin:] filled to the end."""
        for i in range(begin // self.page_size, len(tokens) // self.page_size):
            prefix = tuple(tokens[: (i + 1) * self.page_size])
            if self._page_of.setdefault(prefix, pages[i]) == pages[i]:
                self._prefix_of[pages[i]] = prefix

    def release(self, pages: Sequence[int]) -> None:
        """Gives pages back; each is free once its last user has done so."""
        for page in reversed(pages):  # a prefix is worth keeping longer than what follows it
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                self._free[page] = None

    def _find_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest known prefix of `tokens`, in whole pages."""
        pages = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self._page_of.get(tuple(tokens[:end]))
            if page is None:
                break
            pages.append(page)
        return pages

    def _take_free_page(self) -> int:
        page = next(iter(self._free))
        del self._free[page]
        self._num_users[page] = 1
        if page in self._prefix_of:
            del self._page_of[self._prefix_of.pop(page)]
        return page
