"""A FastAPI endpoint that streams an answer, and stops generating when the client goes away."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from aengine import AEngineError, Engine, SamplingParams, Stream


class Answer(StreamingResponse):
    def __init__(self, stream: Stream) -> None:
        super().__init__((chunk.text async for chunk in stream), media_type="text/plain")
        self.stream = stream

    async def __call__(self, *asgi: Any) -> None:
        async with self.stream:  # left in whatever way, it frees what the request held
            await super().__call__(*asgi)


def make_app(engine: Engine) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine:  # loads the model before the first request is taken
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/answer", response_model=None)
    async def answer(question: str, max_tokens: int = 512) -> Answer:
        messages = [{"role": "user", "content": question}]
        return Answer(engine.generate(messages, SamplingParams(max_tokens=max_tokens)))

    @app.exception_handler(AEngineError)
    async def refuse(_: Request, error: AEngineError) -> JSONResponse:
        return JSONResponse({"code": error.code, "message": str(error)}, error.status_code)

    return app
