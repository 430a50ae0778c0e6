# SPDX-License-Identifier: Apache-2.0
"""From tokens to text while the tokens come: whole characters, up to a stop string."""

import codecs
import json
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel


class TokenBytes:
    """The bytes of each token of a byte-level tokenizer. Special tokens have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        description = json.loads(tokenizer.to_str())
        decoder = description["decoder"] or {"type": "none"}
        if decoder["type"] != "ByteLevel":
            raise ValueError(f"tokenizer.json: expected a ByteLevel decoder, got {decoder['type']}")
        byte_of = _bytes_of_characters()
        self._bytes = [b""] * tokenizer.get_vocab_size()
        for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
            in_alphabet = all(c in byte_of for c in token)
            self._bytes[number] = (
                bytes(byte_of[c] for c in token) if in_alphabet else token.encode()
            )
        for added in description["added_tokens"]:
            self._bytes[added["id"]] = b"" if added["special"] else added["content"].encode()
        self.longest = max(map(len, self._bytes))

    def __getitem__(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level tokenizers write each byte as a character: as itself if it is printable, else as
    one of the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(0x100 + i): byte for i, byte in enumerate(others)}
    assert set(byte_of) == set(ByteLevel.alphabet())
    return byte_of


class StopStrings:
    """Cuts a text before the stop string that ends first; of several that end there, before the
    longest one. How the text is divided into pieces does not matter."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""  # may be the begin of a stop string
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """Returns what is certain to be before a stop string, of all that was given."""
        text, self._held = self._held + text, ""
        found = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if found:
            self.has_stopped = True
            end, length = min(found)
            return text[: end + length]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """What was held back, if no more text comes."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the begin of a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next(n for n in range(longest, -1, -1) if text.endswith(stop[:n]))


class TextStream:
    """The text of one sample. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stops)
        self.num_decoded = 0  # characters, those after a stop string included
        self.num_given = 0  # characters that feed() has returned

    @property
    def has_stopped(self) -> bool:
        return self._stops.has_stopped

    def feed(self, token: bytes, is_last: bool) -> str:
        """Takes the bytes of a token; returns the text that is certain now."""
        decoded = self._decoder.decode(token, is_last)
        self.num_decoded += len(decoded)
        text = self._stops.feed(decoded)
        if is_last:
            text += self._stops.flush()
        self.num_given += len(text)
        return text
