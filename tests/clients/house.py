"""What the client tests stand on: start the programs, wait for them, count checks.

Programs come from FOREBAY_NODE and FOREBAY_S3_ORIGIN, as tests/run sets them. Every process is ended by its own
id, every wait is bounded, and a failing run shows the log of the node.
"""

import atexit
import hashlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request

import boto3
from botocore import UNSIGNED
from botocore.config import Config

PATIENCE = 60  # seconds: a bound, never a measure
ORIGIN_KEY, ORIGIN_SECRET = "origin-key", "origin-secret"
REGION = "us-east-1"

_rooms = []


def room():
    """A directory of its own, gone at the end."""
    path = tempfile.mkdtemp(prefix="forebay-clients.")
    _rooms.append(path)
    return path


@atexit.register
def _sweep():
    for path in _rooms:
        shutil.rmtree(path, ignore_errors=True)


class Tally:
    """Counts checks; each has a name that says what should be true."""

    def __init__(self):
        self.passed = self.failed = 0

    def check(self, name, good, detail=""):
        if good:
            self.passed += 1
        else:
            self.failed += 1
            print(f"FAILED {name}{': ' if detail else ''}{detail}")
        return good

    def close(self):
        """Prints the closing line; the value is the exit status."""
        print(f"{self.passed} passed, {self.failed} failed")
        return 1 if self.failed or not self.passed else 0


def sha256_of(der):
    """Of a certificate, in the form that the node and openssl print."""
    return ":".join(f"{byte:02X}" for byte in hashlib.sha256(der).digest())


def free_port(kind=socket.SOCK_STREAM):
    with socket.socket(type=kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cores(count):
    """The first `count` cores that this process may use, for --cores; fewer where there are fewer."""
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:count])


class Process:
    """A child with its output in a log; ended when the block that holds it ends."""

    def __init__(self, name, arguments, environment=None):
        self.name = name
        self.log_path = os.path.join(room(), f"{name}.log")
        self.log_file = open(self.log_path, "wb")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "FOREBAY_"))}
        clean.update(environment or {}, AWS_EC2_METADATA_DISABLED="true")
        self.child = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=self.log_file, stderr=subprocess.STDOUT, env=clean
        )

    def log(self):
        with open(self.log_path, errors="replace") as file:
            return file.read()

    def until(self, what, question):
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = question()
            if answer is not None:
                return answer
            if self.child.poll() is not None:
                raise SystemExit(f"{self.name} ended with {self.child.returncode} before {what}:\n{self.log()}")
            if time.monotonic() > deadline:
                raise SystemExit(f"waited {PATIENCE} s for {self.name}: {what}\n{self.log()}")
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGKILL)
        self.child.wait()
        self.log_file.close()
        if kind is not None:
            print(f"--- log of {self.name} ---\n{self.log()[-20000:]}\n---")


class S3Origin(Process):
    """The real S3 server that checks signatures, with one bucket."""

    def __init__(self, bucket):
        root = room()
        os.mkdir(os.path.join(root, bucket))
        self.bucket = bucket
        super().__init__("s3-origin", [
            os.environ["FOREBAY_S3_ORIGIN"], root, "--access-key", ORIGIN_KEY, "--secret-key", ORIGIN_SECRET,
        ])
        self.url = "http://" + self.until("its address", lambda: self._word("listening"))
        self.counts_url = "http://" + self.until("its counters", lambda: self._word("counts"))

    def _word(self, key):
        for line in self.log().splitlines():
            if line.startswith(key + " "):
                return line.split()[1]
        return None

    def client(self):
        return boto3.client(
            "s3", endpoint_url=self.url, region_name=REGION, aws_access_key_id=ORIGIN_KEY,
            aws_secret_access_key=ORIGIN_SECRET, config=Config(s3={"addressing_style": "path"}),
        )

    def counts(self):
        with urllib.request.urlopen(self.counts_url, timeout=PATIENCE) as answer:
            return json.load(answer)


