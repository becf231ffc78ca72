"""Tiny random models of other people's architectures, and how they do on tpu: what ``benchmarks/models.py`` sweeps."""
