# SPDX-License-Identifier: Apache-2.0
"""Asks the server that `make serve` starts. Needs OpenAI's client: pip install openai."""

# --8<-- [start:stream]
import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
stream = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "Say something about the moon."}],
    max_completion_tokens=60,
    temperature=0.7,
    seed=1,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
# --8<-- [end:stream]
print()
