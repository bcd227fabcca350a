"""A PostgreSQL server of one's own: in a temporary folder, on a free port, as a normal user. Not a test."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

URL_VARIABLE = "LILO_TEST_RECORDS_URL"
"""A server that is there already: databases are made and dropped on it."""
_LIMIT_S = 60


def why_not() -> str | None:
    """Why no server can be started here; None: one can, or one is there."""
    if os.environ.get(URL_VARIABLE):
        return None
    if _program("postgres") is None:
        return f"neither {URL_VARIABLE} nor PostgreSQL (Debian's package `postgresql`) is there"
    if os.geteuid() == 0 and _user() is None:
        return "PostgreSQL does not run as root, and there is no user `postgres`"
    return None


@contextmanager
def postgres_server() -> Iterator[str]:
    """The address of a server's database `postgres`; `why_not` must have been asked."""
    given = os.environ.get(URL_VARIABLE)
    if given:
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="lilo-postgres-"))
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
    data, port = folder / "data", _free_port()
    try:
        _run("initdb", "-D", str(data), "-U", "lilo", "-A", "trust", "--no-sync")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c fsync=off -k {folder}"
        log = str(folder / "log")
        _run("pg_ctl", "start", "-w", "-t", "30", "-D", str(data), "-l", log, "-o", options)
        try:
            yield f"postgresql+psycopg://lilo@127.0.0.1:{port}/postgres"
        finally:
            _run("pg_ctl", "stop", "-D", str(data), "-m", "immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def database(server_url: str) -> Iterator[str]:
    """The address of a new, empty database on a server; dropped afterwards, whoever still uses it."""
    name = f"lilo_{uuid.uuid4().hex[:12]}"
    engine = sa.create_engine(server_url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(sa.text(f"CREATE DATABASE {name}"))
        yield sa.make_url(server_url).set(database=name).render_as_string(hide_password=False)
        with engine.connect() as connection:
            connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
    finally:
        engine.dispose()


def _run(program: str, *arguments: str) -> None:
    path = _program(program)
    assert path is not None, program
    user = _user() if os.geteuid() == 0 else None
    # Output into a pipe would be kept open by the server.
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            [path, *arguments],
            user=user,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=_LIMIT_S,
            check=False,
        )
        output.seek(0)
        assert done.returncode == 0, f"{program}: {output.read().decode()}"


def _program(name: str) -> str | None:
    found = shutil.which(name)
    if found is not None:
        return found
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(versions[-1]) if versions else None


def _user() -> int | None:
    try:
        return pwd.getpwnam("postgres").pw_uid
    except KeyError:
        return None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
