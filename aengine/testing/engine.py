"""`scripted_engine`: a real engine around a scripted model, for tests of embedding programs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from aengine.config import EngineConfig
from aengine.device.cpu import CpuDevice
from aengine.engine.front import Engine
from aengine.engine.grammars import Grammars
from aengine.engine.parts import EngineParts
from aengine.engine.text_thread import TextThread
from aengine.policy.scheduler import Scheduler
from aengine.testing.scripted import TOKEN_BYTES, ScriptedLauncher, arithmetic_script
from aengine.testing.tokens import ByteTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.device.protocols import Device
    from aengine.testing.replies import Replies
    from aengine.testing.scripted import Faults, Script


E = TypeVar("E", bound=Engine)


def scripted_engine(
    script: Script | Replies | None = None,
    *,
    num_blocks: int = 256,
    max_model_len: int = 512,
    faults: Faults | None = None,
    device: Callable[[], Device] = CpuDevice,
    **options: Any,
) -> Engine:
    """A plain `Engine` around a script; arguments as of `scripted`."""
    return scripted(
        Engine,
        script,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        faults=faults,
        device=device,
        **options,
    )


def scripted(
    kind: type[E],
    script: Script | Replies | None = None,
    *,
    num_blocks: int = 256,
    max_model_len: int = 512,
    faults: Faults | None = None,
    device: Callable[[], Device] = CpuDevice,
    **options: Any,
) -> E:
    """An engine whose model is a function and whose tokens are bytes.

    Scheduling, KV blocks, streaming, cancellation and shutdown are those of a real engine; only the
    tensors are missing. The engine is not started: use `async with`.

    Args:
        kind: `Engine`, or a class of it.
        script: `script(tokens so far) -> next token`, 0 to 255 for a byte, 256 to end; None: bytes
            that depend on every token before, and never an end. Or `Replies`: whole answers.
        num_blocks: KV blocks (of `block_size` tokens, an option).
        max_model_len: longest prompt plus output, in tokens.
        faults: what goes wrong, and when.
        device: makes the device, a `CpuDevice` by default.
        options: as of `aengine.Engine`.
    """
    config = EngineConfig.from_options("scripted", options)
    config = replace(config, max_model_len=max_model_len)
    tokenizer = ByteTokenizer()

    async def load(config: EngineConfig, _: Callable[[str, int, int], None]) -> EngineParts:
        settings = config.scheduler
        made = device()
        num_host_blocks = settings.swap_space // (TOKEN_BYTES * settings.tokens_per_block)
        launcher = ScriptedLauncher(
            script or arithmetic_script(256),
            vocab_size=tokenizer.vocab_size,
            num_blocks=num_blocks,
            block_size=settings.tokens_per_block,
            max_num_seqs=settings.max_num_seqs,
            faults=faults,
            num_host_blocks=num_host_blocks,
        )
        return EngineParts(
            model_name="scripted",
            scheduler=Scheduler(
                settings,
                num_blocks=num_blocks,
                max_model_len=max_model_len,
                num_host_blocks=num_host_blocks,
            ),
            launcher=launcher,
            host_blocks=launcher if num_host_blocks else None,
            device=made,
            forward_stream=made.stream("forward"),
            codec=tokenizer,
            tokenizer=tokenizer,
            end_token_ids=tokenizer.eos_token_ids,
            max_model_len=max_model_len,
            text_thread=TextThread("aengine-text"),
            grammars=Grammars(
                tokenizer,
                tokenizer.eos_token_ids,
                vocab_size=tokenizer.vocab_size,
                limits=config.grammar,
            ),
        )

    return kind.from_parts(config, load)
