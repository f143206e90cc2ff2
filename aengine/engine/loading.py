"""`load_parts`: how a real engine gets its parts. Each piece of work in its own thread."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aengine.device.cpu import CpuDevice
from aengine.device.cuda import CudaDevice
from aengine.device.lanes import open_lanes, use_threads
from aengine.device.trace import Trace
from aengine.engine.gpu_loading import load_on_gpu
from aengine.engine.grammars import Grammars
from aengine.engine.parts import EngineParts
from aengine.engine.text_thread import TextThread
from aengine.errors import AEngineError, ConfigError, DeviceError
from aengine.policy.mux import takes_turns
from aengine.policy.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aengine.config import EngineConfig
    from aengine.device.lanes import Lanes
    from aengine.device.protocols import Device, Stream
    from aengine.execute.launcher import Launcher
    from aengine.execute.loader import LoadedModel
    from aengine.execute.model_memory import LoadedMemory
    from aengine.model.chat import ChatTemplate
    from aengine.model.files import LoadedFiles
    from aengine.model.tokenizer import Tokenizer


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

    def fewest_tokens(self, text: str) -> int:
        """No text has fewer tokens; known without encoding it."""
        return self.tokenizer.fewest_tokens(text)

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
    lanes: Lanes | None = None
    launchers: Mapping[Stream, Launcher] = {}
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
            loop = asyncio.get_running_loop()
            if not takes_turns(config.mux):
                lanes = open_lanes(gpu, lane, cores=0)
            # In a thread: what a GPU is given to do is prepared by the one who launches it.
            model, launchers = await loop.run_in_executor(
                None, load_on_gpu, config, files, gpu, lane, lanes, on_progress
            )
        on_progress("load", 1, 1)
    except BaseException:
        text_thread.close()
        if grammars is not None:
            grammars.close()
        if device is not None:
            device.close()
        if lanes is not None:
            lanes.close()
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
        lanes=lanes,
        lane_launchers=launchers,
        codec=Codec(files.tokenizer, files.chat),
        tokenizer=files.tokenizer,
        end_token_ids=files.end_token_ids,
        max_model_len=model.max_model_len,
        text_thread=text_thread,
        trace=trace,
        trace_path=config.trace,
        grammars=grammars,
    )


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
