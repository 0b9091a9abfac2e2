"""What ranks score a model with: lm-eval, a rule of ours inside it, and tasks of ours for any machine."""
