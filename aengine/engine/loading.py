"""`load_parts`: how a real engine gets its parts. Each piece of work in its own thread."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aengine.device.cpu import CpuDevice
from aengine.device.cuda import CudaDevice
from aengine.device.lanes import use_threads
from aengine.device.trace import Trace
from aengine.engine.ending import GRACE, closed
from aengine.engine.grammars import Grammars
from aengine.engine.parts import EngineParts
from aengine.engine.text_thread import TextThread
from aengine.errors import AEngineError, ConfigError, DeviceError
from aengine.policy.scheduler import Scheduler
from aengine.threads import DaemonPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aengine.config import EngineConfig
    from aengine.device.cuda_stream import CudaStream
    from aengine.device.protocols import Device, Stream
    from aengine.execute.loader import LoadedModel
    from aengine.execute.model_memory import LoadedMemory
    from aengine.model.chat import ChatTemplate
    from aengine.model.files import LoadedFiles
    from aengine.model.tokenizer import Tokenizer


logger = logging.getLogger("aengine")


@dataclass(frozen=True, slots=True)
class Codec:
    """A model's text side, as `prompts` wants it."""

    tokenizer: Tokenizer
    chat: ChatTemplate

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation."""
        return self.chat.render(messages)


async def load_parts(
    config: EngineConfig, on_progress: Callable[[str, int, int], None]
) -> EngineParts:
    """Find, fetch if needed, and load a model.

    Raises:
        ModelLoadError, ConfigError, OutOfMemoryError: it cannot be served; the message says why.
    """
    text_thread = TextThread("aengine-text")
    device: Device | None = None
    grammars: Grammars | None = None
    stream: Stream
    try:
        files = await text_thread.run(_open, config, on_progress)
        grammars = Grammars(
            files.tokenizer,
            files.end_token_ids,
            vocab_size=files.config.vocab_size,
            limits=config.grammar,
        )
        grammars.prepare()
        index = await text_thread.run(_cuda_index, config.device)
        trace = None if config.trace is None else Trace()
        on_progress("load", 0, 1)
        if index is None:
            device = CpuDevice(initializer=_threads(config.cpu_threads), trace=trace)
            stream = device.stream("forward")
            try:
                model = await stream.launch(_load_on_cpu, config, files)
            except DeviceError as error:
                if isinstance(error.__cause__, AEngineError):
                    raise error.__cause__ from error.__cause__.__cause__
                raise
        else:
            config = replace(config, scheduler=config.scheduler.on_gpu())
            device = gpu = CudaDevice(index, trace=trace)
            stream = lane = device.stream("forward")
            # In a thread: what a GPU is given to do is prepared by the one who launches it.
            pool = DaemonPool(1, "aengine-load")
            loading = asyncio.get_running_loop().run_in_executor(
                pool, load_on_gpu, config, files, gpu, lane, on_progress
            )
            pool.shutdown(wait=False)
            model = await loading
        on_progress("load", 1, 1)
    except BaseException:
        # What was begun ends first, in bounded time: a load that hangs must not hold up its end.
        await closed(partial(_close, text_thread, grammars, device), GRACE)
        raise
    return EngineParts(
        model_name=config.model,
        scheduler=Scheduler(
            config.scheduler,
            num_blocks=model.num_blocks,
            max_model_len=model.max_model_len,
            num_host_blocks=model.host_blocks.num_blocks if model.host_blocks else 0,
        ),
        launcher=model.runner,
        host_blocks=model.host_blocks,
        memory=_memory(config, files, model, index),
        set_threads=use_threads if index is None else None,
        device=device,
        forward_stream=stream,
        codec=Codec(files.tokenizer, files.chat),
        tokenizer=files.tokenizer,
        end_token_ids=files.end_token_ids,
        max_model_len=model.max_model_len,
        text_thread=text_thread,
        trace=trace,
        trace_path=config.trace,
        grammars=grammars,
    )


def _close(text_thread: TextThread, grammars: Grammars | None, device: Device | None) -> None:
    text_thread.close()
    if grammars is not None:
        grammars.close()
    if device is not None:
        device.close()


def _memory(
    config: EngineConfig, files: LoadedFiles, model: LoadedModel, index: int | None
) -> LoadedMemory:
    import torch

    from aengine.execute.model_memory import LoadedMemory

    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    return LoadedMemory(config, files, model, device)


def _open(config: EngineConfig, on_progress: Callable[[str, int, int], None]) -> LoadedFiles:
    # Imported where the work is done: these bring the tokenizer's and the format's libraries.
    from aengine.model.files import open_model
    from aengine.model.hub import resolve

    return open_model(resolve(config.model, on_progress), weights=config.load_format != "dummy")


def _cuda_index(device: str) -> int | None:
    """The GPU that a `device` setting means; None: the CPU.

    Raises:
        ConfigError: a GPU is asked for and there is none of that number.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return None
    import torch

    count = torch.cuda.device_count()
    if kind == "auto":
        return 0 if count else None
    number = int(index) if index.isdigit() else (-1 if index else 0)
    if not 0 <= number < count:
        raise ConfigError(f"device={device!r}: this machine has {count} CUDA devices, from 0 on")
    return number


def _threads(count: int | None) -> Callable[[], None] | None:
    """Sets torch's threads on the thread that computes; None leaves them alone."""
    if count is None:
        return None

    def initialize() -> None:
        import torch

        torch.set_num_threads(count)

    return initialize


def _load_on_cpu(config: EngineConfig, files: LoadedFiles) -> LoadedModel:
    import torch

    from aengine.execute.loader import load_model

    return load_model(config, files, torch.device("cpu"))


def load_on_gpu(
    config: EngineConfig,
    files: LoadedFiles,
    device: CudaDevice,
    stream: CudaStream,
    on_progress: Callable[[str, int, int], None],
) -> LoadedModel:
    """Load, and capture the common decode steps. Its work is on `stream` when it returns.

    Raises:
        ModelLoadError, ConfigError, OutOfMemoryError: as `load_parts`.
    """
    import torch

    from aengine.execute.cuda_capture import capture_common, warm_up_prefill
    from aengine.execute.loader import load_model
    from aengine.execute.memory import CudaMemory

    with device.current(), device.guard(stream.handle):
        torch_device = torch.device("cuda", device.index)
        model = load_model(config, files, torch_device)
        on_progress("warm up", 0, 1)
        warm_up_prefill(model, config.scheduler.max_num_batched_tokens, torch_device)
        on_progress("warm up", 1, 1)
        if config.cuda_graphs:
            memory = CudaMemory(torch_device)
            before = memory.free()
            graphs = capture_common(config.scheduler, model, device, stream, on_progress)
            if graphs is not None:
                model.runner.use_graphs(graphs)
                taken, reserved = before - memory.free(), model.profile.graphs
                logger.info("graphs take %d MiB of %d reserved", taken >> 20, reserved >> 20)
    return model
