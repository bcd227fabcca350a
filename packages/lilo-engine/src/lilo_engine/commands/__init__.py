"""Commands: what a trainer is told, and how it is reached, kept running and given up."""
