"""The command line. Torch is imported only by what runs a model, so that `--help` is quick."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aengine.serve.console import MISUSED, complain, errors_as_lines, print_json

if TYPE_CHECKING:
    from aengine.outputs import RequestOutput
    from aengine.serve.bench import Load

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="An LLM inference engine that lives inside your asyncio program.",
)

DEFAULT_MODEL = "smollm2-135m"

Model = Annotated[
    str, typer.Option("--model", "-m", help="Alias, .gguf file, Hugging Face folder or hub id.")
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling reproducible.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or int8.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for programs.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    model: Model = DEFAULT_MODEL,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template: continue the text.")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, streaming."""
    options = {"dtype": dtype, "device": device, "max_num_seqs": 1}
    asyncio.run(_generate(prompt, model, max_tokens, temperature, seed, raw, options, as_json))


async def _generate(
    prompt: str,
    model: str,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    raw: bool,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    from aengine import Engine, SamplingParams
    from aengine.engine.prompts import check_prompt
    from aengine.serve.progress import Bar

    check_prompt(prompt)  # before a model is fetched or loaded for it
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with Bar() as bar:
        engine = await Engine(model, on_progress=bar, **options).start()
    async with engine:
        stream = engine.generate(prompt if raw else [{"role": "user", "content": prompt}], params)
        async for chunk in stream:
            if not as_json:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        result = await stream
    if as_json:
        print_json({"text": result.text} | _summary(result))
    else:
        sys.stdout.write("\n")
        sys.stderr.write(_closing_line(result) + "\n")


def _summary(result: RequestOutput) -> dict[str, Any]:
    metrics = result.metrics
    return {
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "ttft_s": metrics.ttft,
        "tokens_per_s": None if not metrics.mean_itl else 1 / metrics.mean_itl,
    }


def _closing_line(result: RequestOutput) -> str:
    metrics, usage = result.metrics, result.usage
    ttft = "-" if metrics.ttft is None else f"{metrics.ttft * 1e3:.0f} ms"
    speed = "-" if not metrics.mean_itl else f"{1 / metrics.mean_itl:.1f} tokens/s"
    return f"{usage.completion_tokens} tokens ({result.finish_reason}), TTFT {ttft}, {speed}"


@app.command()
def chat(
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Talk with a model. Ctrl-C stops an answer; /new begins anew; /quit or Ctrl-D ends."""
    from aengine import BlockingEngine, SamplingParams
    from aengine.serve.chat import HELP, Chat, note, read, write
    from aengine.serve.progress import Bar

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with ExitStack() as stack:
        with Bar() as bar:
            engine = stack.enter_context(
                BlockingEngine(model, on_progress=bar, dtype=dtype, device=device, max_num_seqs=1)
            )
        note(HELP)
        Chat(engine, params, system=system, write=write, note=note).run(read)


@app.command()
def bench(
    model: Model = DEFAULT_MODEL,
    requests: Annotated[int, typer.Option(min=1, help="How many in all.")] = 8,
    concurrency: Annotated[int, typer.Option(min=1, help="How many at once.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens a prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each.")] = 64,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure throughput and latencies on this machine."""
    from aengine.serve.bench import Load

    load = Load(
        requests=requests,
        concurrency=concurrency,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    asyncio.run(_bench(model, load, {"dtype": dtype, "device": device}, as_json))


async def _bench(model: str, load: Load, options: dict[str, Any], as_json: bool) -> None:
    from aengine import Engine
    from aengine.serve.bench import describe, measure
    from aengine.serve.progress import Bar

    with Bar() as bar:
        engine = await Engine(model, on_progress=bar, **options).start()
    async with engine:
        found = {"model": model} | await measure(engine, load)
    if as_json:
        print_json(found)
    else:
        sys.stdout.write(describe(found) + "\n")


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="A bundled alias.")] = DEFAULT_MODEL,
    as_json: AsJson = False,
) -> None:
    """Fetch a bundled model into the cache folder, and print where it lies."""
    from aengine.model.hub import pull as fetch
    from aengine.serve.progress import Bar

    with Bar() as bar:
        path = fetch(model, on_progress=bar)
    if as_json:
        print_json({"model": model, "path": str(path), "bytes": path.stat().st_size})
    else:
        sys.stdout.write(f"{path}\n")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can run, and what is missing and why."""
    from aengine.serve.doctor import examine

    findings = examine()
    if as_json:
        print_json(findings)
        return
    width = max(map(len, findings))
    for name, value in findings.items():
        sys.stdout.write(f"{name:<{width}}  {value}\n")


@app.command()
def version() -> None:
    """Print the version."""
    from aengine import __version__

    sys.stdout.write(f"{__version__}\n")


def main() -> None:
    """The `aengine` command."""
    as_json = "--json" in sys.argv
    # A terminal may hand over bytes that are not UTF-8: refuse them by name, not by a traceback.
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            message = f"an argument is not valid UTF-8: {argument!a}"
            complain(message, code="invalid_usage", as_json=as_json)
            raise SystemExit(MISUSED) from None
    with errors_as_lines(as_json=as_json):
        status = app(standalone_mode=False)
    if status:  # an interrupt, to typer
        raise SystemExit(status)
