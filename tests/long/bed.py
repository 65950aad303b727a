"""The bed that measurements lie in: nginx as origin, the node, the load; all pinned.

Servers run on core 0, the load on core 1. What is compared by time is compared by `forebay-bench peers`.
"""

import atexit
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request

CELLS = {"k": (100_000, 10_000), "m": (1 << 20, 1_000)}  # bytes, count


def room():
    path = tempfile.mkdtemp(prefix="forebay-long.")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    os.chmod(path, 0o755)  # nginx's workers are another user
    return path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_files(folder, cells):
    """CELL/N with bytes that do not compress; each file begins elsewhere in one random block."""
    block = os.urandom(4 << 20)
    for cell in cells:
        size, count = CELLS[cell]
        os.makedirs(os.path.join(folder, "data", cell))
        for number in range(count):
            start = number * 997 % (len(block) - size)
            with open(os.path.join(folder, "data", cell, str(number)), "wb") as file:
                file.write(block[start:start + size])


class Server:
    """A pinned process and its children; ended by their ids when the block ends."""

    def __init__(self, name, arguments, address, path="/"):
        self.name, self.address = name, address
        self.log = open(os.path.join(room(), f"{name}.log"), "wb+")
        self.child = subprocess.Popen(["taskset", "-c", "0", *arguments], stdin=subprocess.DEVNULL,
                                      stdout=self.log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{self.address}{path}", timeout=5).close()
                return
            if self.child.poll() is not None or time.monotonic() > deadline:
                self.log.seek(0)
                raise SystemExit(f"{name} did not start:\n{self.log.read().decode(errors='replace')}")
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(30)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.log.close()


def nginx(folder):
    """nginx that serves files by sendfile."""
    port = free_port()
    # As many open files as it may have; connections need some of them.
    descriptors = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1] % (1 << 31), 100_000)
    base = room()
    config = f"""
        user {'root' if os.geteuid() == 0 else 'nobody'};
        worker_processes 1;
        daemon off;
        worker_rlimit_nofile {descriptors};
        pid {base}/pid;
        error_log {base}/error.log;
        events {{ worker_connections 4096; use epoll; multi_accept on; }}
        http {{
            access_log off;
            default_type application/octet-stream;
            sendfile on;
            sendfile_max_chunk 0;
            tcp_nopush off;
            tcp_nodelay on;
            keepalive_requests 100000000;
            keepalive_timeout 3600s;
            open_file_cache max={descriptors - 5000} inactive=1d;
            open_file_cache_valid 1d;
            client_body_temp_path {base}/t1;
            proxy_temp_path {base}/t2;
            fastcgi_temp_path {base}/t3;
            uwsgi_temp_path {base}/t4;
            scgi_temp_path {base}/t5;
            server {{ listen 127.0.0.1:{port} reuseport; location / {{ root {folder}; }} }}
        }}
    """
    path = f"{base}/nginx.conf"
    with open(path, "w") as file:
        file.write(config)
    first = sorted(os.listdir(os.path.join(folder, "data")))[0]
    return Server("nginx", ["nginx", "-p", base, "-c", path], f"127.0.0.1:{port}", f"/data/{first}/0")


class Node(Server):
    """The node with one worker on core 0 in front of an nginx origin."""

    def __init__(self, origin, memory="3GiB", extra=()):
        self.admin = f"127.0.0.1:{free_port()}"
        data = f"127.0.0.1:{free_port()}"
        arguments = [os.environ["FOREBAY_NODE"], "serve", "--listen", data, "--admin", self.admin, "--anonymous",
                     "--engine", "uring", "--cores", "0", "--memory", memory,
                     "--accelerator", f"data=http://{origin.address}/data,freshness=immutable", *extra]
        super().__init__("node", arguments, self.admin, "/readyz")
        self.address = data

    def metric(self, name):
        with urllib.request.urlopen(f"http://{self.admin}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines
                   if line.split("{")[0].split(" ")[0] == name)


def load(server, cell, *arguments, tier=None):
    """One run of the load; its JSON. Any error in it is fatal: a measurement with errors measures nothing."""
    size, count = CELLS[cell]
    command = ["taskset", "-c", "1", os.environ["FOREBAY_LOAD"], server.address, f"/data/{cell}/",
               "--count", str(count), "--bytes", str(size), *arguments]
    if tier:
        command += ["--tier", tier]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    if result["errors"]:
        raise SystemExit(f"{server.name}: {result['errors']} errors, the first: {result['first_error']}")
    return result


def machine():
    """The conditions, without which a figure is an anecdote."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown CPU")
    return f"{model}, {os.cpu_count()} cores, kernel {os.uname().release}, loopback"
