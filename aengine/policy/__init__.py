"""Decide: what runs in the next step. Synchronous and pure: no torch, no asyncio, no clock."""
