#!/usr/bin/env python3
"""Every byte through HTTP/3, to aioquic and to ngtcp2's client; and a client that changes its port half-way.

The door is the only thing that differs from test_byte_for_byte, so sizes and ranges are fewer here. Both engines, one
and two workers; from RAM and from a drive. What the answers say is compared with what HTTP/1.1 says of the same object.
"""

import asyncio
import io
import os
import random
import sys
import urllib.error
import urllib.request

import house
import http3
from test_byte_for_byte import MIB, Boto, from_drive, hold_on_drive, length_of, random_ranges, read_ranges, read_whole

SIZES = [0, 1, 65535, 65536, 65537, MIB - 1, MIB, MIB + 1, 10_000_000]
RANGES = 60
MOVED_BYTES = 20_000_000
# Twice what a RAM tier of less than 64 MiB can hold: wherever the ranges fall, many are on the drive.
LARGE = [10_000_000] * 13
BUCKET = "http3-bucket"
# Of one connection, one answer or one door.
NOT_COMPARED = {":status", "date", "x-amz-request-id", "connection", "alt-svc"}


def main():
    tally = house.Tally()
    seed = int(os.environ.get("FOREBAY_TEST_SEED", random.randrange(1 << 32)))
    print(f"seed {seed} (FOREBAY_TEST_SEED={seed} replays it)")
    rng = random.Random(seed)
    objects = {f"size-{size}": rng.randbytes(size) for size in SIZES}
    wanted = random_ranges(rng, objects, RANGES)
    moved = rng.randbytes(MOVED_BYTES)
    large = {f"large-{number}": rng.randbytes(size) for number, size in enumerate(LARGE)}
    wanted_large = random_ranges(rng, large, RANGES)
    with house.S3Origin(BUCKET) as origin:
        for key, body in {**objects, **large, "moved": moved}.items():
            origin.client().upload_fileobj(io.BytesIO(body), BUCKET, key)
        for engine in ["uring", "portable"]:
            a_drive(tally, engine, origin, large, wanted_large)
            for cores in [house.cores(1), house.cores(2)]:
                label = f"{engine} cores {cores}"
                with house.Node(engine, origin, ["python", "ngtcp2", BUCKET], "256MiB", quic=True,
                                cores=cores, arguments=["--alt-svc", "all"]) as node:
                    whole_set(tally, f"{label} aioquic", http3.Aioquic(node, "python"), objects, origin, wanted)
                    whole_set(tally, f"{label} ngtcp2", http3.Ngtcp2(node, "ngtcp2"), objects, origin)
                    a_client_that_moves(tally, label, node, moved)
                    the_same_words(tally, label, node)
                    writes(tally, label, node, origin, rng.randbytes(3 * MIB + 1))
                    copied = node.metric("forebay_serve_quic_send_bytes_total")
                    tally.check(f"{label} what QUIC was given is counted", copied >= MOVED_BYTES, str(copied))
                print(f"{label}: {tally.passed} checks passed so far, {tally.failed} failed")
    return tally.close()


def whole_set(tally, label, reader, objects, origin, wanted=None):
    """Cold and from RAM; ranges where the client has them."""
    read_whole(tally, f"{label} cold", reader, objects, ["miss"])
    before = origin.counts()
    read_whole(tally, f"{label} ram", reader, objects, ["ram"])
    if wanted:
        read_ranges(tally, f"{label} ram", reader, objects, wanted, ["ram"])
    after = origin.counts()
    tally.check(f"{label} hits fetched no body", after["bodies"] == before["bodies"], f"{before} {after}")


def a_drive(tally, engine, origin, large, wanted):
    """From a drive; and what HTTP/1.1 says of this door when nothing is said of it."""
    with house.Node(engine, origin, ["drive"], "64MiB", drive_size="1GiB", quic=True, tls="self-signed",
                    cores=house.cores(1)) as node:
        hold_on_drive(tally, f"{engine} http3", node, Boto(node, "drive"), origin, large)
        doors = [(" http3", http3.Ngtcp2(node, "drive"), http3.Aioquic(node, "drive"))]
        from_drive(tally, engine, doors, origin, large, wanted)
        ours = f'h3=":{node.quic.split(":")[1]}"; ma=3600'
        for client, told in [(node.client(), None), (node.tls_client(), ours)]:
            said = client.head_object(Bucket="drive", Key="large-0")["ResponseMetadata"]["HTTPHeaders"]
            tally.check(f"{engine} by default HTTPS names this door, and plain HTTP does not: {told}",
                        said.get("alt-svc") == told, str(said))


