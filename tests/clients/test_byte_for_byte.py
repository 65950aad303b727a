#!/usr/bin/env python3
"""Every byte that boto3 put into a real S3 server comes back through the node, to boto3 and to curl.

Objects of the sizes where blocks, extents and multipart uploads begin and end; whole and in 500 random ranges;
cold, from RAM and from the drive; on both engines; through the doors of HTTP and HTTPS; with as many workers as there
are cores, and with one. `x-forebay-cache` proves which tier answered, and the origin's counters prove that it was left
alone. FOREBAY_TEST_SEED replays a run.
"""

import io
import os
import random
import sys

import house
from botocore.exceptions import BotoCoreError, ClientError

BROKEN = (BotoCoreError, ClientError)
MIB = 1 << 20
SIZES = [0, 1, 65535, 65536, 65537, MIB - 1, MIB, MIB + 1, 10_000_000, 100_000_000]
RANGES = 500
RANGE_BYTES_MAX = 4 * MIB
RAM_BYTES_MAX = 64 * MIB  # of the node that reads from its drive
BUCKET = "bytes-bucket"


class Boto:
    """Reads through boto3, both ways that people use it."""

    name = "boto3"

    def __init__(self, node, accelerator, tls=False):
        self.client, self.accelerator = node.tls_client() if tls else node.client(), accelerator

    def whole(self, keys):
        for key in keys:
            body, tier, _ = self._get(Key=key)
            yield key, body, tier

    def download(self, keys):
        """download_file: a HEAD, then parallel ranges under If-Match."""
        for key in keys:
            target = io.BytesIO()
            try:
                self.client.download_fileobj(self.accelerator, key, target)
            except BROKEN as error:
                print(f"download_file {key}: {error}")
            yield key, target.getvalue()

    def ranges(self, wanted):
        for key, text, _, _ in wanted:
            yield self._get(Key=key, Range=f"bytes={text}")

    def _get(self, **ask):
        """(body, tier, status); a failure is no body, and its error is printed."""
        try:
            answer = self.client.get_object(Bucket=self.accelerator, **ask)
            told = answer["ResponseMetadata"]
            return answer["Body"].read(), told["HTTPHeaders"].get("x-forebay-cache", ""), told["HTTPStatusCode"]
        except BROKEN as error:
            print(f"{ask}: {error}")
            return None, "", 0


class Curl:
    """Reads through curl, one process for a list of requests."""

    name = "curl"

    def __init__(self, node, accelerator, tls=False):
        self.url, self.folder = f"{node.tls_url if tls else node.url}/{accelerator}", house.room()
        self.trusted = node.trusted if tls else None

    def whole(self, keys):
        for key, (body, tier, _) in zip(keys, self._run([(key, None) for key in keys])):
            yield key, body, tier

    def download(self, keys):
        return iter(())

    def ranges(self, wanted):
        return self._run([(key, text) for key, text, _, _ in wanted])

    def _run(self, asks):
        files = [os.path.join(self.folder, str(number)) for number in range(len(asks))]
        for file in files:
            open(file, "w").close()  # curl makes no file for an empty body
        jobs = [(f"{self.url}/{key}", text, file) for (key, text), file in zip(asks, files)]
        answers = house.curl(jobs, self.folder, self.trusted)
        for file, (status, tier) in zip(files, answers):
            with open(file, "rb") as body:
                yield body.read(), tier, status
            os.remove(file)


def length_of(body):
    return "no body" if body is None else f"{len(body)} bytes"


def random_ranges(rng, objects, count=RANGES):
    """(key, text after `bytes=`, first, end): closed, open and suffix ranges, some reaching past the end."""
    keys = [key for key, body in objects.items() if body]
    wanted = []
    while len(wanted) < count:
        key = rng.choice(keys)
        size = len(objects[key])
        length = min(size, int(2 ** rng.uniform(0, RANGE_BYTES_MAX.bit_length() - 1)))
        first = rng.randrange(size - length + 1)
        kind = rng.random()
        if kind < 0.8:
            past = rng.choice([0, 0, 0, 5]) if first + length == size else 0
            wanted.append((key, f"{first}-{first + length - 1 + past}", first, first + length))
        elif kind < 0.9:
            wanted.append((key, f"-{length}", size - length, size))
        else:
            wanted.append((key, f"{size - length}-", size - length, size))
    return wanted


def read_whole(tally, label, reader, objects, tiers):
    """All objects whole; `tiers` are the words allowed in x-forebay-cache for those that have bytes."""
    for key, body, tier in reader.whole(list(objects)):
        tally.check(f"{label} whole {key}", body == objects[key], length_of(body))
        if objects[key]:
            tally.check(f"{label} whole {key} comes from {'/'.join(tiers)}", tier in tiers, f"`{tier}`")


def read_ranges(tally, label, reader, objects, wanted, tiers):
    """The random ranges, one check for the bytes of all and one for their tiers; returns the tiers seen."""
    wrong, seen = [], {}
    for (key, text, first, end), (body, tier, status) in zip(wanted, reader.ranges(wanted)):
        seen[tier] = seen.get(tier, 0) + 1
        if status != 206 or body != objects[key][first:end]:
            wrong.append(f"{key} {text}: status {status}, {length_of(body)}")
    tally.check(f"{label} {len(wanted)} ranges", not wrong, "; ".join(wrong[:5]))
    tally.check(f"{label} ranges come from {'/'.join(tiers)}", set(seen) <= set(tiers), str(seen))
    return seen


