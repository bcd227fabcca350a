"""A small server that speaks the protocol of the Modal client on loopback: one volume, a view per container.

A container is told from others by the token that its client sends. Its view is a folder that this server fills at the
mount and at each reload, and takes changes from at each commit. Every call is counted; any can be made to fail.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpclib
import grpclib.server
import modal
from aiohttp import web
from google.protobuf.empty_pb2 import Empty
from grpclib import Status
from modal_proto import api_pb2
from modal_proto.api_grpc import ModalClientBase

NAME = "checkpoints"
OPEN_FILES = "there are open files preventing the operation"


@dataclass
class View:
    """One container's mount, and what it held when it was last equal to the committed state."""

    mount: Path
    base: dict[str, bytes] = field(default_factory=dict)

    def files(self):
        found = (p for p in sorted(self.mount.rglob("*")) if p.is_file())
        return {p.relative_to(self.mount).as_posix(): p.read_bytes() for p in found}

    def has_open_files(self):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").startswith(f"{self.mount}/"):
                    return True
        return False


@dataclass
class Fault:
    """One call fails, before or after it was applied."""

    status: Status
    text: str
    applied: bool = False


class FakeModal(ModalClientBase):
    """The server. Use `running()`, then `mount(folder)` once per container."""

    def __init__(self, *, version: int = 2):
        self.version = version
        self.committed: dict[str, bytes] = {}
        self.views: dict[str, View] = {}
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, list[Fault]] = {}
        self.skip_reload = True
        self.blocks: dict[str, bytes] = {}
        self.http = ""
        self.url = ""

    # -- for tests ---------------------------------------------------------------------------------------------

    def mount(self, folder: Path) -> modal.Volume:
        """A container that mounts the volume at `folder`; its handle."""
        token = f"ak-{len(self.views)}"
        folder.mkdir(parents=True, exist_ok=True)
        self.views[token] = View(mount=folder)
        self._load(self.views[token])
        return modal.Volume.from_name(NAME, client=self.client(token))

    def outside(self) -> modal.Volume:
        """A handle for a place that mounts nothing."""
        return modal.Volume.from_name(NAME, client=self.client("ak-outside"))

    def client(self, token: str) -> modal.Client:
        client = modal.Client.from_credentials(token, "as-secret")
        self.clients.append(client)
        return client

    def fail(self, call: str, status: Status, text: str = "on purpose", *, applied=False, times=1):
        self.faults.setdefault(call, []).extend([Fault(status, text, applied)] * times)

    @contextlib.contextmanager
    def running(self):
        self.clients: list[modal.Client] = []
        ready, self._loop = threading.Event(), asyncio.new_event_loop()
        thread = threading.Thread(target=self._serve, args=(ready,))
        thread.start()
        assert ready.wait(10)
        try:
            yield self
        finally:
            for client in self.clients:
                client.close()
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(10)
            self._loop.close()

    def _serve(self, ready):
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._run(ready))

    async def _run(self, ready):
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/{key}", self._get_block)
        app.router.add_put("/{key}", self._put_block)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.http = f"http://127.0.0.1:{runner.addresses[0][1]}"
        server = grpclib.server.Server([self])
        await server.start("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server._server.sockets[0].getsockname()[1]}"
        ready.set()
        await self._stop.wait()
        server.close()
        await server.wait_closed()
        await runner.cleanup()

    # -- the protocol ------------------------------------------------------------------------------------------

    async def _answer(self, stream, act):
        """Count the call, fail if it is to fail, else act and send what that returns."""
        request = await stream.recv_message()
        call = type(request).__name__.removesuffix("Request")
        self.calls[call] += 1
        planned = self.faults.get(call)
        fault = planned.pop(0) if planned else None
        if fault is None or fault.applied:
            answer = act(request, stream.metadata.get("x-modal-token-id"))
        if fault is not None:
            raise grpclib.GRPCError(fault.status, fault.text)
        for item in answer if isinstance(answer, list) else [answer]:
            await stream.send_message(item)

    async def ClientHello(self, stream):
        await stream.recv_message()
        await stream.send_message(api_pb2.ClientHelloResponse())

    async def AuthTokenGet(self, stream):
        await stream.recv_message()
        await stream.send_message(api_pb2.AuthTokenGetResponse(token="x.e30.x"))

    async def VolumeGetOrCreate(self, stream):
        await self._answer(stream, self._get_or_create)

    async def VolumeCommit(self, stream):
        await self._answer(stream, self._commit)

    async def VolumeReload(self, stream):
        await self._answer(stream, self._reload)

    async def VolumeListFiles(self, stream):
        await self._answer(stream, self._list)

    async def VolumeListFiles2(self, stream):
        await self._answer(stream, self._list)

    async def VolumeGetFile2(self, stream):
        await self._answer(stream, self._get_file)

    async def VolumeCopyFiles(self, stream):
        await self._answer(stream, self._copy)

    async def VolumeCopyFiles2(self, stream):
        await self._answer(stream, self._copy)

    async def VolumeRemoveFile(self, stream):
        await self._answer(stream, self._remove)

    async def VolumeRemoveFile2(self, stream):
        await self._answer(stream, self._remove)

    async def VolumePutFiles2(self, stream):
        await self._answer(stream, self._put_files)

    def _get_or_create(self, request, _):
        assert request.object_creation_type == api_pb2.OBJECT_CREATION_TYPE_UNSPECIFIED, (
            "it made one"
        )
        if request.deployment_name != NAME:
            raise grpclib.GRPCError(
                Status.NOT_FOUND, f"Volume '{request.deployment_name}' not found"
            )
        return api_pb2.VolumeGetOrCreateResponse(
            volume_id="vo-1",
            version=self.version,
            metadata=api_pb2.VolumeMetadata(version=self.version, name=NAME),
        )

    def _commit(self, _, token):
        view = self._view(token)
        now = view.files()
        for path in view.base.keys() - now.keys():
            self.committed.pop(path, None)
        self.committed |= {path: data for path, data in now.items() if view.base.get(path) != data}
        view.base = now
        return api_pb2.VolumeCommitResponse(skip_reload=self.skip_reload)

    def _reload(self, _, token):
        view = self._view(token)
        if view.has_open_files():
            raise grpclib.GRPCError(Status.FAILED_PRECONDITION, OPEN_FILES)
        self._load(view)
        return Empty()

    def _view(self, token):
        if token not in self.views:
            raise grpclib.GRPCError(Status.FAILED_PRECONDITION, "the volume is not mounted here")
        return self.views[token]

    def _load(self, view):
        for item in view.mount.iterdir():
            shutil.rmtree(item) if item.is_dir() else item.unlink()
        for path, data in self.committed.items():
            place = view.mount / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        view.base = dict(self.committed)

    def _below(self, path):
        prefix = f"{path}/" if path else ""
        return [key for key in self.committed if key.startswith(prefix)]

    def _list(self, request, _):
        path = request.path.strip("/")
        assert request.recursive
        files = [path] if path in self.committed else self._below(path)
        if path and not files:
            raise grpclib.GRPCError(Status.NOT_FOUND, f"path not found: {path}")
        folders = {key.rpartition("/")[0] for key in files} - {"", path}
        entries = [
            api_pb2.FileEntry(path=key, type=api_pb2.FileEntry.FILE, size=len(self.committed[key]))
            for key in files
        ] + [api_pb2.FileEntry(path=key, type=api_pb2.FileEntry.DIRECTORY) for key in folders]
        answer = (
            api_pb2.VolumeListFiles2Response
            if self.version == 2
            else api_pb2.VolumeListFilesResponse
        )
        return [answer(entries=entries)]

    def _get_file(self, request, _):
        data = self.committed.get(request.path.strip("/"))
        if data is None:
            raise grpclib.GRPCError(Status.NOT_FOUND, f"file not found: {request.path}")
        size = 8 * 1024 * 1024
        urls = []
        for start in range(0, len(data), size):
            block = data[start : start + size]
            key = hashlib.sha256(block).hexdigest()
            self.blocks[key] = block
            urls.append(f"{self.http}/{key}")
        return api_pb2.VolumeGetFile2Response(get_urls=urls, size=len(data), start=0, len=len(data))

    def _copy(self, request, _):
        target = request.dst_path.strip("/")
        is_folder = bool(self._below(target))
        if len(request.src_paths) > 1 and not is_folder:
            raise grpclib.GRPCError(Status.INVALID_ARGUMENT, f"{target} is not a directory")
        for source in (path.strip("/") for path in request.src_paths):
            if source not in self.committed:
                raise grpclib.GRPCError(Status.NOT_FOUND, f"{source} not found")
            name = f"{target}/{source.rpartition('/')[2]}" if is_folder else target
            self.committed[name] = self.committed[source]
        return Empty()

    def _remove(self, request, _):
        path = request.path.strip("/")
        below = [path] if path in self.committed else self._below(path)
        if not below:
            raise grpclib.GRPCError(Status.NOT_FOUND, f"{path} not found")
        if path not in self.committed and not request.recursive:
            raise grpclib.GRPCError(Status.INVALID_ARGUMENT, f"{path} is a directory")
        for key in below:
            del self.committed[key]
        return Empty()

    def _put_files(self, request, _):
        missing = []
        for i, file in enumerate(request.files):
            for j, block in enumerate(file.blocks):
                key = block.contents_sha256.hex()
                if key not in self.blocks:
                    missing.append(
                        api_pb2.VolumePutFiles2Response.MissingBlock(
                            file_index=i, block_index=j, put_url=f"{self.http}/{key}"
                        )
                    )
        if not missing:
            for file in request.files:
                self.committed[file.path.strip("/")] = b"".join(
                    self.blocks[block.contents_sha256.hex()] for block in file.blocks
                )
        return api_pb2.VolumePutFiles2Response(missing_blocks=missing)

    async def _get_block(self, request):
        return web.Response(body=self.blocks[request.match_info["key"]])

    async def _put_block(self, request):
        self.blocks[request.match_info["key"]] = await request.read()
        return web.Response(body=b"ok")


FakeModal.__abstractmethods__ = frozenset()
