# SPDX-License-Identifier: Apache-2.0
"""The HTTP endpoints."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import metrics as metric
from . import responses
from .errors import ApiError, from_validation, invalid
from .generation import Delta, Generation
from .library import Options
from .metrics import Metrics, Timer
from .model import Model
from .protocol import ChatRequest, CompletionRequest, Prompt
from .service import Service

CLIENT_CLOSED_REQUEST = 499  # for the log: nobody receives it


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


class EventStream(StreamingResponse):
    """Server-sent events of a generation, which ends with the response, however that ends."""

    def __init__(self, events: AsyncIterator[str], generation: Generation) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


class CountResponses:
    """Middleware that counts responses by their status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                endpoint = getattr(scope.get("route"), "path", "other")
                self._metrics.responses[endpoint, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, count)


class Api:
    """What the endpoints need."""

    def __init__(self, model: Model, service: Service, options: Options) -> None:
        self.model, self.service, self.options = model, service, options
        self.metrics = Metrics()
        self.started = int(time.time())
        self.max_tokens = min(model.max_tokens, options.num_pages * options.page_size)

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model.name):
            message = f"The model {name!r} does not exist; this server has {self.model.name!r}."
            raise ApiError(404, message, "model", "model_not_found")

    def tokens_of(self, prompt: Prompt, param: str) -> list[int]:
        if isinstance(prompt, str):
            # No token is longer than the longest one: such a text need not be tokenised.
            if len(prompt) > self.max_tokens * self.model.token_bytes.longest:
                raise self.too_long(param, "more")
            prompt = self.model.encode(prompt)
        if not prompt:
            raise invalid(param, f"{param}: expected at least one token")
        if not all(0 <= token < self.model.vocab for token in prompt):
            raise invalid(param, f"{param}: expected token ids below {self.model.vocab}")
        return prompt

    def room_after(self, prompt: list[int], max_new_tokens: int | None, param: str) -> int:
        """How many new tokens there may be."""
        room = self.max_tokens - len(prompt)
        if room < 1:
            raise self.too_long(param, str(len(prompt)))
        if max_new_tokens is not None and max_new_tokens > room:
            asked = f"{len(prompt) + max_new_tokens} ({len(prompt)} in the {param}, "
            raise self.too_long(param, f"{asked}{max_new_tokens} for the completion)")
        return room if max_new_tokens is None else max_new_tokens

    def too_long(self, param: str, got: str) -> ApiError:
        message = f"This model's maximum context length is {self.max_tokens} tokens; got {got}."
        return invalid(param, message, "context_length_exceeded")

    def chat_tokens(self, body: ChatRequest) -> list[int]:
        messages = [message.for_template() for message in body.messages]
        num_characters = sum(len(message["content"]) for message in messages)
        if num_characters > self.max_tokens * self.model.token_bytes.longest:
            raise self.too_long("messages", "more")
        try:
            return self.model.encode_chat(messages)
        except ValueError as error:
            raise invalid("messages", str(error)) from None

    async def answer(
        self,
        http: Request,
        body: ChatRequest | CompletionRequest,
        make_format: type[responses.Format],
        prompts: list[tuple[list[int], int]],
    ) -> Response:
        """Answers a request. `prompts`: the tokens of each, and how many may follow them."""
        requests = [
            body.engine_request(tokens, max_new_tokens, seed)
            for (tokens, max_new_tokens), seed in zip(prompts, body.seeds(len(prompts)))
        ]
        generation = Generation(
            self.service, self.model.token_bytes, requests, body.stop, Timer(self.metrics)
        )
        form = make_format(self.model, body.num_logprobs >= 0)
        if body.stream:
            with_usage = body.stream_options.include_usage
            return EventStream(self.events(generation, form, with_usage), generation)
        try:
            deltas = await self.unless_client_leaves(http, collect(generation))
        finally:
            generation.close()
        if deltas is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JsonResponse(form.whole(deltas, usage_of(generation)))

    async def events(
        self, generation: Generation, form: responses.Format, with_usage: bool
    ) -> AsyncIterator[str]:
        no_usage = {"usage": None} if with_usage else {}
        finished = False
        try:
            for chunk in form.first_chunks(generation.num_choices):
                yield event(chunk | no_usage)
            try:
                async for deltas in generation.steps():
                    visible = [d for d in deltas if d.text or d.entries or d.finish_reason]
                    if visible:
                        yield "".join(event(form.chunk(delta) | no_usage) for delta in visible)
            except ApiError as error:
                finished = True
                yield event(error.body)
                return
            if with_usage:
                yield event(form.usage_chunk(usage_of(generation)))
            finished = True
            yield "data: [DONE]\n\n"
        finally:
            self.metrics.disconnects += not finished

    async def unless_client_leaves(
        self, http: Request, work: Awaitable[list[list[Delta]]]
    ) -> list[list[Delta]] | None:
        """The result of `work`, or None if the client has gone away before."""
        task = asyncio.ensure_future(work)
        leaves = asyncio.ensure_future(http.receive())  # after the body nothing else comes
        try:
            await asyncio.wait({task, leaves}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self.metrics.disconnects += 1
            return None
        finally:
            task.cancel()
            leaves.cancel()


async def collect(generation: Generation) -> list[list[Delta]]:
    """The deltas of each choice."""
    of_choice: list[list[Delta]] = [[] for _ in range(generation.num_choices)]
    async for deltas in generation.steps():
        for delta in deltas:
            of_choice[delta.choice].append(delta)
    return of_choice


def usage_of(generation: Generation) -> dict[str, int]:
    return responses.usage(generation.num_prompt_tokens, generation.num_new_tokens)


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


def error_response(error: ApiError) -> JsonResponse:
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JsonResponse(error.body, status_code=error.status, headers=headers)


def make_app(api: Api) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        api.service.start()
        yield
        api.service.close()

    # Its pages for people would load scripts of others.
    app = FastAPI(title="flashplan", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(http: Request, error: RequestValidationError) -> Response:
        # Browsers send other types without asking the server: pages of others could use it.
        if "json" not in http.headers.get("content-type", ""):
            return error_response(invalid(None, "The Content-Type must be application/json."))
        return error_response(from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def on_http_error(http: Request, error: HTTPException) -> Response:
        where = f"{http.method} {http.url.path}"
        return error_response(ApiError(error.status_code, f"{where}: {error.detail}"))

    @app.exception_handler(Exception)
    async def on_defect(_: Request, error: Exception) -> Response:
        return error_response(ApiError(500, "internal error; the server's log says more"))

    app.add_middleware(CountResponses, metrics=api.metrics)

    @app.post("/v1/completions")
    async def completions(http: Request, body: CompletionRequest) -> Response:
        api.check_model(body.model)
        prompts = []
        for prompt in body.prompt:
            tokens = api.tokens_of(prompt, "prompt")
            prompts.append((tokens, api.room_after(tokens, body.max_tokens, "prompt")))
        return await api.answer(http, body, responses.CompletionFormat, prompts)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request, body: ChatRequest) -> Response:
        api.check_model(body.model)
        tokens = api.chat_tokens(body)
        limit = body.max_completion_tokens or body.max_tokens
        prompts = [(tokens, api.room_after(tokens, limit, "messages"))]
        return await api.answer(http, body, responses.ChatFormat, prompts)

    def description() -> dict[str, Any]:
        return {
            "id": api.model.name,
            "object": "model",
            "created": api.started,
            "owned_by": "flashplan",
            "max_model_len": api.max_tokens,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [description()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        api.check_model(name)
        return JsonResponse(description())

    @app.get("/health")
    async def health() -> Response:
        api.service.check_ready()
        return JsonResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        text = api.metrics.text(api.service.engine.statistics(), api.options)
        return Response(text, headers={"Content-Type": metric.CONTENT_TYPE})

    return app
