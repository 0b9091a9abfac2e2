"""Memory and time of a training before it runs, with an interval: no hardware, no framework."""