class Node(Process):
    """forebay-node, ready to serve. Accelerators are names, all bound to the origin's bucket.

    With `tls` it has an HTTPS door as well: `tls` is the pair (certificate, key) of files, or "self-signed". With `quic`
    it has one for HTTP/3.
    """

    def __init__(self, engine, origin, names, memory, drive_size=None, environment=None, anonymous=True, options="",
                 tls=None, cores="auto", quic=False, arguments=()):
        self.data = f"127.0.0.1:{free_port()}"
        self.quic = f"127.0.0.1:{free_port(socket.SOCK_DGRAM)}" if quic else None
        self.admin = f"127.0.0.1:{free_port()}"
        arguments = [os.environ["FOREBAY_NODE"], "serve", "--engine", engine, "--listen", self.data,
                     "--admin", self.admin, "--memory", memory, "--cores", cores, *arguments]
        if tls:
            self.tls_port = free_port()
            arguments += ["--listen-tls", f"127.0.0.1:{self.tls_port}"]
        if tls and tls != "self-signed":
            arguments += ["--cert", tls[0], "--key", tls[1]]
        if quic:
            arguments += ["--listen-quic", self.quic]
        for name in names:
            arguments += ["--accelerator",
                          f"{name}=s3://{origin.bucket},endpoint={origin.url},region={REGION}{options}"]
        if drive_size:
            arguments += ["--drive", f"path={os.path.join(room(), 'drive')},size={drive_size}"]
        if anonymous:
            arguments.append("--anonymous")
        super().__init__("node", arguments, {
            "FOREBAY_ORIGIN_ACCESS_KEY": ORIGIN_KEY, "FOREBAY_ORIGIN_SECRET_KEY": ORIGIN_SECRET, **(environment or {}),
        })
        self.url = f"http://{self.data}"
        self.until("it was ready", self._ready)
        if tls:
            self.tls_url = f"https://127.0.0.1:{self.tls_port}"
            self.trusted = os.path.join(room(), "trusted.pem")
            self.trust()

    def trust(self):
        """Fetches the certificate that is shown now into the file `trusted`, as the banner tells people to."""
        with open(self.trusted, "w") as file:
            file.write(ssl.get_server_certificate(("127.0.0.1", self.tls_port), timeout=PATIENCE))

    def _ready(self):
        try:
            with urllib.request.urlopen(f"http://{self.admin}/readyz", timeout=PATIENCE) as answer:
                return True if answer.status == 200 else None
        except OSError:
            return None

    def client(self, **settings):
        """boto3, unsigned unless keys are given."""
        if not settings:
            settings = {"config": Config(signature_version=UNSIGNED, s3={"addressing_style": "path"})}
        return boto3.client("s3", **{"endpoint_url": self.url, "region_name": REGION, **settings})

    def tls_client(self):
        """boto3 through HTTPS, unsigned."""
        config = Config(signature_version=UNSIGNED, s3={"addressing_style": "path"})
        return self.client(endpoint_url=self.tls_url, verify=self.trusted, config=config)

    def metric(self, name):
        """The sum over all label sets of one metric."""
        return sum(value for series, value in self._metrics() if series.split("{")[0] == name)

    def series(self, series):
        """One metric with its labels, as it is written."""
        return next(value for name, value in self._metrics() if name == series)

    def _metrics(self):
        with urllib.request.urlopen(f"http://{self.admin}/metrics", timeout=PATIENCE) as answer:
            lines = answer.read().decode().splitlines()
        return [(line.rsplit(" ", 1)[0], float(line.rsplit(" ", 1)[1])) for line in lines if line[0] != "#"]


def curl(jobs, folder, trusted=None):
    """Runs curl once for many requests. A job is (url, range or None, file); gives (status, tier) for each.

    `trusted` is the file with the certificate of an https:// URL."""
    lines = []
    for number, (url, wanted, file) in enumerate(jobs):
        if number:
            lines.append("next")
        lines += ["silent", f'url = "{url}"', f'output = "{file}"', f"max-time = {PATIENCE}"]
        if wanted:
            lines.append(f'range = "{wanted}"')
        if trusted:
            lines.append(f'cacert = "{trusted}"')
        lines.append('write-out = "%{http_code} [%header{x-forebay-cache}] %{errormsg}\\n"')
    script = os.path.join(folder, "curl.conf")
    with open(script, "w") as file:
        file.write("\n".join(lines) + "\n")
    # curl reads ~/.curlrc unless told not to, and -q must come first.
    done = subprocess.run(["curl", "-q", "-K", script], capture_output=True, text=True)
    answers = done.stdout.splitlines()
    if len(answers) != len(jobs):
        sys.exit(f"curl answered {len(answers)} of {len(jobs)} requests: {done.stderr}")
    return [(int(line.split()[0]), line[line.index("[") + 1:line.index("]")]) for line in answers]
