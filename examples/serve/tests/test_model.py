# SPDX-License-Identifier: Apache-2.0
"""Folders of models: chat templates, tokenizers, what is refused; the engine's C interface."""

import ctypes
import json
import re
import subprocess
from pathlib import Path

import pytest

from serve import library
from serve.model import load_model
from tiny_model import CHAT_TEMPLATE, make_tokenizer, write_tiny_model

HEADER = Path(__file__).parents[2] / "engine" / "include" / "engine" / "engine_c.h"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def folder(tmp_path):
    write_tiny_model(tmp_path)
    return tmp_path


def write_tokenizer_config(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def text_of(folder):
    model = load_model(folder)
    return model.tokenizer.decode(model.encode_chat(HELLO), skip_special_tokens=False)


def test_templates_of_tokenizer_config(folder):
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(folder) == expected
    write_tokenizer_config(folder, chat_template=CHAT_TEMPLATE + "!")
    assert text_of(folder) == expected + "!"


def test_templates_in_files_of_their_own_win(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    assert text_of(folder) == "Hello?"


def test_special_tokens_of_templates(folder):
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    write_tokenizer_config(
        folder,
        chat_template=template,
        bos_token="<|im_start|>",
        eos_token={"content": "<|im_end|>"},
    )
    assert text_of(folder) == "<|im_start|>Hello<|im_end|>"


def test_models_without_template(folder):
    (folder / "tokenizer_config.json").unlink()
    model = load_model(folder, "other")
    assert model.encode("Hello")
    with pytest.raises(ValueError, match="messages: other has no chat template"):
        model.encode_chat(HELLO)


def test_templates_that_are_malformed(folder):
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="the chat template is malformed"):
        load_model(folder)


def test_templates_are_run_in_a_sandbox(folder):
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="refuses them: access to attribute '__class__'"):
        load_model(folder).encode_chat(HELLO)


def test_tokenizers_that_truncate(folder):
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(folder / "tokenizer.json"))
    model = load_model(folder)
    assert len(model.encode("x")) == 1
    assert len(model.encode("x" * 50)) == 50


STRUCTS = {
    "engine_options": library.Options,
    "engine_request": library._Request,
    "engine_output": library._Output,
    "engine_statistics": library.Statistics,
}
TYPES = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "const int32_t*": ctypes.POINTER(ctypes.c_int32),
}


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_are_those_of_the_header(name):
    body = re.search(rf"typedef struct {name} \{{(.*?)\}}", HEADER.read_text(), re.DOTALL)
    fields = re.findall(r"^\s*(.+?) (\w+)(\[\w+\])?;", body[1], re.MULTILINE)
    expected = [
        (field, TYPES[kind] * library.MAX_LOGPROBS if length else TYPES[kind])
        for kind, field, length in fields
    ]
    assert STRUCTS[name]._fields_ == expected


def test_constants_are_those_of_the_header():
    text = HEADER.read_text()
    assert f"#define ENGINE_MAX_LOGPROBS {library.MAX_LOGPROBS}\n" in text
    assert f"#define ENGINE_MESSAGE_SIZE {library.MESSAGE_SIZE}\n" in text
    assert f"ENGINE_INVALID = {library.INVALID}," in text
    finish = re.search(
        r"enum class Finish.*?\{(.*?)\}", (HEADER.parent / "engine.h").read_text(), re.DOTALL
    )
    names = re.findall(r"k(\w+)(?: = 0)?,", finish[1])
    assert [name.upper() for name in names] == [finish.name for finish in library.Finish]


def test_the_header_is_c():
    options = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    subprocess.run(["c++", *options, "-include", HEADER, "-x", "c", "/dev/null"], check=True)
