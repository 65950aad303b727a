#!/usr/bin/env python3
"""The door of HTTPS around the bytes: certificates that are read again while clients are connected, sessions that are
resumed on whatever worker, files that will not do, and clients that speak something else.
"""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request

import house

BUCKET = "https-bucket"
BODY = bytes(range(256)) * 4096


def make_pair(name, extra=()):
    """(certificate, key) files for 127.0.0.1, by openssl."""
    folder = house.room()
    cert, key = os.path.join(folder, f"{name}.pem"), os.path.join(folder, f"{name}.key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert, *extra],
        check=True, capture_output=True,
    )
    return cert, key


def fingerprint(cert):
    with open(cert) as file:
        der = ssl.PEM_cert_to_DER_cert(file.read())
    return house.sha256_of(der)


class Connection:
    """One TLS connection that asks for the object, as often as it is told to."""

    def __init__(self, node, context, session=None):
        raw = socket.create_connection(("127.0.0.1", node.tls_port), timeout=house.PATIENCE)
        # An end without close_notify is an error here, not an end.
        self.socket = context.wrap_socket(raw, server_hostname="127.0.0.1", session=session, suppress_ragged_eofs=False)
        self.file = self.socket.makefile("rb")

    def read(self):
        self.socket.sendall(f"GET /{BUCKET}/object HTTP/1.1\r\nHost: node\r\n\r\n".encode())
        status, length = self.file.readline(), 0
        for line in iter(self.file.readline, b"\r\n"):
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return self.file.read(length) if b" 200 " in status else None

    def shown(self):
        return house.sha256_of(self.socket.getpeercert(binary_form=True))

    def close(self):
        self.file.close()
        self.socket.close()


def trusting(*certs, version=None):
    context = ssl.create_default_context()
    for cert in certs:
        context.load_verify_locations(cert)
    if version:
        context.minimum_version = context.maximum_version = version
    return context


def reloads(tally, label, node, used, next_pair):
    old, context = fingerprint(used[0]), trusting(used[0], next_pair[0])
    before = Connection(node, context)
    tally.check(f"{label} the certificate of the file is shown", before.shown() == old and before.read() == BODY)

    def hang_up(outcome):
        metric = f'forebay_serve_certificate_reloads_total{{outcome="{outcome}"}}'
        count = node.series(metric)
        node.child.send_signal(signal.SIGHUP)
        node.until(f"it had {outcome} the pair", lambda: True if node.series(metric) > count else None)

    with open(next_pair[0], "rb") as new, open(used[0], "r+b") as file:
        kept = file.read()
        file.seek(0)
        file.truncate()
        file.write(new.read())
    hang_up("refused")
    tally.check(f"{label} a refusal names the file and the remedy", "is not the key of the certificate" in node.log())
    with open(used[0], "wb") as file:
        file.write(kept)
    probe = Connection(node, context)
    tally.check(f"{label} a pair that does not match changes nothing", probe.shown() == old and probe.read() == BODY)
    probe.close()

    for mine, new in zip(used, next_pair):
        with open(new, "rb") as source, open(mine, "wb") as target:
            target.write(source.read())
    hang_up("loaded")
    after = Connection(node, context)
    tally.check(f"{label} a new client sees the new certificate", after.shown() == fingerprint(next_pair[0]))
    tally.check(f"{label} it is served", after.read() == BODY)
    tally.check(f"{label} the client that was there is served on", before.read() == BODY)
    after.close()
    before.close()


def resumes(tally, label, node, cert, version):
    """Connections are held, so that they lie on every worker; each resumes the session of the first."""
    context = trusting(cert, version=version)
    first = Connection(node, context)
    first.read()
    session = first.socket.session
    held = [Connection(node, context, session) for _ in range(8)]
    tally.check(f"{label} bodies are right", all(connection.read() == BODY for connection in held))
    reused = [connection.socket.session_reused for connection in held]
    tally.check(f"{label} every session is resumed", all(reused), str(reused))
    with urllib.request.urlopen(f"http://{node.admin}/v1/status", timeout=house.PATIENCE) as answer:
        loads = [worker["connections"] for worker in json.load(answer)["workers"]]
    tally.check(f"{label} on every worker", all(load > 0 for load in loads), str(loads))
    for connection in [first, *held]:
        connection.close()


