"""How the locks of a stack are resolved: one module for each kind of pin."""
