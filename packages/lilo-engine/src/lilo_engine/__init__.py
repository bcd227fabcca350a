"""Lilo's engine: a self-hosted training service that speaks the Tinker API.

The path of a request is the list of folders:

    requests/    1. REQUEST     HTTP in, HTTP out; nothing here decides
    operations/  2. OPERATION   what one client asked of one model: typed, numbered, remembered
    schedule/    3. SCHEDULE    which operations run next, together; pure
    commands/    4. COMMAND     what a trainer is told, and how it is reached
                 5. RANK, 6. CHECKPOINT: in the trainer's package; 7. VOLUME: in lilo_volume
    sampling/    8. SAMPLING    published adapters answer

Beside it: `control/` (sessions, runs, checkpoints, keys, as an index in SQL), `cli/` (the `lilo` command), `demo/`.
`engine.py` runs the path, `app.py` puts the parts together. Trainers and sampling engines are found through entry
points; this package imports neither torch nor a trainer.
"""
