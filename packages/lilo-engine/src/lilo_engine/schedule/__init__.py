"""Schedule: which operations run next, together, and why. Pure: no clock, no await, no I/O."""
