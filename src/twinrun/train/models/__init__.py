"""One paper-sized file per model family; each needs torch and `ModelShape`, nothing else."""
