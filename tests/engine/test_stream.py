"""The caller's side of a request: one reader, coalescing, synchronous abort in every way out."""

from __future__ import annotations

import asyncio
import gc
import threading

import anyio
import pytest

from aengine.engine.channel import Channel
from aengine.engine.delivery import Outbox
from aengine.engine.inbox import Inbox
from aengine.engine.stream import Stream
from aengine.errors import GenerationError
from aengine.outputs import Chunk, RequestMetrics, Usage
from aengine.request import FinishReason


class Aborts(list[Channel]):
    def __call__(self, channel: Channel) -> None:
        self.append(channel)


def make(n: int = 1) -> tuple[Stream, Channel, Aborts]:
    aborts = Aborts()
    channel = Channel(request_id="r", n=n, loop=asyncio.get_running_loop(), on_abort=aborts)
    return Stream(channel), channel, aborts


def delta(text: str, *ids: int, index: int = 0) -> Chunk:
    return Chunk(request_id="r", index=index, text=text, token_ids=ids)


def last(text: str, *ids: int, index: int = 0) -> Chunk:
    return Chunk(
        request_id="r",
        index=index,
        text=text,
        token_ids=ids,
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=2, cached_tokens=1, completion_tokens=3),
        metrics=RequestMetrics(),
    )


async def test_deltas_joined_equal_the_awaited_result() -> None:
    stream, channel, aborts = make()
    chunks = []
    channel.deliver(delta("a", 1))
    chunks.append(await anext(stream))
    channel.deliver(delta("b", 2))
    channel.deliver(last("c", 3))
    chunks += [chunk async for chunk in stream]
    result = await stream
    assert "".join(c.text for c in chunks) == result.text == "abc"
    assert sum((c.token_ids for c in chunks), ()) == result.token_ids == (1, 2, 3)
    assert result.usage.total_tokens == 5
    assert aborts == []


async def test_a_slow_reader_finds_its_deltas_coalesced() -> None:
    stream, channel, _ = make()
    for token in range(1000):
        channel.deliver(delta("x", token))
    chunk = await anext(stream)
    assert chunk.text == "x" * 1000
    assert chunk.token_ids == tuple(range(1000))


async def test_completions_of_n_are_kept_apart() -> None:
    stream, channel, _ = make(n=2)
    for chunk in (delta("a", 1), delta("x", 7, index=1), last("b", 2), last("y", 8, index=1)):
        channel.deliver(chunk)
    result = await stream
    assert [c.text for c in result.completions] == ["ab", "xy"]
    assert [c.token_ids for c in result.completions] == [(1, 2), (7, 8)]


async def test_a_second_reader_gets_a_clear_error() -> None:
    stream, channel, _ = make()
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="already has a reader"):
        await anext(stream)
    channel.deliver(last("x", 1))
    assert (await reader).text == "x"


async def test_an_error_comes_after_what_was_delivered_and_is_new_each_time() -> None:
    stream, channel, _ = make()
    channel.deliver(delta("a", 1))
    channel.fail(GenerationError("broke", request_id="r"))
    assert (await anext(stream)).text == "a"
    seen = []
    for _ in range(2):
        with pytest.raises(GenerationError, match="broke") as caught:
            await anext(stream)
        seen.append(caught.value)
    assert seen[0] is not seen[1]
    assert seen[0].request_id == "r"


async def test_leaving_the_loop_and_dropping_the_stream_aborts() -> None:
    stream, channel, aborts = make()
    channel.deliver(delta("a", 1))
    async for _ in stream:
        break
    del stream
    gc.collect()
    assert aborts == [channel]


async def test_async_with_aborts_at_its_end() -> None:
    stream, channel, aborts = make()
    async with stream:
        pass
    assert aborts == [channel]


async def test_a_finished_stream_aborts_nothing() -> None:
    stream, channel, aborts = make()
    channel.deliver(last("a", 1))
    await stream
    stream.abort()
    await stream.aclose()
    assert aborts == []


async def test_cancellation_by_timeout_aborts() -> None:
    stream, channel, aborts = make()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await stream
    assert aborts == [channel]


async def test_cancellation_by_an_anyio_scope_aborts() -> None:
    stream, channel, aborts = make()
    with anyio.move_on_after(0.01):
        async for _ in stream:
            pass
    assert aborts == [channel]


async def test_a_double_cancel_aborts_once() -> None:
    stream, channel, aborts = make()

    async def read() -> None:
        await stream

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert aborts == [channel]


async def test_the_outbox_wakes_another_loop_once_for_all_its_streams() -> None:
    calls = []

    class Loop:
        def call_soon_threadsafe(self, function: object, items: list[object]) -> None:
            calls.append(len(items))

    outbox = Outbox(asyncio.get_running_loop())
    loop = Loop()
    for _ in range(256):
        channel = Channel(request_id="r", n=1, loop=loop, on_abort=Aborts())  # type: ignore[arg-type]
        outbox.post(channel, delta("x", 1))
    assert outbox.flush() == []
    assert calls == [256]


async def test_the_outbox_names_the_channels_of_a_closed_loop() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    channel = Channel(request_id="r", n=1, loop=loop, on_abort=Aborts())
    outbox = Outbox(asyncio.get_running_loop())
    outbox.post(channel, delta("x", 1))
    assert outbox.flush() == [channel]


async def test_the_inbox_takes_from_many_threads_and_loses_nothing() -> None:
    inbox: Inbox[int] = Inbox(asyncio.get_running_loop())
    per_thread = 500

    def work(base: int) -> None:
        for i in range(per_thread):
            assert inbox.put(base + i)

    threads = [threading.Thread(target=work, args=(k * per_thread,)) for k in range(4)]
    for thread in threads:
        thread.start()
    got: list[int] = []
    while len(got) < 4 * per_thread:
        await inbox.wait(timeout=5)
        got += inbox.take()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(4 * per_thread))


async def test_the_inbox_returns_at_its_timeout() -> None:
    inbox: Inbox[int] = Inbox(asyncio.get_running_loop())
    await inbox.wait(timeout=0.001)
    assert inbox.take() == []


async def test_a_message_for_a_closed_loop_is_refused() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert Inbox[int](loop).put(1) is False
