# SPDX-License-Identifier: Apache-2.0
"""The ways in which tests/adversary.py misuses the library."""

_listeners = []


def note(text):
    """Prints what the case is about to do, so that the text is known after a crash."""
    for listener in _listeners:
        listener(text)


def listen(listener):
    _listeners.append(listener)
