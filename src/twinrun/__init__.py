"""Run published LLM-training experiments again and judge their claims."""

__version__ = "0.1.0"