def strangers(tally, label, node):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{node.tls_port}/{BUCKET}/object", timeout=house.PATIENCE)
        tally.check(f"{label} plain HTTP is refused", False, "it was answered")
    except urllib.error.HTTPError as answer:
        words = answer.read().decode()
        tally.check(f"{label} plain HTTP is told to use https", answer.code == 400 and "https://" in words, words)
    old = trusting(node.trusted)
    old.set_alpn_protocols(["h2"])
    try:
        Connection(node, old)
        tally.check(f"{label} HTTP/2 alone is refused", False, "it was taken")
    except ssl.SSLError as error:
        tally.check(f"{label} HTTP/2 alone is refused", "no application protocol" in str(error), str(error))
    both = trusting(node.trusted)
    both.set_alpn_protocols(["h2", "http/1.1"])
    chosen = Connection(node, both)
    tally.check(f"{label} HTTP/1.1 is chosen", chosen.socket.selected_alpn_protocol() == "http/1.1")
    chosen.socket.sendall(f"GET /{BUCKET}/object HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n".encode())
    tally.check(f"{label} the end of an answer is said", chosen.file.read().endswith(BODY))
    chosen.close()


def drains(tally, label, node, cert):
    idle = Connection(node, trusting(cert))
    idle.read()
    node.child.send_signal(signal.SIGTERM)
    tally.check(f"{label} a drain says goodbye to an idle client", idle.file.read() == b"")
    idle.close()
    tally.check(f"{label} and ends", node.child.wait(house.PATIENCE) == 0)


def refusals(tally, pair, other):
    """What cannot be is refused before anything is started, with the name and the remedy."""
    empty = os.path.join(house.room(), "empty.pem")
    open(empty, "w").close()
    secret = make_pair("secret")
    locked = os.path.join(house.room(), "locked.key")
    subprocess.run(["openssl", "pkcs8", "-topk8", "-in", secret[1], "-out", locked, "-passout", "pass:word"],
                   check=True, capture_output=True)
    door = ["--listen-tls", "127.0.0.1:7443"]
    for arguments, words in [
        ([*door, "--cert", pair[0]], "given without --key"),
        ([*door, "--key", pair[1]], "given without --cert"),
        (["--cert", pair[0], "--key", pair[1]], "--listen-tls ADDR"),
        ([*door, "--cert", "/nowhere.pem", "--key", pair[1]], "/nowhere.pem"),
        ([*door, "--cert", empty, "--key", pair[1]], "no certificate in"),
        ([*door, "--cert", pair[0], "--key", pair[0]], "no private key in"),
        ([*door, "--cert", pair[0], "--key", other[1]], "is not the key of the certificate"),
        ([*door, "--cert", secret[0], "--key", locked], "openssl pkey"),
    ]:
        for command in ["check-config", "serve"]:
            done = subprocess.run(
                [os.environ["FOREBAY_NODE"], command, "--accelerator", "abc=http://127.0.0.1:1/", *arguments],
                capture_output=True, text=True, timeout=house.PATIENCE,
            )
            tally.check(f"{command} refuses {' '.join(arguments)}", done.returncode != 0 and words in done.stderr,
                        f"{done.returncode}: {done.stderr}")


def main():
    tally = house.Tally()
    pairs = [make_pair(name) for name in ["first", "second"]]
    refusals(tally, *pairs)
    with house.S3Origin(BUCKET) as origin:
        origin.client().put_object(Bucket=BUCKET, Key="object", Body=BODY)
        for engine in ["uring", "portable"]:
            used = make_pair(f"node-{engine}")
            with house.Node(engine, origin, [BUCKET], "128MiB", tls=used) as node:
                strangers(tally, engine, node)
                for version in [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]:
                    resumes(tally, f"{engine} {version.name}", node, used[0], version)
                reloads(tally, engine, node, used, pairs[0])
                drains(tally, engine, node, used[0])
    return tally.close()


if __name__ == "__main__":
    sys.exit(main())
