"""The awaitables: streams and completions of a device as things a coroutine can await."""
