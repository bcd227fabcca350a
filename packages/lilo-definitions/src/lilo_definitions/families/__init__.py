"""One file per model family: what each of its sizes needs. A new model is a new file here and nothing else."""
