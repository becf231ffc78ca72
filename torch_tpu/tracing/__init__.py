"""Runs PyTorch operators under a dispatch mode and gets a StableHLO module: the one way from a call to a program."""
