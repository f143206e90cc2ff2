"""`Launcher`: what the step loop needs of the launch side. The real one is `ModelRunner`.

Each method is launched on a stream: on CUDA it runs at once and enqueues kernels, on a CPU it runs
on the stream's worker. None waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from aengine.batch import StepPlan, StepResult
    from aengine.device.future import DeviceFuture


class StepOutput(Protocol):
    """A step's tokens on their way to the host. Valid once the step's completion has fired."""

    def to_host(self) -> StepResult:
        """The result as host integers. Called once, after the await; does not block."""
        ...


class Launcher(Protocol):
    """Launches steps of a lane, in order. Lanes of one engine share its slots."""

    vocab_size: int

    def replay(self, plan: StepPlan) -> DeviceFuture[StepOutput] | None:
        """Launch a step as prepared driver calls, on the stream that they were prepared for.

        Not itself launched on a stream. None: this step needs `run`.

        Raises:
            DeviceError: the device is closed.
        """
        ...

    def replay_begin(self, plan: StepPlan) -> DeviceFuture[Any] | None:
        """`begin`, in the way of `replay`; None: this step needs `begin`."""
        ...

    def replay_finish(
        self, begun: DeviceFuture[Any], rows: Sequence[int], bitmask: npt.NDArray[np.int32]
    ) -> DeviceFuture[StepOutput] | None:
        """`finish` of what `replay_begin` gave; None: it was not that, and needs `finish`."""
        ...

    def chore(self) -> Callable[[], None] | None:
        """Work to do in a thread beside the steps, so that later ones are faster; None: nothing.

        One at a time; what it raises is worth a warning and no more.
        """
        ...

    def run(self, plan: StepPlan) -> StepOutput:
        """Forward, sample every sampling row, start the copy to the host."""
        ...

    def begin(self, plan: StepPlan) -> Any:
        """Forward, and sample the rows that wait for no mask."""
        ...

    def finish(self, begun: Any, rows: Sequence[int], bitmask: npt.NDArray[np.int32]) -> StepOutput:
        """Sample the constrained rows of a begun step, then start the copy to the host.

        Args:
            begun: what `begin` returned.
            rows: plan rows that have a mask; constrained rows not named here are left unsampled.
            bitmask: [len(rows), ceil(vocab_size / 32)] int32; a set bit allows the token.
        """
        ...
