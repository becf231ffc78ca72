"""The command line, ``python -m torch_tpu``: one file per command."""
