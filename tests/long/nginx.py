#!/usr/bin/env python3
"""CPU time a gigabyte, hot in RAM, against nginx at its best: one worker each on core 0, the load on core 1.

For each cell nginx is first tried both ways, from files and from its cache, and the better one is the peer. Then
pairs in ABBA order, their number fixed beforehand; all runs are printed. The bound is on the upper end of the
95 % interval of the paired ratio.
"""

import argparse
import json
import statistics
import sys

import bed

CPU_RATIO_MAX = 1.25


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10, choices=sorted(bed.STUDENT_95))
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a run")
    parser.add_argument("--cells", nargs="+", default=list(bed.CELLS), choices=list(bed.CELLS))
    parser.add_argument("--json", help="file for every run")
    options = parser.parse_args()

    print(f"on {bed.machine()}")
    folder = bed.room()
    bed.make_files(folder, options.cells)
    passed = failed = 0
    record = {"machine": bed.machine(), "cells": {}}
    with bed.nginx(folder, "static") as static, bed.nginx(folder, "cache") as cache, bed.Node(static) as node:
        for cell in options.cells:
            for server in (static, cache, node) * 3:
                bed.load(server, cell, "--order", "once")
            peer = best_of(static, cache, cell)
            runs = pairs(node, peer, cell, options)
            record["cells"][cell] = {"peer": peer.name, "runs": runs}
            ratio, low, high = bed.paired_ratio([(ours["cpu_s_per_gb"], theirs["cpu_s_per_gb"]) for ours, theirs in runs])
            good = high <= CPU_RATIO_MAX
            passed, failed = passed + good, failed + (not good)
            size, count = bed.CELLS[cell]
            print(f"{count} x {size} bytes, CPU-s/GB against {peer.name}: {ratio:.3f}x, 95 % interval {low:.3f} to {high:.3f}, "
                  f"{len(runs)} pairs; at most {CPU_RATIO_MAX} wanted: {'ok' if good else 'FAILED'}")
            for name, better in [("core_s_per_gb", "lower"), ("requests_per_second", "higher"), ("p99_us", "lower")]:
                ratio, low, high = bed.paired_ratio([(ours[name], theirs[name]) for ours, theirs in runs])
                print(f"    {name}: {ratio:.3f}x, {low:.3f} to {high:.3f} ({better} is better; not judged)")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(record, file, indent=1)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def best_of(static, cache, cell):
    costs = {}
    for server in (static, cache) * 3:
        costs.setdefault(server, []).append(bed.measure(server, cell, 2)["cpu_s_per_gb"])
    for server, values in costs.items():
        print(f"{cell}: {server.name} alone {' '.join(f'{value:.3f}' for value in values)} CPU-s/GB")
    return min(costs, key=lambda server: statistics.median(costs[server]))


def pairs(node, peer, cell, options):
    runs = []
    print(f"{'run':>4} {'server':14} {'req/s':>8} {'MB/s':>6} {'p50 us':>7} {'p99 us':>7} {'CPU-s/GB':>9} {'core':>7}")
    for number in range(options.pairs):
        order = (node, peer) if number % 2 == 0 else (peer, node)
        pair = {}
        for server in order:
            result = pair[server] = bed.measure(server, cell, options.seconds, tier="ram" if server is node else None)
            print(f"{number:>4} {server.name:14} {result['requests_per_second']:8.0f} "
                  f"{result['bytes'] / result['seconds'] / 1e6:6.0f} {result['p50_us']:7} {result['p99_us']:7} "
                  f"{result['cpu_s_per_gb']:9.4f} {result['core_s_per_gb']:7.4f}", flush=True)
        runs.append((pair[node], pair[peer]))
    return runs


if __name__ == "__main__":
    sys.exit(main())
