#!/usr/bin/env python3
"""Zero-copy sends where they are real: a node in a guest, readers outside of it who stop.

The network reads the node's memory until a reader has acknowledged it, long after the send has returned. So readers ask
for objects and read nothing; the node's memory is then used for other objects, all of it several times; and then they
read. On each kernel twice: with the program as users get it, and with the one that overwrites returned memory.

Programs come from FOREBAY_NODE (release), FOREBAY_NODE_POISON (debug assertions) and FOREBAY_BENCH (the emulator).
`FOREBAY_VM_KERNELS` chooses series of kernels, by default those of the two Debian releases that are in use. Needs root.
Ends with `N passed, N failed`.
"""

import http.client
import os
import socket
import subprocess
import sys

import machine
from machine import GUEST, HOST, Machine

SIZE, HOT, COLD = 1 << 20, 4, 160
MEMORY = 64  # MiB; far less than the cold objects
READERS = 3
TOKEN = "a-token-of-this-test"
ORIGIN = f"{HOST}:9000"

passed = failed = 0


def check(name, good, detail=""):
    global passed, failed
    if good:
        passed += 1
    else:
        failed += 1
        print(f"FAILED {name}{': ' if detail else ''}{detail}", flush=True)


def key(number):
    return f"/bucket/piece-{number:08}"


class Plain:
    """A connection whose reader reads when it is told to."""

    def __init__(self, number, window=None):
        self.socket = socket.socket()
        if window:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        self.socket.settimeout(machine.PATIENCE)
        self.socket.connect((GUEST, 7070))
        self.number = number
        self.socket.sendall(f"GET {key(number)} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n".encode())

    def read(self):
        answer = http.client.HTTPResponse(self.socket)
        answer.begin()
        body = answer.read()
        self.socket.close()
        return answer.status, body


def ask(address, method, path, headers=None):
    connection = http.client.HTTPConnection(address, timeout=machine.PATIENCE)
    connection.request(method, path, headers=headers or {})
    answer = connection.getresponse()
    return answer.status, answer.read()


