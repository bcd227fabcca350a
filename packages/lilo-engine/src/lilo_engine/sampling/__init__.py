"""8. SAMPLING: published adapters answer `asample`.

`manager.py` stands between a front and a sampling engine (`engine.py` is the protocol): futures, retries, adapters
loaded on demand, restarts. `launcher.py` starts the engine in a process of its own (`host.py`), `remote.py` speaks to
it over a socket. The engines themselves are found by entry point, in the group `lilo.samplers`.
"""
