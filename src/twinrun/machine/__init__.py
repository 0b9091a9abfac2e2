"""What a machine has: its processor, the devices that probes name, and what stands in the way of a run."""
