# SPDX-License-Identifier: Apache-2.0
"""A conversation with SmolLM2 by the client library of OpenAI."""

import functools
import json
import runpy

import numpy as np
import openai
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from export_smollm2 import apart
from serve.model import load_model
from server_process import EXAMPLES
from smollm2_file import chat_prompt

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # the template's


def test_conversation(smollm2):
    client = smollm2.openai
    (model,) = [model.id for model in client.models.list()]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ask = {"model": model, "temperature": 0, "max_completion_tokens": 40}

    answer = client.chat.completions.create(messages=messages, **ask)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"

    stream = client.chat.completions.create(
        messages=messages, **ask, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
    assert last.usage == answer.usage

    messages += [answer.choices[0].message, {"role": "user", "content": "And of Germany?"}]
    before = smollm2.metrics()["flashplan_reused_tokens_total"]
    follow_up = client.chat.completions.create(messages=messages, **ask, n=2, logprobs=True)
    assert "Berlin" in follow_up.choices[0].message.content
    assert follow_up.choices[0].message.content == follow_up.choices[1].message.content
    assert follow_up.choices[0].logprobs.content[0].logprob < 0
    assert smollm2.metrics()["flashplan_reused_tokens_total"] > before  # the first question's

    cut = client.chat.completions.create(messages=messages[:1], **ask, stop=[" of France"])
    assert (
        cut.choices[0].message.content == answer.choices[0].message.content.split(" of France")[0]
    )

    counting = client.completions.create(
        model=model, prompt="1, 2, 3, 4, 5, 6,", max_tokens=6, temperature=0
    )
    assert counting.choices[0].text.startswith(" 7, 8,")

    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=messages)
    with pytest.raises(BadRequestError) as refused:
        client.completions.create(model=model, prompt="word " * 9000)
    assert refused.value.code == "context_length_exceeded"
    smollm2.wait_until_idle()


def test_the_code_of_the_page(smollm2, capsys, monkeypatch):
    """What docs/howto/serve.md shows, at the address of this server."""
    client_of = functools.partial(OpenAI, base_url=f"{smollm2.url}/v1")
    monkeypatch.setattr(openai, "OpenAI", lambda base_url, **options: client_of(**options))
    runpy.run_path(str(EXAMPLES / "serve" / "client.py"))
    assert "moon" in capsys.readouterr().out.lower()


def test_texts_keep_characters_whole(smollm2):
    """Emoji and Chinese take several tokens each."""
    prompt = "Repeat: 😀 你好 😀 你好 😀 你好 😀"
    arguments = {"model": "smollm2", "prompt": prompt, "max_tokens": 60, "temperature": 0}
    whole = smollm2.openai.completions.create(**arguments).choices[0].text
    stream = smollm2.openai.completions.create(**arguments, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == whole
    assert "�" not in whole[:-1]
    assert any(ord(character) > 0x2000 for character in whole)


def test_prompts_are_those_of_the_demo(smollm2):
    model = load_model(smollm2.model)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hi"}]
    tokens = model.encode_chat(messages)
    assert tokens == model.encode(chat_prompt(SYSTEM, "Hi"))
    assert tokens == model.encode_chat(messages[1:])


def test_tokens_are_those_of_the_demo(smollm2):
    """Those of dense attention, from the weights as the file of GGUF has them."""
    pytest.importorskip("flashplan", reason="the demo's model needs the package")
    import gguf

    from dense import compare_with_dense
    from serving import Request
    from smollm2 import load_model as load_demo
    from smollm2_file import find_weights

    model = load_model(smollm2.model)
    ids = {model.token_bytes[token]: token for token in range(model.vocab)}
    prompts = [chat_prompt(SYSTEM, "Why do we have seasons?"), "def square(x):"]
    tokens = [model.encode(prompt) for prompt in prompts]
    body = {"prompt": tokens, "max_tokens": 30, "temperature": 0, "logprobs": 0}
    choices = smollm2.http.post("/v1/completions", json=body).json()["choices"]
    demo = load_demo(gguf.GGUFReader(find_weights()))
    for prompt, choice in zip(tokens, choices, strict=True):
        request = Request("", prompt, max_new_tokens=30)
        request.tokens = prompt + [ids[text.encode()] for text in choice["logprobs"]["tokens"]]
        differences = compare_with_dense(demo, request)
        assert all(difference.is_tie for difference in differences), differences


def test_halves_of_heads_are_put_apart():
    rows = np.arange(8)[:, None] * np.ones(3)
    assert apart(rows, num_heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_weights_are_aligned(smollm2):
    """So that the engine uses them where they lie in the file."""
    with (smollm2.model / "model.safetensors").open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    assert size % 8 == 0
    assert all(entry["data_offsets"][0] % 4 == 0 for entry in header.values())
