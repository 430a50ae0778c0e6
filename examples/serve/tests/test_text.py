# SPDX-License-Identifier: Apache-2.0
"""Texts that come in pieces are those that come at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from serve.text import StopStrings, TextStream, TokenBytes
from tiny_model import make_tokenizer

TOKENIZER = make_tokenizer()
BYTES = TokenBytes(TOKENIZER)
TOKENS = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40)
# Few letters, so that stop strings occur, overlap and contain each other.
LETTERS = st.text("abé", max_size=30)
STOPS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


def whole_text(text: str, stops: list[str]) -> str:
    """What StopStrings keeps of a text, by its definition."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


def streamed(tokens: list[bytes], stops: list[str]) -> tuple[str, TextStream]:
    stream, text = TextStream(stops), ""
    for i, token in enumerate(tokens):
        text += stream.feed(token, is_last=i + 1 == len(tokens))
        if stream.has_stopped:
            break
    return text, stream


@given(TOKENS)
def test_streamed_text_is_the_whole_text(tokens):
    text, stream = streamed([BYTES[token] for token in tokens], [])
    assert text == TOKENIZER.decode(tokens)
    assert not stream.has_stopped
    assert stream.num_given == stream.num_decoded == len(text)


@given(st.text(max_size=30), st.data())
def test_characters_are_never_split(text, data):
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=10)))
    pieces = [encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)])]
    stream, given_so_far = TextStream([]), ""
    for i, piece in enumerate(pieces):
        given_so_far += stream.feed(piece, is_last=i + 1 == len(pieces))
        assert text.startswith(given_so_far)
    assert given_so_far == text


@given(LETTERS, STOPS, st.data())
def test_stop_strings_across_all_borders(text, stops, data):
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=10)))
    pieces = [encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)])]
    kept, stream = streamed(pieces, stops)
    assert kept == whole_text(text, stops)
    assert stream.has_stopped == any(stop in text for stop in stops)
    assert stream.num_given == len(kept)


@given(LETTERS, STOPS)
def test_nothing_is_held_back_without_need(text, stops):
    stop_strings, given_so_far = StopStrings(stops), ""
    for i, character in enumerate(text):
        given_so_far += stop_strings.feed(character)
        if stop_strings.has_stopped:
            break
        held = text[len(given_so_far) : i + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_special_tokens_have_no_text():
    assert BYTES[1] == b""
    assert BYTES[10**6] == b""  # models have more tokens than their tokenizers


def test_bytes_of_tokens():
    tokens = TOKENIZER.encode("thé in the €").ids
    assert b"".join(BYTES[token] for token in tokens) == "thé in the €".encode()
    assert "é".encode() in [BYTES[token] for token in tokens]  # a merge of two bytes
    assert BYTES.longest == len(" the")


def test_other_tokenizers_are_refused():
    tokenizer = Tokenizer(models.BPE())
    with pytest.raises(ValueError, match="expected a ByteLevel decoder, got none"):
        TokenBytes(tokenizer)
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match="expected a ByteLevel decoder, got Metaspace"):
        TokenBytes(tokenizer)
