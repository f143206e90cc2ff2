"""`ModelRunner`: launches one model's steps. The real `Launcher`.

Owns the model, its KV tensors and the sampler. Everything here runs on the forward stream (on a
CPU: on its worker, as does all torch work of an engine) and nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from aengine.batch import StepResult
from aengine.execute.forward import NativeForward
from aengine.execute.logprobs import prompt_logprobs
from aengine.execute.step_graphs import BegunGraph

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from aengine.batch import StepPlan, TokenLogprobs
    from aengine.device.future import DeviceFuture
    from aengine.execute.inputs import InputBuilder
    from aengine.execute.launcher import StepOutput
    from aengine.execute.logprobs import LogprobTensors
    from aengine.execute.sampler import Sampled, SampledCopy, Sampler
    from aengine.execute.step_graphs import StepGraphs
    from aengine.model.batch import ForwardBatch
    from aengine.request import Request


class Forward(Protocol):
    """A model bound to its KV cache: one step's tensors in, logits out."""

    vocab_size: int

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [S, vocab_size] float32 of the tokens at `batch.logit_index`."""
        ...


@dataclass(slots=True)
class _Part:
    """Some sampling rows of a step (plan rows, in order) and their sample."""

    rows: npt.NDArray[np.int64]
    sampled: Sampled


@dataclass(slots=True)
class BegunStep:
    """A step whose forward is launched and whose constrained rows are not sampled yet."""

    plan: StepPlan
    logits: torch.Tensor
    parts: list[_Part]
    prompt: list[tuple[int, LogprobTensors]]


@dataclass(slots=True)
class RunnerOutput:
    """A step's tokens on their way to the host."""

    plan: StepPlan
    parts: Sequence[tuple[npt.NDArray[np.int64], SampledCopy]]
    prompt: Sequence[tuple[int, LogprobTensors]]

    def to_host(self) -> StepResult:
        """The result, once the step's completion has fired."""
        tokens: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        errors: dict[int, Exception] = {}
        for rows, copy in self.parts:
            read = copy.read()
            plan_rows = rows.tolist()
            tokens.update(zip(plan_rows, read.token_ids, strict=True))
            logprobs.update((plan_rows[i], value) for i, value in read.logprobs.items())
            errors.update((plan_rows[i], error) for i, error in read.errors.items())
        sampling = np.flatnonzero(self.plan.samples).tolist()
        prompt: Mapping[int, Sequence[TokenLogprobs]] = {
            row: tensors.read() for row, tensors in self.prompt
        }
        return StepResult(
            step_id=self.plan.step_id,
            token_ids=[tokens.get(row, 0) for row in sampling],
            logprobs=logprobs,
            prompt_logprobs=prompt,
            errors=errors,
            unsampled=set(sampling) - set(tokens),
        )


