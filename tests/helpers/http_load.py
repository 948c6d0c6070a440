"""A client that is light enough to be a thousand: one request a connection, over asyncio's own streams."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply:
    """Status and headers are in; the body is still to be read, until the server closes."""

    status: int
    reader: asyncio.StreamReader

    async def text(self) -> str:
        """The body as it is on the wire, chunk lengths included."""
        return (await self.reader.read()).decode()


@asynccontextmanager
async def post(url: str, path: str, body: Mapping[str, Any], *, buffer_bytes: int = 1 << 16) -> AsyncIterator[Reply]:
    """`buffer_bytes`: about what is read ahead; small ones make a slow reader slow for the server."""
    address = urlsplit(url)
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    await asyncio.get_running_loop().sock_connect(client, (address.hostname, address.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=buffer_bytes)
    try:
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        while await reader.readline() not in (b"\r\n", b""):
            pass
        yield Reply(status=status, reader=reader)
    finally:
        writer.close()


def last_event(text: str) -> str:
    """The last server-sent event of a stream."""
    return [line for line in text.splitlines() if line.startswith("data: ")][-1].removeprefix("data: ")
