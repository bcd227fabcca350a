"""Bench: measures the engine without a trainer's arithmetic: `lilo bench engine`."""
