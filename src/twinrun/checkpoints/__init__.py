"""Checkpoints as files: format, store, verification; needs no torch, so that hosts can check them too."""
