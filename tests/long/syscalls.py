#!/usr/bin/env python3
"""System calls a hit: `raw_syscalls:sys_enter` of the whole node around a fixed number of RAM hits.

At most 3 for an object of 100 KB, amortised at 32 connections; and not one body byte copied in user space.
"""

import os
import subprocess
import sys

import bed

HITS = 20_000
SYSCALLS_MAX = 3.0


def main():
    print(f"on {bed.machine()}")
    folder = bed.room()
    bed.make_files(folder, ["k"])
    passed = failed = 0
    with bed.nginx(folder) as origin, bed.Node(origin) as node:
        bed.load(node, "k", "--order", "once")
        bed.load(node, "k", "--seconds", "1", tier="ram")
        copied = node.metric("forebay_serve_hit_copied_bytes_total")
        for connections in (1, 32):
            counted = syscalls(node, connections)
            print(f"{connections:3} connections: {counted / HITS:.3f} system calls a hit ({counted} over {HITS} hits)")
        good = counted / HITS <= SYSCALLS_MAX
        passed, failed = passed + good, failed + (not good)
        print(f"at 32 connections at most {SYSCALLS_MAX} wanted: {'ok' if good else 'FAILED'}")
        copied = node.metric("forebay_serve_hit_copied_bytes_total") - copied
        passed, failed = passed + (copied == 0), failed + (copied != 0)
        print(f"body bytes copied in user space: {copied:.0f}: {'ok' if copied == 0 else 'FAILED'}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def syscalls(node, connections):
    """perf attaches to every thread that the node has now, and counts while the load runs."""
    # taskset has become the node by exec, so the child's id is the node's.
    size, count = bed.CELLS["k"]
    done = subprocess.run(
        ["perf", "stat", "-x", ",", "-e", "raw_syscalls:sys_enter", "-p", str(node.child.pid), "--",
         "taskset", "-c", "1", os.environ["FOREBAY_LOAD"], node.address, "/data/k/", "--count", str(count),
         "--bytes", str(size), "--connections", str(connections), "--requests", str(HITS), "--tier", "ram"],
        capture_output=True, text=True, check=True,
    )
    if '"errors":0' not in done.stdout:
        raise SystemExit(f"the load met errors: {done.stdout}")
    for line in done.stderr.splitlines():
        fields = line.split(",")
        if "raw_syscalls:sys_enter" in line and fields[0].isdigit():
            return int(fields[0])
    raise SystemExit(f"perf counted nothing:\n{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
