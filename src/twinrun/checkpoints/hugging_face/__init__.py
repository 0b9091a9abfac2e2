"""The weights of a checkpoint in Hugging Face format, and back: a module here for each model family."""