def a_client_that_moves(tally, label, node, body):
    """Half-way its datagrams come from another port, which the kernel would hash to any worker."""

    async def read():
        async with http3.connection(node) as protocol:
            ports = [protocol.port()]
            protocol.at_bytes = (len(body) // 2, protocol.move)
            answer = await protocol.finish(protocol.begin(node.quic, "GET", f"/{BUCKET}/moved"))
            return answer, ports + [protocol.port()]

    # With two workers one move in two would go astray without steering.
    for number in range(2):
        answer, ports = asyncio.run(read())
        tally.check(f"{label} move {number}: the port has changed", ports[0] != ports[1], str(ports))
        tally.check(f"{label} move {number}: every byte", bytes(answer.body) == body,
                    f"{answer.error} {length_of(answer.body)}")


def the_same_words(tally, label, node):
    """Errors, conditions and heads are those of HTTP/1.1."""
    whole = f"/{BUCKET}/size-65537"
    # No HEAD: aioquic takes its length for that of a body that never comes.
    asks = [("GET", whole, [], None), ("GET", whole, [("range", "bytes=10-19")], None),
            ("GET", whole, [("range", "bytes=70000-")], None), ("GET", whole, [("if-match", '"no"')], None),
            ("GET", "/no-such-bucket/key", [], None), ("GET", "/", [], None)]
    asyncio.run(http3.ask(node, asks[:1]))  # so that both find it in RAM
    for ask, ours in zip(asks, asyncio.run(http3.ask(node, asks))):
        method, path, headers, _ = ask
        request = urllib.request.Request(node.url + path, method=method, headers=dict(headers))
        try:
            theirs = urllib.request.urlopen(request, timeout=house.PATIENCE)
        except urllib.error.HTTPError as error:
            theirs = error
        said = {name.lower(): value for name, value in theirs.headers.items()}
        body = theirs.read()
        tally.check(f"{label} {method} {path} {headers} has the same status", ours.status == theirs.status,
                    f"{ours.status} {theirs.status}")
        strip = lambda words: {name: value for name, value in words.items() if name not in NOT_COMPARED}
        tally.check(f"{label} {method} {path} {headers} has the same head", strip(ours.headers) == strip(said),
                    f"{ours.headers} {said}")
        # Each answer names its request.
        names = ours.headers.get("x-amz-request-id", "?").encode(), said.get("x-amz-request-id", "?").encode()
        tally.check(f"{label} {method} {path} {headers} has the same body",
                    bytes(ours.body).replace(names[0], b"") == body.replace(names[1], b""), f"{ours.body} {body}")
        tally.check(f"{label} HTTP/1.1 names the other door", f'h3=":{node.quic.split(":")[1]}"' in
                    said.get("alt-svc", ""), str(said))


def writes(tally, label, node, origin, body):
    """A PUT passes through, and a DELETE."""
    asks = [("PUT", f"/{BUCKET}/written", [("content-length", str(len(body)))], body)]
    [put] = asyncio.run(http3.ask(node, asks))
    tally.check(f"{label} a write", put.status == 200, f"{put.error} {put.headers} {bytes(put.body)}")
    there = origin.client().get_object(Bucket=BUCKET, Key="written")["Body"].read()
    tally.check(f"{label} a write lies at the origin", there == body, length_of(there))
    [got] = asyncio.run(http3.ask(node, [("GET", f"/{BUCKET}/written", [], None)]))
    [gone] = asyncio.run(http3.ask(node, [("DELETE", f"/{BUCKET}/written", [], None)]))
    tally.check(f"{label} a write is read back", bytes(got.body) == body, length_of(got.body))
    tally.check(f"{label} a deletion", gone.status == 204, str(gone.headers))


if __name__ == "__main__":
    sys.exit(main())
