"""The bed that measurements lie in: nginx as origin and as peer, the node, the load; all pinned.

Servers run on core 0, the load on core 1. CPU time is what the scheduler charged to all threads of a server
(schedstat, nanoseconds) while the load ran, over the bytes the load received; GB is 1e9 bytes. Beside it stands the
time that core 0 was not idle, whoever had it (ticks of 10 ms). Ratios are taken of pairs measured back to back, in
ABBA order, and every run is printed.
"""

import atexit
import contextlib
import glob
import json
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request

# Two-sided 95 % quantiles of Student's t for n - 1 degrees of freedom.
STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262,
              12: 2.201, 16: 2.131, 20: 2.093}

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

    def pids(self):
        found = [self.child.pid]
        for pid in found:
            for path in glob.glob(f"/proc/{pid}/task/*/children"):
                with open(path) as file:
                    found += [int(word) for word in file.read().split()]
        return found

    def cpu_seconds(self):
        total = 0
        for pid in self.pids():
            for path in glob.glob(f"/proc/{pid}/task/*/schedstat"):
                with contextlib.suppress(OSError), open(path) as file:
                    total += int(file.read().split()[0])
        return total / 1e9

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


def nginx(folder, kind):
    """nginx at its best: `static` is sendfile from files, `cache` is proxy_cache in front of that."""
    port, upstream = free_port(), free_port()
    # As many open files as it may have; connections need some of them.
    descriptors = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1] % (1 << 31), 100_000)
    base = room()
    os.makedirs(f"{base}/cache")
    static = """
        location / { root FOLDER; }
    """.replace("FOLDER", folder)
    cached = f"""
        location / {{
            proxy_pass http://127.0.0.1:{upstream};
            proxy_cache z;
            proxy_cache_valid 200 206 1d;
            proxy_cache_lock on;
            proxy_buffers 16 256k;
            proxy_buffer_size 256k;
            proxy_busy_buffers_size 512k;
        }}
    """
    second = f"server {{ listen 127.0.0.1:{upstream} reuseport; {static} }}" if kind == "cache" else ""
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
            proxy_cache_path {base}/cache levels=1:2 keys_zone=z:256m max_size=20g inactive=1d use_temp_path=off;
            server {{ listen 127.0.0.1:{port} reuseport; {cached if kind == 'cache' else static} }}
            {second}
        }}
    """
    path = f"{base}/nginx.conf"
    with open(path, "w") as file:
        file.write(config)
    first = sorted(os.listdir(os.path.join(folder, "data")))[0]
    return Server(f"nginx-{kind}", ["nginx", "-p", base, "-c", path], f"127.0.0.1:{port}", f"/data/{first}/0")


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


def core_seconds(core):
    """What the core has not been idle, since it runs."""
    with open("/proc/stat") as file:
        fields = next(line.split() for line in file if line.startswith(f"cpu{core} "))
    user, nice, system, _idle, _iowait, irq, softirq = (int(field) for field in fields[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure(server, cell, seconds, tier=None):
    """One measured run after a second of warm-up, with `cpu_s_per_gb` (the process) and `core_s_per_gb` added."""
    load(server, cell, "--seconds", "1", tier=tier)
    before, core_before = server.cpu_seconds(), core_seconds(0)
    result = load(server, cell, "--seconds", str(seconds), tier=tier)
    gigabytes = result["bytes"] / 1e9
    result["cpu_s_per_gb"] = (server.cpu_seconds() - before) / gigabytes
    result["core_s_per_gb"] = (core_seconds(0) - core_before) / gigabytes
    return result


def paired_ratio(pairs):
    """Geometric mean of ours/theirs with its 95 % interval, from (ours, theirs) measured back to back."""
    logs = [math.log(ours / theirs) for ours, theirs in pairs]
    mean = sum(logs) / len(logs)
    spread = math.sqrt(sum((value - mean) ** 2 for value in logs) / (len(logs) - 1))
    half = STUDENT_95[len(logs)] * spread / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def machine():
    """The conditions, without which a figure is an anecdote."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown CPU")
    return f"{model}, {os.cpu_count()} cores, kernel {os.uname().release}, loopback"
