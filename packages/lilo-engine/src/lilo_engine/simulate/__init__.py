"""Simulate: synthetic clients and a clock of its own around the engine's real ledger and scheduler."""
