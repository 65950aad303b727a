#!/usr/bin/env python3
"""What the node prints at its start works as it is printed: the addresses, the boto3 program, and the lines with which
a client comes to trust a self-signed certificate."""

import os
import random
import ssl
import subprocess
import sys

import house

KEY, SECRET = "node-key", "node-secret-of-some-length"
BUCKET = "banner-bucket"
LAST_LINE = 'print(len(body), "bytes")'


def main():
    tally = house.Tally()
    with house.S3Origin(BUCKET) as origin:
        origin.client().put_object(Bucket=BUCKET, Key="some/key", Body=random.Random(1).randbytes(123_456))
        keys = {"FOREBAY_ACCESS_KEY": KEY, "FOREBAY_SECRET_KEY": SECRET}
        for label, environment, anonymous in [("anonymous", {}, True), ("with keys", keys, False)]:
            with house.Node("auto", origin, [BUCKET], "128MiB", environment=environment, anonymous=anonymous) as node:
                node.until("its banner", lambda: True if LAST_LINE in node.log() else None)
                log = node.log()
                tally.check(f"{label}: both addresses are printed", node.data in log and node.admin in log, log)
                program = program_of(log)
                tally.check(f"{label}: a program is printed", program is not None, log)
                tally.check(f"{label}: no secret is printed", SECRET not in log and house.ORIGIN_SECRET not in log)
                if program:
                    path = os.path.join(house.room(), "this.py")
                    with open(path, "w") as file:
                        file.write(program)
                    clean = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
                    done = subprocess.run([sys.executable, path, "some/key"], capture_output=True, text=True,
                                          env={**clean, **environment}, timeout=house.PATIENCE)
                    tally.check(f"{label}: the program reads an object", done.stdout == "123456 bytes\n",
                                done.stdout + done.stderr)
        with house.Node("auto", origin, [BUCKET], "128MiB", tls="self-signed") as node:
            node.until("its banner", lambda: True if LAST_LINE in node.log() else None)
            trusts(tally, node)
    return tally.close()


def trusts(tally, node):
    log, folder = node.log(), house.room()
    fetch = next((line.strip() for line in log.splitlines() if line.strip().startswith("python3 -c ")), "false")
    done = subprocess.run(["bash", "-c", fetch], cwd=folder, capture_output=True, text=True, timeout=house.PATIENCE)
    tally.check("https: the line that fetches the certificate works", done.returncode == 0, f"{log}\n{done.stderr}")
    trusted = os.path.join(folder, "forebay.pem")
    with open(trusted) as file:
        shown = house.sha256_of(ssl.PEM_cert_to_DER_cert(file.read()))
    tally.check("https: its SHA-256 is the one that is printed", f"SHA-256 {shown}" in log, shown)
    words = f'endpoint_url="{node.tls_url}", verify="forebay.pem"'
    tally.check("https: the endpoint is printed", words in log, words)
    tally.check("https: the warning is in the log", "self-signed certificate" in log and f"sha256={shown!r}" in
                log.replace('"', "'"), log)
    client = node.tls_client()
    tally.check("https: boto3 reads with it", client.head_object(Bucket=BUCKET, Key="some/key")["ContentLength"] == 123_456)


def program_of(log):
    """From the line after `try it` to the program's last line."""
    lines = log.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith("try it")), None)
    if begin is None or LAST_LINE not in lines:
        return None
    return "\n".join(lines[begin + 1:lines.index(LAST_LINE) + 1]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
