"""Verification: the library against a higher-precision run of the PyTorch code it came from."""
