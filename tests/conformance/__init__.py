"""Every operator, module and optimizer description of PyTorch on device "tpu" against the CPU.

``python -m tests.conformance`` runs it (see :mod:`tests.conformance.run`); ``test_slice.py`` is the part that
``make test`` runs.
"""