class Node:
    """The node in the guest, by its admin door."""

    @staticmethod
    def admin(method, path):
        return ask(f"{GUEST}:7071", method, path, {"Authorization": f"Bearer {TOKEN}"})

    def metrics(self):
        _, text = self.admin("GET", "/metrics")
        rows = (line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def metric(self, name):
        return self.metrics()[name]

    def drain(self):
        status, words = self.admin("POST", "/v1/drain")
        check("the node drains", status < 300, f"{status} {words}")

    def is_ready(self):
        try:
            return self.admin("GET", "/readyz")[0] == 200
        except OSError:
            return False


def is_right(number, answer, direct):
    """Whether the answer is what the store says; it is asked once for each object."""
    if number not in direct:
        direct[number] = ask(ORIGIN, "GET", key(number))
    return answer == direct[number] and answer[0] == 200


def wrong_ones(numbers, direct):
    return [number for number in numbers if not is_right(number, ask(f"{GUEST}:7070", "GET", key(number)), direct)]


def readers_stop(label, guest, direct):
    node = Node()
    guest.until("the node is ready", node.is_ready)
    # At once: a kernel that does not say what it copied refuses to be asked, and must be believed by each.
    first = [Plain(number) for number in range(HOT)]
    wrong = [reader.number for reader in first if not is_right(reader.number, reader.read(), direct)]
    check(f"{label}: right bytes from the origin", not wrong, wrong)
    sent = node.metric("forebay_serve_sent_zero_copy_bytes_total")
    check(f"{label}: bodies are sent zero-copy", sent > HOT * SIZE / 2, sent)
    guest.until("all is given back", lambda: node.metric("forebay_serve_zero_copy_bytes") == 0)

    readers = [Plain(number, window=4096) for number in range(READERS)]
    # Each is asked for room no more: what left is in the network's hands, the rest is an offset.
    guest.until("readers hold some", lambda: node.metric("forebay_serve_zero_copy_bytes") > READERS * 4096)
    guest.until("nothing moves", lambda: settled(node))
    held = node.metric("forebay_serve_zero_copy_bytes")
    evicted = node.metric("forebay_arena_pages_evicted_total")
    for round_ in range(2):
        wrong = wrong_ones(range(HOT, HOT + COLD), direct)
        check(f"{label}: right bytes in round {round_}", not wrong, wrong)
    evicted = node.metric("forebay_arena_pages_evicted_total") - evicted
    check(f"{label}: all memory is used again, more than once", evicted * 2 > MEMORY, evicted)
    # Neither less nor more: the readers of now have given theirs back.
    guest.until("only readers who stopped hold some", lambda: node.metric("forebay_serve_zero_copy_bytes") == held)
    wrong = [reader.number for reader in readers if not is_right(reader.number, reader.read(), direct)]
    check(f"{label}: readers who stopped get what was sent", not wrong, wrong)
    guest.until("all is given back", lambda: node.metric("forebay_serve_zero_copy_bytes") == 0)

    # One who never comes back.
    gone = Plain(0, window=4096)
    guest.until("it holds some", lambda: node.metric("forebay_serve_zero_copy_bytes") > 4096)
    gone.socket.close()
    guest.until("what it held comes back", lambda: node.metric("forebay_serve_zero_copy_bytes") == 0)

    numbers = node.metrics()
    zero_copy = numbers["forebay_serve_sent_zero_copy_bytes_total"]
    copied = numbers["forebay_serve_zero_copy_copied_bytes_total"]
    # An early 6.1 does not say; its doctor does.
    is_said = "says which paths copy" in guest.log()
    check(f"{label}: zero-copy sends are granted", "granted  zero-copy send" in guest.log())
    check(f"{label}: the kernel does not say that it copied", copied == 0, f"{copied} of {zero_copy}")
    said = f"{copied:.0f} bytes of it copied" if is_said else "whether copied is not said by this kernel"
    drive = numbers["forebay_store_read_bytes_total"]
    check(f"{label}: the drive served", drive > 0)
    bad = sum(value for name, value in numbers.items() if name.startswith("forebay_store_blocks_bad_total"))
    check(f"{label}: no block was bad", bad == 0, bad)
    held = {name: value for name, value in numbers.items() if "reserve_used" in name and "ram" not in name}
    check(f"{label}: no lease is left", not any(held.values()), held)
    print(f"{label}: {zero_copy / 1e6:.0f} MB sent zero-copy, {said}, {evicted:.0f} pages evicted, "
          f"{drive / 1e6:.0f} MB from the drive", flush=True)


def settled(node):
    """Whether two looks, more than the node's ticks apart, see the same."""
    first = node.metric("forebay_serve_zero_copy_bytes")
    machine.time.sleep(2)
    return node.metric("forebay_serve_zero_copy_bytes") == first > 0


def job():
    return f"""
        /bin/forebay-node doctor
        for node in node node-poison; do
            dd if=/dev/zero of=/dev/nvme0n1 bs=1M count=16 2>/dev/null
            /bin/forebay-$node format /dev/nvme0n1 || exit 1
            AWS_EC2_METADATA_DISABLED=true /bin/forebay-$node serve --listen {GUEST}:7070 --admin {GUEST}:7071 \\
                --admin-token-file /token --memory {MEMORY}MiB --cores 0 --engine uring --drive /dev/nvme0n1 \\
                --anonymous --send-stall 10m --accelerator bucket=http://{ORIGIN}/bucket,freshness=immutable
            echo "guest: $node ended"
        done
    """


def main():
    cache = os.environ["FOREBAY_VM_CACHE"]
    kernels = {series: machine.kernel(series, cache)
               for series in os.environ.get("FOREBAY_VM_KERNELS", "6.12 6.1").split()}
    machine.enter_network()
    work = machine.room()
    with open(f"{work}/token", "w") as file:
        file.write(f"{TOKEN}\n")
    programs = {"/token": f"{work}/token"}
    for name, variable in (("forebay-node", "FOREBAY_NODE"), ("forebay-node-poison", "FOREBAY_NODE_POISON")):
        machine.run("objcopy", "--strip-debug", os.environ[variable], f"{work}/{name}")
        programs[f"/bin/{name}"] = f"{work}/{name}"
    origin = subprocess.Popen(
        [os.environ["FOREBAY_BENCH"], "origin", "--listen", ORIGIN, "--profile", "raw",
         "--dataset", f"bucket/piece-,count={HOT + COLD},size={SIZE}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=machine.end_with_parent)
    direct = {}
    try:
        for series, folder in kernels.items():
            with Machine(folder, job(), programs) as guest:
                guest.until("it is up", lambda: "is up" in guest.log())
                readers_stop(series, guest, direct)
                Node().drain()
                guest.until("the first node has ended", lambda: "node ended" in guest.log())
                readers_stop(f"{series}, poison", guest, direct)
    finally:
        origin.kill()
        origin.wait()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
