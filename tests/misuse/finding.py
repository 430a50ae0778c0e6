# SPDX-License-Identifier: Apache-2.0
"""Findings, and the list of the kinds of cases that look for them."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import flashplan as fp


class Finding(Exception):
    """The library did what it must not do."""


class Skip(Exception):
    """The random choice can not be made wrong in a way that the library could notice."""


@dataclasses.dataclass
class Kind:
    """A family of cases: case n of a seed is always the same."""

    name: str
    body: Callable[[Any], None]
    weight: float  # how often it is chosen
    needs: str = ""  # a module that must be importable


KINDS: dict[str, Kind] = {}


def kind(name, weight=1.0, needs=""):
    def register(body):
        KINDS[name] = Kind(name, body, weight, needs)
        return body

    return register


class OfTheCaller(Exception):
    """Raised by an object that is passed in. The call must raise it unchanged."""


def is_of_the_caller(error):
    """Whether an object that was passed in raised it."""
    return isinstance(error, OfTheCaller | KeyboardInterrupt) or "mine" in str(error)


REFUSALS = (ValueError, TypeError, fp.UnsupportedError, MemoryError)
TEXT = re.compile(r"(\w+)(\[[^\]]*\])?: expected (memory apart from (\w+))?.*, got .*", re.DOTALL)


def check_refusal(error, names):
    """A refusal is one of the documented exceptions and names an argument."""
    if type(error) not in REFUSALS:
        raise Finding(f"{type(error).__name__} instead of a refusal: {error}") from error
    match = TEXT.fullmatch(str(error))
    # The refusal of an overlap names two arguments.
    if match is None or not {match[1], match[4]} & set(names):
        raise Finding(
            f"{type(error).__name__} without the name of {' or '.join(sorted(names))}: {error}"
        ) from error
