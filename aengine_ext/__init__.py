"""C extensions beneath aengine. Each module is optional; this package imports nothing of aengine.

`_completions` is the completion queue and wake-up path of `aengine.device`;
`_cpu` holds the CPU kernels of `aengine.kernels`.
"""
