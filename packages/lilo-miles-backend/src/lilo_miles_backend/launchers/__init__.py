"""Launchers: how ranks come to exist. A launcher is all that differs between a laptop and a cluster."""
