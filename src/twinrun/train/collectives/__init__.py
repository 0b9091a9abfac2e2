"""Collectives written on the point-to-point operations of a process group, for any of its backends."""
