"""History: the operations that no snapshot covers yet, kept so that a lost model's state could be made again."""
