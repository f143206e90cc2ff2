"""The command line. Torch is imported only by what runs a model, so that `--help` is quick."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aengine.errors import AEngineError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from aengine.outputs import RequestOutput

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
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for programs.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    model: Model = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template: continue the text.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or int8.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, streaming."""
    options = {"dtype": dtype, "device": device, "max_num_seqs": 1}
    _run(_generate(prompt, model, max_tokens, temperature, seed, raw, options, as_json))


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
        _print_json(_summary(result) | {"text": result.text})
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
def pull(
    model: Annotated[str, typer.Argument(help="A bundled alias.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a bundled model into the cache folder."""
    from aengine.model.hub import pull as fetch
    from aengine.serve.progress import Bar

    with _errors(), Bar() as bar:
        path = fetch(model, on_progress=bar)
    sys.stdout.write(f"{path}\n")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can run, and what is missing and why."""
    from aengine.serve.doctor import examine

    findings = examine()
    if as_json:
        _print_json(findings)
        return
    width = max(map(len, findings))
    for name, value in findings.items():
        sys.stdout.write(f"{name:<{width}}  {value}\n")


@app.command()
def version() -> None:
    """Print the version."""
    from aengine import __version__

    sys.stdout.write(f"{__version__}\n")


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")


@contextmanager
def _errors() -> Iterator[None]:
    """Turn the package's errors into one clear line and an exit code."""
    try:
        yield
    except AEngineError as error:
        sys.stderr.write(f"aengine: {error}\n")
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from error
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        raise SystemExit(130) from None


def _run(main: Coroutine[Any, Any, None]) -> None:
    with _errors():
        asyncio.run(main)


def main() -> None:
    """The `aengine` command."""
    # A terminal may hand over bytes that are not UTF-8: refuse them by name, not by a traceback.
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            sys.stderr.write(f"aengine: an argument is not valid UTF-8: {argument!a}\n")
            raise SystemExit(2) from None
    app()
