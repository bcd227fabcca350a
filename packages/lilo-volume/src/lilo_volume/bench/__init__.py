"""What publishing costs over plain writing, measured: nodes as processes, both ways in one run."""
