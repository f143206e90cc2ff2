"""The engine on one GPU: decode steps, prefill, arrivals, and a host that is busy itself.

Random weights in Llama-3.1-8B's shape, bfloat16, prefix cache off; everything goes through
`Engine.generate`, each stream consumed by its own coroutine in this process.

    python benchmarks/gpu.py [ROW ...] [--layers N] [--batched-tokens N] [--json PATH]

Rows: one, few, many, prefill, poisson, busy (all of them by default). The limit of a row is its
bytes over 4.24 TB/s, or its floating-point operations over 790 TFLOP/s (see docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from aengine import Engine, SamplingParams

VOCABULARY = 128_256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128_001,
    "bos_token_id": 128_000,
}


def model_folder(path: Path, layers: int) -> Path:
    """A folder with the shape and a made-up tokenizer, and no weights."""
    (path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    vocabulary = {f"t{i:x}": i for i in range(VOCABULARY)}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@dataclass
class Stream:
    """When a request's tokens came."""

    began: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.times[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


async def follow(engine: Engine, prompt: list[int], tokens: int, **options: Any) -> Stream:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **options)
    stream = Stream(time.perf_counter())
    async for chunk in engine.generate(prompt, params):
        stream.times.append(time.perf_counter())
        stream.counts.append(len(chunk.token_ids))
    assert sum(stream.counts) == tokens, stream.counts
    return stream


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(1000, 100_000) for _ in range(length)] for _ in range(count)]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


async def batch(engine: Engine, count: int, length: int, tokens: int) -> dict[str, Any]:
    """All at once. The decode step is the median gap while every stream is decoding."""
    began = time.perf_counter()
    streams = await asyncio.gather(
        *[follow(engine, p, tokens) for p in prompts(count, length, count)]
    )
    wall = time.perf_counter() - began
    all_started = max(s.times[0] for s in streams)
    steady = [
        b - a
        for s in streams
        for a, b in zip(s.times, s.times[1:], strict=False)
        if a >= all_started
    ]
    return {
        "step_p50_ms": ms(statistics.median(steady)),
        "step_p99_ms": ms(percentile(steady, 0.99)),
        "wall_s": round(wall, 3),
        "tokens_per_s": round(count * tokens / wall),
        "ttft_p50_ms": ms(statistics.median(s.first for s in streams)),
    }


async def prefill(engine: Engine, count: int = 16, length: int = 4096) -> dict[str, Any]:
    began = time.perf_counter()
    await asyncio.gather(*[follow(engine, p, 1) for p in prompts(count, length, 5)])
    wall = time.perf_counter() - began
    return {"tokens_per_s": round(count * length / wall), "wall_s": round(wall, 3)}


async def poisson(engine: Engine, count: int = 256, rate: float = 8.0) -> dict[str, Any]:
    chance = random.Random(1)

    async def arrive(prompt: list[int], at: float) -> Stream:
        await asyncio.sleep(at)
        return await follow(engine, prompt, 128)

    arrivals, at = [], 0.0
    for prompt in prompts(count, 1024, 9):
        at += chance.expovariate(rate)
        arrivals.append(arrive(prompt, at))
    streams = await asyncio.gather(*arrivals)
    firsts, gaps = [s.first for s in streams], [g for s in streams for g in s.gaps]
    return {
        "ttft_p50_ms": ms(statistics.median(firsts)),
        "ttft_p99_ms": ms(percentile(firsts, 0.99)),
        "itl_p50_ms": ms(statistics.median(gaps)),
        "itl_p99_ms": ms(percentile(gaps, 0.99)),
    }


async def busy(engine: Engine, count: int = 64, tokens: int = 192) -> dict[str, Any]:
    """The share of throughput kept while this loop runs pure Python part of the time."""
    found: dict[str, Any] = {}
    for share in (0.0, 0.5, 1.0):
        stop = asyncio.Event()

        async def hog(share: float = share, stop: asyncio.Event = stop) -> None:
            while not stop.is_set():
                until = time.perf_counter() + 0.010 * share
                while time.perf_counter() < until:
                    sum(range(100))
                await asyncio.sleep(0 if share == 1.0 else 0.010 * (1 - share))

        hogging = asyncio.create_task(hog()) if share else None
        began = time.perf_counter()
        await asyncio.gather(*[follow(engine, p, tokens) for p in prompts(count, 128, 3)])
        rate = count * tokens / (time.perf_counter() - began)
        stop.set()
        if hogging is not None:
            await hogging
        found[f"busy_{share:.0%}"] = round(rate)
    undisturbed = found["busy_0%"]
    found["kept_50%"] = round(found["busy_50%"] / undisturbed, 3)
    found["kept_100%"] = round(found["busy_100%"] / undisturbed, 3)
    return found


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    rows = {
        "one": lambda e: batch(e, 1, 128, 256),
        "few": lambda e: batch(e, 32, 1024, 256),
        "many": lambda e: batch(e, 256, 1024, 256),
        "prefill": prefill,
        "poisson": poisson,
        "busy": busy,
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        marks: dict[str, float] = {}

        def progress(stage: str, done: int, total: int) -> None:
            marks.setdefault(stage, time.perf_counter() - began)

        engine = Engine(
            str(model_folder(Path(folder), args.layers)),
            device="cuda",
            load_format="dummy",
            max_model_len=8192,
            max_num_seqs=256,
            max_num_batched_tokens=args.batched_tokens,
            enable_prefix_cache=False,
            kv_cache_fraction=0.8,
            cuda_graphs=not args.eager,
            on_progress=progress,
        )
        async with engine:
            found["start_s"] = round(time.perf_counter() - began, 2)
            found["stages_s"] = {name: round(at, 2) for name, at in marks.items()}
            await follow(engine, prompts(1, 16, 0)[0], 2)
            found["first_token_s"] = round(time.perf_counter() - began, 2)
            # What the kernels of prefill need compiled is not what the rows measure.
            for length in (1024, 4096):
                await asyncio.gather(*[follow(engine, p, 8) for p in prompts(20, length, 1)])
            found["warm_s"] = round(time.perf_counter() - began, 2)
            for name in args.rows or rows:
                busy_ns, since = (
                    (await engine.stats()).device["device_busy_ns"],
                    time.perf_counter(),
                )
                found[name] = await rows[name](engine)
                busy_ns = (await engine.stats()).device["device_busy_ns"] - busy_ns
                found[name]["device_busy"] = round(busy_ns / 1e9 / (time.perf_counter() - since), 3)
                print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batched-tokens", type=int, default=4096)
    parser.add_argument("--eager", action="store_true", help="no graphs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = uvloop.run(measure(args))
    print(json.dumps(found))
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
