"""WebServer: what counts as a quiet moment."""

import anyio
import httpx
import pytest
from lilo_engine.cli.listener import listen
from lilo_engine.requests.long_polls import LongPolls
from lilo_engine.requests.web_server import WebServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

pytestmark = pytest.mark.anyio


async def test_polls_that_wait_leave_a_server_quiet_and_another_request_does_not():
    polls, news, asked, answer = LongPolls(), anyio.Event(), anyio.Event(), anyio.Event()

    async def poll(request: Request) -> PlainTextResponse:
        async def look(wait_s: float) -> str:
            with anyio.move_on_after(wait_s):
                news.set()
                await anyio.sleep_forever()
            return ""

        return PlainTextResponse(
            await polls.answer(request, look, 25.0, pending=lambda found: not found)
        )

    async def work(_: Request) -> PlainTextResponse:
        asked.set()
        await answer.wait()
        return PlainTextResponse("done")

    app = Starlette(routes=[Route("/poll", poll), Route("/work", work)])
    server, listener = WebServer(app, polls), listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with anyio.fail_after(20):
        async with httpx.AsyncClient(timeout=20) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(server.run, listener)
            tasks.start_soon(client.get, f"{url}/poll")
            await news.wait()
            assert server.quiet
            tasks.start_soon(client.get, f"{url}/work")
            await asked.wait()
            assert not server.quiet
            answer.set()
            server.stop()
