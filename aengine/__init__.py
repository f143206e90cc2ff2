"""An LLM inference engine that lives inside an asyncio program."""
