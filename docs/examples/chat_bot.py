"""The core of a chat bot: many conversations at once, which share their beginning.

All channels' prompts begin with the same persona, and each turn's prompt with the turns before it.
The engine keeps their KV blocks, so only what is new is computed (`usage.cached_tokens`).
"""

import asyncio
from collections import defaultdict

from aengine import Engine, SamplingParams

PERSONA = {"role": "system", "content": "You are Ada, a helpful bot. Answer in one sentence."}
PARAMS = SamplingParams(max_tokens=80, temperature=0.7)


class Bot:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.history: dict[str, list[dict[str, str]]] = defaultdict(lambda: [PERSONA])
        self.turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def on_message(self, channel: str, text: str) -> str:
        """Called by the chat platform, for all channels at once."""
        async with self.turns[channel]:  # within a channel, one turn after the other
            said = [*self.history[channel], {"role": "user", "content": text}]
            result = await self.engine.generate(said, PARAMS, deadline=30)
            self.history[channel] = [*said, {"role": "assistant", "content": result.text}]
            return result.text


async def main() -> None:
    async with Engine("smollm2-135m") as engine:
        bot = Bot(engine)
        channels = [f"#room-{number}" for number in range(8)]
        for answer in await asyncio.gather(*(bot.on_message(c, "Hi, Ada!") for c in channels)):
            print(answer)


if __name__ == "__main__":
    asyncio.run(main())