def main():
    tally = house.Tally()
    seed = int(os.environ.get("FOREBAY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"seed {seed} (FOREBAY_TEST_SEED={seed} replays it)")
    rng = random.Random(seed)
    objects = {f"size-{size}": rng.randbytes(size) for size in SIZES}
    wanted = random_ranges(rng, objects)
    # Half of these lie in an object that the RAM tier cannot hold: whatever the seed, many are on the drive.
    large = {key: body for key, body in objects.items() if len(body) > RAM_BYTES_MAX}
    wanted_from_drive = wanted[:RANGES // 2] + random_ranges(rng, large, RANGES // 2)

    with house.S3Origin(BUCKET) as origin:
        for key, body in objects.items():
            origin.client().upload_fileobj(io.BytesIO(body), BUCKET, key)
        for engine in ["uring", "portable"]:
            for kind in [Boto, Curl]:
                through(tally, f"{engine} {kind.name}", engine, kind, origin, objects, wanted, wanted_from_drive)
                print(f"{engine} {kind.name}: {tally.passed} checks passed so far, {tally.failed} failed")
    return tally.close()


def through(tally, label, engine, kind, origin, objects, wanted, wanted_from_drive):
    """One engine and one client: cold, RAM, drive."""
    with house.Node(engine, origin, ["whole", "ranges", "tls-ranges"], memory="1GiB", tls="self-signed") as node:
        whole, ranges = kind(node, "whole"), kind(node, "ranges")
        tls_whole, tls_ranges = kind(node, "whole", tls=True), kind(node, "tls-ranges", tls=True)
        read_whole(tally, f"{label} cold", whole, objects, ["miss"])
        for door, reader in [("", whole), (" https", tls_whole)]:
            for key, body in reader.download(list(objects)):
                tally.check(f"{label}{door} download_file {key}", body == objects[key], length_of(body))
        for door, reader in [("", ranges), (" https", tls_ranges)]:
            seen = read_ranges(tally, f"{label}{door} cold", reader, objects, wanted, ["miss", "partial", "ram"])
            tally.check(f"{label}{door} some of the cold ranges were misses", seen.get("miss", 0) > 0, str(seen))

        before = origin.counts()
        encrypted = node.metric("forebay_serve_tls_bytes_total")
        for door, reader in [("", whole), (" https", tls_whole)]:
            read_whole(tally, f"{label}{door} ram", reader, objects, ["ram"])
            read_ranges(tally, f"{label}{door} ram", reader, objects, wanted, ["ram"])
        after = origin.counts()
        encrypted = node.metric("forebay_serve_tls_bytes_total") - encrypted
        asked = sum(map(len, objects.values())) + sum(end - first for _, _, first, end in wanted)
        tally.check(f"{label} https encrypts each byte once", asked < encrypted < 1.01 * asked + 2**20,
                    f"{encrypted} for {asked}")
        tally.check(f"{label} a hit is not copied", node.metric("forebay_serve_hit_copied_bytes_total") == 0)
        tally.check(f"{label} hits fetched no body", after["bodies"] == before["bodies"], f"{before} {after}")

    # A RAM tier that holds a fraction of the set: what is read comes from the drive. One worker does it all.
    one = str(min(os.sched_getaffinity(0)))
    with house.Node(engine, origin, ["drive"], str(RAM_BYTES_MAX), drive_size="1GiB", tls="self-signed", cores=one) as node:
        reader = kind(node, "drive")
        https = kind(node, "drive", tls=True)
        hold_on_drive(tally, label, node, reader, origin, objects)
        from_drive(tally, label, [("", reader, reader), (" https", https, https)], origin, objects, wanted_from_drive)


def hold_on_drive(tally, label, node, reader, origin, objects):
    """Reads until the drive holds everything: memory may give pieces up that a writer who is behind has not taken.

    A pass that asks the origin for nothing may have found some in memory that are not written yet; so one more, when
    nothing waits for the writer any more, must ask for nothing either.
    """
    held = False
    is_settled = False
    for _ in range(20):
        before = origin.counts()["bodies"]
        for key, body, _ in reader.whole(list(objects)):
            tally.check(f"{label} while the drive fills {key}", body == objects[key])
        is_clean = origin.counts()["bodies"] == before
        held = is_clean and is_settled
        if held:
            break
        is_settled = is_clean
        if is_settled:
            node.until("nothing waits for the drive", lambda: node.metric("forebay_store_writes_pending") == 0 or None)
    tally.check(f"{label} the drive holds the whole set after 20 passes at most", held)


def from_drive(tally, label, doors, origin, objects, wanted):
    """Through each door, of which are given its name, who reads whole objects and who reads ranges."""
    before = origin.counts()
    for door, whole, ranges in doors:
        read_whole(tally, f"{label}{door} drive", whole, objects, ["drive", "ram"])
        seen = read_ranges(tally, f"{label}{door} drive", ranges, objects, wanted, ["drive", "ram"])
        tally.check(f"{label}{door} many of the ranges came from the drive", seen.get("drive", 0) >= len(wanted) // 10,
                    str(seen))
    after = origin.counts()
    tally.check(f"{label} the drive spared the origin", after["bodies"] == before["bodies"], f"{before} {after}")


if __name__ == "__main__":
    sys.exit(main())
