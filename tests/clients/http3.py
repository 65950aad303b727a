"""HTTP/3 by real clients: aioquic, in this process, and ngtcp2's client, as Debian has it.

Both read as the clients of test_byte_for_byte do: an object is a client bound to a node and a bucket name.
"""

import asyncio
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys

import house
from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionTerminated, StreamReset

MIB = 1 << 20
AT_ONCE = 4  # streams of one connection


class Answer:
    """One answer as it came."""

    def __init__(self):
        self.headers, self.body, self.error = {}, bytearray(), None

    @property
    def status(self):
        return int(self.headers.get(":status", "0"))

    @property
    def tier(self):
        return self.headers.get("x-forebay-cache", "")


class Protocol(QuicConnectionProtocol):
    """A connection of HTTP/3; every request is a stream."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.http = H3Connection(self._quic)
        self.open, self.ended, self.received, self.at_bytes = {}, {}, 0, None

    def begin(self, authority, method, path, headers=(), body=None):
        stream = self._quic.get_next_available_stream_id()
        head = [(b":method", method.encode()), (b":scheme", b"https"), (b":authority", authority.encode()),
                (b":path", path.encode()), *((name.encode(), value.encode()) for name, value in headers)]
        self.open[stream], self.ended[stream] = Answer(), asyncio.get_running_loop().create_future()
        self.http.send_headers(stream, head, end_stream=body is None)
        if body is not None:
            self.http.send_data(stream, body, end_stream=True)
        self.transmit()
        return stream

    async def finish(self, stream):
        try:
            await asyncio.wait_for(self.ended[stream], house.PATIENCE)
        except (ConnectionError, TimeoutError, asyncio.TimeoutError) as error:
            self.open[stream].error = repr(error)
        del self.ended[stream]
        return self.open.pop(stream)

    def quic_event_received(self, event):
        if isinstance(event, (ConnectionTerminated, StreamReset)):
            for stream, future in self.ended.items():
                if not future.done() and getattr(event, "stream_id", stream) == stream:
                    future.set_exception(ConnectionError(repr(event)))
        for event in self.http.handle_event(event):
            answer = self.open.get(getattr(event, "stream_id", None))
            if answer is None:
                continue
            if isinstance(event, HeadersReceived):
                answer.headers.update((name.decode(), value.decode()) for name, value in event.headers)
            elif isinstance(event, DataReceived):
                answer.body += event.data
                self.received += len(event.data)
                if self.at_bytes and self.received >= self.at_bytes[0]:
                    _, action = self.at_bytes
                    self.at_bytes = None
                    action()
            if event.stream_ended and not self.ended[event.stream_id].done():
                self.ended[event.stream_id].set_result(None)

    def port(self):
        return self._transport.get_extra_info("sockname")[1]

    def move(self):
        """Goes on from another port, without a word to the peer, as behind a router that forgot us."""
        loop, old = asyncio.get_running_loop(), self._transport

        async def rebind():
            fresh = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
            fresh.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            fresh.bind(("::", 0))
            await loop.create_datagram_endpoint(lambda: self, sock=fresh)
            self.transmit()
            old.close()

        self.moving = loop.create_task(rebind())


def connection(node):
    """An open connection, for `async with`."""
    host, port = node.quic.split(":")
    configuration = QuicConfiguration(alpn_protocols=H3_ALPN, is_client=True, verify_mode=ssl.CERT_NONE,
                                      max_data=16 * MIB, max_stream_data=8 * MIB)
    return connect(host, int(port), configuration=configuration, create_protocol=Protocol)


async def ask(node, asks):
    """The answers to (method, path, headers, body), some at a time over one connection."""
    answers = []
    async with connection(node) as protocol:
        for at in range(0, len(asks), AT_ONCE):
            streams = [protocol.begin(node.quic, *ask) for ask in asks[at:at + AT_ONCE]]
            answers += [await protocol.finish(stream) for stream in streams]
    return answers


class Aioquic:
    """Reads through aioquic."""

    name = "aioquic"

    def __init__(self, node, accelerator):
        self.node, self.accelerator = node, accelerator

    def whole(self, keys):
        keys = list(keys)
        for key, answer in zip(keys, self._get([(key, None) for key in keys])):
            yield key, None if answer.error else bytes(answer.body), answer.tier

    def download(self, keys):
        return iter(())

    def ranges(self, wanted):
        for answer in self._get([(key, text) for key, text, _, _ in wanted]):
            yield None if answer.error else bytes(answer.body), answer.tier, answer.status

    def _get(self, asks):
        asks = [("GET", f"/{self.accelerator}/{key}", [("range", f"bytes={text}")] if text else [], None)
                for key, text in asks]
        return asyncio.run(ask(self.node, asks))


class Ngtcp2:
    """Reads through ngtcp2's client, which knows neither ranges nor headers of one's own."""

    name = "ngtcp2"
    PROGRAM = "gtlsclient"

    def __init__(self, node, accelerator):
        self.node, self.accelerator, self.folder = node, accelerator, house.room()

    def whole(self, keys):
        keys = list(keys)
        host, port = self.node.quic.split(":")
        urls = [f"https://{self.node.quic}/{self.accelerator}/{key}" for key in keys]
        done = subprocess.run(
            [self.PROGRAM, "--no-quic-dump", "--no-http-dump", "--exit-on-all-streams-close", "--disable-early-data",
             f"--timeout={house.PATIENCE}s", f"--download={self.folder}", host, port, *urls],
            capture_output=True, text=True, errors="replace", timeout=house.PATIENCE * 2)
        tiers = dict(re.findall(r"stream (0x[0-9a-f]+).*?\[x-forebay-cache: (\w+)\]", done.stderr + done.stdout))
        for number, key in enumerate(keys):
            path = os.path.join(self.folder, key)
            body = None
            if os.path.exists(path):
                with open(path, "rb") as file:
                    body = file.read()
                os.remove(path)
            yield key, body, tiers.get(hex(number * 4), "")


def available():
    """Whether ngtcp2's client is there."""
    return shutil.which(Ngtcp2.PROGRAM) is not None


if __name__ == "__main__":
    sys.exit("run test_http3.py")
