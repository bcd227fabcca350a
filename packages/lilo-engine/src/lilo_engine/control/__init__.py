"""Control: sessions, runs, checkpoints, sampling sessions and keys, kept as an index in SQL."""
