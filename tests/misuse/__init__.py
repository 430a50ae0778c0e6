# SPDX-License-Identifier: Apache-2.0
"""What tests/adversary.py does to the library, by kind."""

_listeners = []


def note(text):
    """Says what a case is about to do, so that the text survives a crash."""
    for listener in _listeners:
        listener(text)


def listen(listener):
    _listeners.append(listener)
