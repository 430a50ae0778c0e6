# SPDX-License-Identifier: Apache-2.0
"""What the server wants of a model's folder: limits, tokenizer, chat template."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from .text import TokenBytes


@dataclass(frozen=True)
class Model:
    name: str
    max_tokens: int  # of a prompt and what follows it
    vocab: int
    tokenizer: Tokenizer
    token_bytes: TokenBytes
    chat_template: Template | None

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The tokens of a conversation, up to where the assistant answers.

        ValueError: the model has no chat template, or its template refuses the messages."""
        if self.chat_template is None:
            raise ValueError(f"messages: {self.name} has no chat template")
        try:
            text = self.chat_template.render(messages=messages, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"messages: the chat template refuses them: {error}") from None
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def load_model(folder: Path, name: str | None = None) -> Model:
    """Reads all but the weights of a folder in Hugging Face's format.

    ValueError: a file is missing or of another kind."""
    try:
        config = json.loads((folder / "config.json").read_text())
        tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename}: no such file") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Model(
        name=name or folder.resolve().name,
        max_tokens=config["max_position_embeddings"],
        vocab=config["vocab_size"],
        tokenizer=tokenizer,
        token_bytes=TokenBytes(tokenizer),
        chat_template=_load_chat_template(folder),
    )


def _load_chat_template(folder: Path) -> Template | None:
    """The chat template, from a file of its own or from tokenizer_config.json."""
    config: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").exists():
        config = json.loads((folder / "tokenizer_config.json").read_text())
    file = folder / "chat_template.jinja"
    text = file.read_text() if file.exists() else config.get("chat_template")
    if text is None:
        return None

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    for name in ("bos_token", "eos_token"):
        token = config.get(name)
        environment.globals[name] = token["content"] if isinstance(token, dict) else token or ""
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise ValueError(f"{folder}: the chat template is malformed: {error}") from None
