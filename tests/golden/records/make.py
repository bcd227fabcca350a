"""Writes a database that is kept here: `python make.py REVISION`, with the lilo-engine whose newest migration that is.

Run once for every migration that is released, into `revision-NNNN.sql`; what is kept is never written again. Each table
has one row; what a later migration adds to it is left out.
"""

import hashlib
import json
import sqlite3
import sys
import tempfile
from pathlib import Path

from alembic import command
from alembic.config import Config
from lilo_engine.control import records
from sqlalchemy import create_engine

SESSION = "5e551011-0000-4000-8000-000000000001"
KEY = "tml-golden"
RUN = f"{SESSION}:train:0"
ROWS = {
    "sessions": {
        "session_id": SESSION,
        "created_s": 1790000000.25,
        "last_seen_s": 1790000100.5,
        "ended_s": None,
        "end_reason": None,
        "sdk_version": "0.38.0",
        "display_name": "\u00e9t\u00e9 1",
        "tags": ["a", "b"],
        "user_metadata": {"note": 'quotes " and \u2014'},
        "project_id": "p",
        "owner": "ab12cd34",
    },
    "runs": {
        "run_id": RUN,
        "session_id": SESSION,
        "base_model": "tiny",
        "lora_rank": 8,
        "alpha": 16.0,
        "seed": 2**40,
        "train_attn": True,
        "train_mlp": False,
        "train_unembed": True,
        "source": None,
        "user_metadata": {},
        "created_s": 1790000010.0,
        "last_request_s": 1790000090.0,
        "ended_s": None,
        "end_reason": None,
        "owner": "ab12cd34",
    },
    "checkpoints": {
        "run_id": RUN,
        "kind": "weights",
        "name": "step 1",
        "attempt": "0123456789abcdef",
        "folder": "/data/checkpoints/run/weights/step/0123456789abcdef",
        "position": 3,
        "size_bytes": 2**33,
        "digest": "sha256:00",
        "created_s": 1790000050.0,
        "expires_s": 1890000000.0,
        "unnamed": False,
        "spec": {"base_model": "tiny", "lora_rank": "8"},
        "user_metadata": {"k": "v"},
        "public": True,
        "owner": "ab12cd34",
    },
    "sampling_sessions": {
        "sampling_session_id": f"{SESSION}:sample:0",
        "session_id": SESSION,
        "base_model": "tiny",
        "checkpoint": f"tinker://{RUN}/sampler_weights/inflight-00000002",
        "attempt": "fedcba9876543210",
        "moving": True,
        "created_s": 1790000060.0,
    },
    "keys": {
        "key_id": "ab12cd34",
        "name": "ann",
        "digest": hashlib.sha256(KEY.encode()).hexdigest(),
        "created_s": 1789999999.0,
        "revoked_s": None,
        "owner": "ab12cd34",
        "operator": False,
    },
    "secrets": {"name": "links", "value": "ab" * 32},
    "leases": {
        "name": "engine",
        "epoch": 7,
        "beat": 41,
        "held": True,
        "holder": "lilo serve tiny (pid 1 on host)",
        "process": "- 1 -",
        "address": None,
    },
    "usage": {
        "owner": "ab12cd34",
        "day": "2026-09-21",
        "trained_tokens": 2**40,
        "prompt_tokens": 5,
        "sampled_tokens": 6,
        "device_s": 7.5,
    },
}


def main() -> None:
    revision = sys.argv[1]
    kept = Path(__file__).parent / f"revision-{revision}.sql"
    if kept.exists():
        sys.exit(f"{kept} is there; what is kept is never written again")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.sqlite3"
        engine = create_engine(f"sqlite:///{file}")
        config = Config()
        config.set_main_option("script_location", str(Path(records.__file__).parent / "alembic"))
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
        engine.dispose()
        database = sqlite3.connect(file)
        for table, row in ROWS.items():
            there = {column[1] for column in database.execute(f"PRAGMA table_info({table})")}
            values = {
                name: json.dumps(value) if isinstance(value, list | dict) else value
                for name, value in row.items()
                if name in there
            }
            if values:
                places = ", ".join("?" * len(values))
                database.execute(
                    f"INSERT INTO {table} ({', '.join(values)}) VALUES ({places})",
                    list(values.values()),
                )
        database.commit()
        kept.write_text("\n".join(database.iterdump()) + "\n", "utf-8")
        database.close()


if __name__ == "__main__":
    main()
