"""Runs PyTorch operators under a dispatch mode and gets a StableHLO module: the one path from every mode to a program."""
