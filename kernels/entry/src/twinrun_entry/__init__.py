"""Calls of kernels that repeat go through one entry in C++: what the packages of kernels share."""

__version__ = "0.1.0"
