"""What every operator means: one file per family, see :mod:`torch_tpu.lowering.registry`."""
