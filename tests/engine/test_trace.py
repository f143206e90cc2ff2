"""Requests as tracks of the trace."""

from __future__ import annotations

import itertools

from aengine import SamplingParams
from aengine.device.trace import Trace
from aengine.testing import Faults, scripted_engine


async def test_each_sequence_has_a_track_with_its_phases() -> None:
    trace = Trace()
    async with scripted_engine(faults=Faults(delay=0.001), max_num_seqs=1) as engine:
        engine.parts.trace = trace
        params = SamplingParams(max_tokens=6, temperature=0)
        first = engine.generate([1], params, request_id="a")
        second = engine.generate([2], params, request_id="b")
        waiting = engine.generate([3], params, request_id="c")
        await anext(first)
        waiting.abort()
        await first
        await second
        await waiting
    events = trace.events()
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    phases: dict[str, list[str]] = {}
    for event in events:
        if event["ph"] == "X":
            track = names[event["tid"]].split()[1]
            phases.setdefault(track, []).append(event["name"])
            assert event["dur"] >= 0
    whole = ["queue", "prefill", "decode"]
    assert phases == {"a": whole, "b": whole, "c": ["queue"]}
    spans = [e for e in events if e["ph"] == "X" and names[e["tid"]].startswith("request a")]
    for before, after in itertools.pairwise(spans):
        assert abs(before["ts"] + before["dur"] - after["ts"]) < 1  # µs: no gap
