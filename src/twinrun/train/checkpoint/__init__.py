"""Saving and resuming inside the ranks: PyTorch plans and reshards, the storage is ours."""
