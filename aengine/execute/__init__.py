"""Launch: turn a plan into tensors and device work. Synchronous; launches, never waits."""
