#!/usr/bin/env python3
"""A node with a key of its own lets in who signs with it, and tells everybody else what is wrong.

The client signs for the node, the node signs for the origin with other keys; neither secret passes the other's
door. boto3 signs ranges, conditions and odd keys, so the canonical form is met as real clients make it.
"""

import datetime
import random
import sys

import botocore.auth
import house
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

KEY, SECRET = "node-key", "node-secret-of-some-length"
BUCKET = "signed-bucket"
ODD_KEYS = ["plain", "dir/a b+c&%~é.bin", "deep/" * 20 + "x",
            "colon:and=equals;and,comma", "%2F-is-not-a-slash", "quote'and\"double", "ünïcödé/漢字"]


def keys(access, secret):
    return {"aws_access_key_id": access, "aws_secret_access_key": secret,
            "config": Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})}


def refusal(call):
    """(status, code, message) of the refusal that `call` must meet, or None if it was let in."""
    try:
        call()
        return None
    except ClientError as error:
        told = error.response["Error"]
        return error.response["ResponseMetadata"]["HTTPStatusCode"], told["Code"], told.get("Message", "")


def refused(tally, name, call, *codes):
    told = refusal(call)
    tally.check(name, told is not None and told[0] == 403 and told[1] in codes, str(told))
    return told


def main():
    tally = house.Tally()
    body = random.Random(1).randbytes(3_000_000)
    with house.S3Origin(BUCKET) as origin:
        for key in ODD_KEYS:
            origin.client().put_object(Bucket=BUCKET, Key=key, Body=body + key.encode())
        for engine in ["uring", "portable"]:
            one_engine(tally, engine, origin, body)
    return tally.close()


def one_engine(tally, engine, origin, body):
    environment = {"FOREBAY_ACCESS_KEY": KEY, "FOREBAY_SECRET_KEY": SECRET}
    with house.Node(engine, origin, [BUCKET], "128MiB", environment=environment, anonymous=False) as node:
        client = node.client(**keys(KEY, SECRET))
        for key in ODD_KEYS:
            told = None
            try:
                answer = client.get_object(Bucket=BUCKET, Key=key)
                good = answer["Body"].read() == body + key.encode()
                ranged = client.get_object(Bucket=BUCKET, Key=key, Range="bytes=1000-1999", IfMatch=answer["ETag"])
                good = good and ranged["Body"].read() == body[1000:2000]
                good = good and client.head_object(Bucket=BUCKET, Key=key)["ContentLength"] == len(body + key.encode())
            except (BotoCoreError, ClientError) as error:
                good, told = False, error
            tally.check(f"{engine} signed reads of {key!r}", good, str(told))

        fresh = f"written-{engine}"
        client.put_object(Bucket=BUCKET, Key=fresh, Body=body)
        tally.check(f"{engine} a signed write is read back through the node",
                    client.get_object(Bucket=BUCKET, Key=fresh)["Body"].read() == body)
        tally.check(f"{engine} and lies at the origin",
                    origin.client().get_object(Bucket=BUCKET, Key=fresh)["Body"].read() == body)

        asked = origin.counts()
        wrong = node.client(**keys(KEY, SECRET + "x"))
        refused(tally, f"{engine} a wrong secret is refused",
                lambda: wrong.get_object(Bucket=BUCKET, Key=fresh), "SignatureDoesNotMatch")
        stranger = node.client(**keys("stranger", SECRET))
        refused(tally, f"{engine} an unknown key is refused",
                lambda: stranger.get_object(Bucket=BUCKET, Key=fresh), "InvalidAccessKeyId")
        origins_own = node.client(**keys(house.ORIGIN_KEY, house.ORIGIN_SECRET))
        refused(tally, f"{engine} the origin's keys do not open the node",
                lambda: origins_own.get_object(Bucket=BUCKET, Key=fresh), "InvalidAccessKeyId")
        refused(tally, f"{engine} a write with a wrong secret is refused",
                lambda: wrong.put_object(Bucket=BUCKET, Key=fresh, Body=b"x"), "SignatureDoesNotMatch")
        told = refused(tally, f"{engine} no signature is refused",
                       lambda: node.client().get_object(Bucket=BUCKET, Key=fresh), "AccessDenied")
        tally.check(f"{engine} and the refusal says what to do", told is not None and len(told[2]) > 20, str(told))
        refused(tally, f"{engine} an old signature is refused",
                lambda: an_hour_ago(lambda: client.get_object(Bucket=BUCKET, Key=fresh)), "RequestTimeTooSkewed")
        tally.check(f"{engine} what is refused never reaches the origin", origin.counts() == asked,
                    f"{asked} {origin.counts()}")
        tally.check(f"{engine} no secret is in the log",
                    SECRET not in node.log() and house.ORIGIN_SECRET not in node.log())

    with house.Node(engine, origin, [BUCKET], "128MiB", anonymous=False) as node:
        told = refused(tally, f"{engine} without any key everybody is refused",
                       lambda: node.client().get_object(Bucket=BUCKET, Key=ODD_KEYS[0]), "AccessDenied")
        words = told[2] if told else ""
        tally.check(f"{engine} and the refusal names the remedy", "FOREBAY_ACCESS_KEY" in words or
                    "--anonymous" in words, words)


def an_hour_ago(call):
    """Runs `call` with botocore's clock an hour slow."""
    real = botocore.auth.get_current_datetime
    botocore.auth.get_current_datetime = lambda *a, **k: real(*a, **k) - datetime.timedelta(hours=1)
    try:
        return call()
    finally:
        botocore.auth.get_current_datetime = real


if __name__ == "__main__":
    sys.exit(main())
