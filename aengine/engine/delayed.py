"""`delayed_sample` and `grammar_mask`: coroutines that chain, for rows that wait for a mask.

The forward of a step is running while its masks are filled in worker threads; only the sample of
the constrained rows waits for them.
"""

from __future__ import annotations


class DelayedSampling:
    """To be replaced below."""