class ModelRunner:
    """Launches steps of one model on one lane.

    Args:
        forward: the model with its KV cache, and with the workspaces of this lane.
        sampler: chooses tokens, holds the FutureMap.
        builder: makes tensors of plans.
    """

    def __init__(self, forward: Forward, sampler: Sampler, builder: InputBuilder) -> None:
        self.vocab_size = forward.vocab_size
        self._forward = forward
        self._sampler = sampler
        self._builder = builder
        self._requests: dict[int, Request] = {}
        self._graphs: StepGraphs | None = None
        self._beside: list[ModelRunner] = []

    def beside(self, forward: Forward) -> ModelRunner:
        """A launcher of another lane, for the same slots."""
        other = ModelRunner(forward, self._sampler, self._builder)
        other._requests = self._requests
        self._beside.append(other)
        return other

    def rebind(self, bind: Callable[[], Forward]) -> None:
        """Compute with what `bind` gives from the next step on; it is called once for each lane.

        No step may be in flight.
        """
        self._forward = bind()
        for other in self._beside:
            other.rebind(bind)

    @property
    def has_graphs(self) -> bool:
        """Whether captured graphs hold addresses of weights and KV cache."""
        return self._graphs is not None or any(other.has_graphs for other in self._beside)

    def use_graphs(self, graphs: StepGraphs) -> None:
        """Launch the steps that these graphs can do as graphs from now on."""
        self._graphs = graphs

    def replay(self, plan: StepPlan) -> DeviceFuture[StepOutput] | None:
        """See `Launcher.replay`."""
        return None if self._graphs is None else self._graphs.replay(plan)

    def replay_begin(self, plan: StepPlan) -> DeviceFuture[Any] | None:
        """See `Launcher.replay_begin`."""
        return None if self._graphs is None else self._graphs.begin(plan)

    def replay_finish(
        self, begun: DeviceFuture[Any], rows: Sequence[int], bitmask: npt.NDArray[np.int32]
    ) -> DeviceFuture[StepOutput] | None:
        """See `Launcher.replay_finish`."""
        step = begun.handle()
        if self._graphs is None or not isinstance(step, BegunGraph):
            return None
        return self._graphs.finish(step, rows, bitmask)

    def chore(self) -> Callable[[], None] | None:
        """See `Launcher.chore`; those of the lanes beside this one are among them."""
        own = None if self._graphs is None else self._graphs.chore()
        return own or next((c for other in self._beside if (c := other.chore())), None)

    def run(self, plan: StepPlan) -> RunnerOutput:
        """Forward, sample every sampling row, start the copy to the host."""
        return self._copy(self.begin(plan))

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> BegunStep:
        """Forward, and sample the rows that wait for no mask."""
        for init in plan.slot_inits:
            self._requests[init.slot] = init.request
            self._sampler.admit(init)
        for forced in plan.forced:
            self._sampler.force(forced)
        logits = self._compute(plan)
        sampling = np.flatnonzero(plan.samples)
        prompt = self._prompt_logprobs(plan, logits[len(sampling) :])
        begun = BegunStep(plan, logits[: len(sampling)], [], prompt)
        waiting = np.isin(sampling, plan.constrained)
        self._sample(begun, np.flatnonzero(~waiting), sampling)
        return begun

    def _compute(self, plan: StepPlan) -> torch.Tensor:
        newest = self._sampler.newest
        if isinstance(self._forward, NativeForward) and newest is not None:
            few = self._builder.few(plan, newest)
            if few is not None:
                return self._forward.compute(few)
        return self._forward(self._builder.build(plan, self._sampler.future_map))

    @torch.inference_mode()
    def finish(
        self, begun: BegunStep, rows: Sequence[int], bitmask: npt.NDArray[np.int32]
    ) -> RunnerOutput:
        """Sample the constrained rows that have a mask, start the copy to the host."""
        sampling = np.flatnonzero(begun.plan.samples)
        chosen = np.searchsorted(sampling, np.asarray(rows, dtype=np.int64))
        self._sample(begun, chosen, sampling, bitmask)
        return self._copy(begun)

    def _sample(
        self,
        begun: BegunStep,
        chosen: npt.NDArray[np.int64],
        sampling: npt.NDArray[np.int64],
        bitmask: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Sample the logit rows `chosen`; `sampling` maps logit rows to plan rows."""
        if not len(chosen):
            return
        plan, logits = begun.plan, begun.logits
        if len(chosen) != len(sampling):
            logits = logits[self._sampler.table.upload(chosen)]
        rows = sampling[chosen]
        sampled = self._sampler.sample(
            logits,
            plan.slots[rows],
            (plan.starts + plan.lengths)[rows].astype(np.int64),
            bitmask=None if bitmask is None else self._sampler.table.upload(bitmask),
            bitmask_rows=None if bitmask is None else np.arange(len(rows)),
        )
        begun.parts.append(_Part(rows, sampled))

    def _prompt_logprobs(
        self, plan: StepPlan, logits: torch.Tensor
    ) -> list[tuple[int, LogprobTensors]]:
        """Log-probabilities of the prompt tokens that follow each position of the wanting rows.

        `logits` holds every position of those rows, row by row. What follows a prompt's last
        position is the first output token, which has its log-probability from the sample.
        """
        found: list[tuple[int, LogprobTensors]] = []
        offset = 0
        for row in plan.prompt_logprob_rows:
            request = self._requests[int(plan.slots[row])]
            start, length = int(plan.starts[row]), int(plan.lengths[row])
            following = request.prompt_token_ids[start + 1 : start + length + 1]
            span = logits[offset : offset + len(following)]
            offset += length
            if following:
                targets = torch.tensor(following, dtype=torch.int64, device=logits.device)
                top = request.params.prompt_logprobs or 0
                found.append((row, prompt_logprobs(span, targets, top)))
        return found

    def _copy(self, begun: BegunStep) -> RunnerOutput:
        return RunnerOutput(
            begun.plan,
            [(part.rows, part.sampled.start_copy()) for part in begun.parts],
            [(row, tensors.start_copy()) for row, tensors in begun.prompt],
        )
