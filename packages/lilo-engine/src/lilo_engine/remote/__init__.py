"""Remote: the engine's process as fronts in other processes reach it: each call is one HTTP request with a frame."""
