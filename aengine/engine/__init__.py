"""Await: the scheduler coroutine, the front door, delivery to callers."""
