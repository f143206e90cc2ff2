"""Structured output: compile a grammar, follow it with a matcher, fill token bitmasks."""
