#!/usr/bin/env python3
"""The images: built by buildah on a base made by debootstrap, run by podman, with our seccomp profile and without.

Needs root and no container engine that runs already: images, containers and the engine's own files live in a folder
of this test, which is gone at the end, however it ends. The programs come from FOREBAY_BINARIES, a folder; the base is
kept in FOREBAY_IMAGE_CACHE. Ends with `N passed, N failed`.
"""

import atexit
import glob
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PATIENCE = 60  # seconds: a bound, never a measure
RING_CALLS = ["io_uring_setup", "io_uring_enter", "io_uring_register"]
DATASET, KEY, SIZE = "bucket/piece-,count=4,size=3MiB", "piece-00000002", 3 << 20
# What a careful operator takes away; the node needs none of it.
BARE = ["--env", "AWS_EC2_METADATA_DISABLED=true", "--cap-drop", "all", "--security-opt", "no-new-privileges",
        "--read-only"]

# What an engine makes outside of the folder that it is given.
OUTSIDE = ["/var/lib/containers", "/run/containers", "/run/libpod", "/dev/shm/libpod_lock", "/etc/cni", "/var/lib/cni",
           "/sys/fs/cgroup/libpod_parent", "/sys/fs/cgroup/*/libpod_parent"]

can_lock = subprocess.run(["prlimit", "--memlock=unlimited", "true"], capture_output=True).returncode == 0



def quick_place():
    """Memory, where there is plenty of it and a system may be unpacked in it: vfs copies whole systems, and some disks
    take minutes to forget them again. None: where temporary files go."""
    shared = os.statvfs("/dev/shm") if os.path.ismount("/dev/shm") else None
    if shared is None or shared.f_flag & (os.ST_NOEXEC | os.ST_NODEV | os.ST_NOSUID):
        return None
    with open("/proc/meminfo") as file:
        free = int(dict(line.split(":") for line in file)["MemAvailable"].split()[0]) << 10
    return "/dev/shm" if min(free // 2, shared.f_bavail * shared.f_frsize) >= 4 << 30 else None


room = tempfile.mkdtemp(prefix="forebay-image.", dir=quick_place())
PROFILE = os.path.join(room, "seccomp.json")
STORE = ["--root", f"{room}/store", "--runroot", f"{room}/run", "--storage-driver", "vfs"]
PODMAN = ["podman", *STORE, "--tmpdir", f"{room}/tmp", "--cgroup-manager", "cgroupfs", "--events-backend", "file",
          "--runtime", "runc"]
BUILDAH = ["buildah", *STORE]
os.environ["TMPDIR"] = room
# Podman would raise two limits by itself, which not every root may; these are low enough for any.
os.environ["CONTAINERS_CONF"] = f"{room}/containers.conf"
with open(os.environ["CONTAINERS_CONF"], "w") as conf:
    files = min(16384, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    conf.write(f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc=4096:4096"]\n')
    conf.write('[engine]\nlock_type = "file"\n')
passed = failed = 0


def outside():
    return {path for pattern in OUTSIDE for path in glob.glob(pattern)}


before = outside()


def below_room():
    """What is mounted there now, the innermost first."""
    with open("/proc/self/mounts") as mounts:
        places = [line.split()[1] for line in mounts]
    return [place for place in reversed(places) if place.startswith(f"{room}/")]


def put_away(path):
    if not path.startswith("/sys/"):
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
        return
    # A control group is busy until the last of its processes is gone.
    deadline = time.monotonic() + PATIENCE
    for group, _, _ in os.walk(path, topdown=False):
        while os.path.exists(group) and time.monotonic() < deadline:
            try:
                os.rmdir(group)
            except OSError:
                time.sleep(0.1)


@atexit.register
def sweep():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.path.exists(f"{room}/store"):
        subprocess.run([*PODMAN, "rm", "--all", "--force", "--time", "0"], capture_output=True)
    for place in below_room():
        subprocess.run(["umount", "--lazy", place], capture_output=True)
    if not below_room():
        shutil.rmtree(room, ignore_errors=True)
    for path in outside() - before:
        put_away(path)
    left = [place for place in (room, *(outside() - before)) if os.path.exists(place)]
    if left:
        print(f"FAILED to put away {', '.join(left)}", flush=True)
        os._exit(1)


signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sweep is done then as well


def check(name, good, detail=""):
    global passed, failed
    if good:
        passed += 1
        print(f"ok     {name}")
    else:
        failed += 1
        print(f"FAILED {name}: {detail}")


def skip(reason):
    print(f"SKIPPED {reason}")
    if os.environ.get("FOREBAY_SKIPS"):
        with open(os.environ["FOREBAY_SKIPS"], "a") as file:
            file.write(f"{reason}\n")


def run(arguments, timeout=None):
    """Its status and all that it said. Whatever ends us, or our patience, ends it with all that it started."""
    child = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True, start_new_session=True)
    try:
        said, _ = child.communicate(timeout=timeout)
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    return subprocess.CompletedProcess(arguments, child.returncode, said)


def must(arguments):
    done = run(arguments)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def suite():
    """This machine's Debian, so that the C library is the one that the programs were built against."""
    with open("/etc/os-release") as file:
        words = dict(line.rstrip().split("=", 1) for line in file if "=" in line)
    return words.get("VERSION_CODENAME", "bookworm").strip('"')


def mirror(codename):
    """Where this machine's apt gets Debian from; debootstrap goes there too."""
    listed = must(["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", f"Codename: {codename}"])
    return listed.split()[:1]


def base_archive():
    """A Debian with certificates and nothing more, packed; made once where there is a place to keep it."""
    codename = suite()
    cache = os.environ.get("FOREBAY_IMAGE_CACHE", room)
    try:
        os.makedirs(cache, exist_ok=True)
    except OSError as error:
        print(f"       the base is not kept: {error}")
        cache = room
    if not os.access(cache, os.W_OK):
        cache = room
    path = os.path.join(cache, f"image-base-{codename}.tar")
    if os.path.exists(path):
        print(f"       the base is {path}")
        return path
    tree, fresh, began = os.path.join(room, "base"), f"{path}.{os.getpid()}", time.monotonic()
    command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", codename, tree, *mirror(codename)]
    for last in False, False, True:  # a mirror that stumbles once may answer the next time
        done = run(command)
        if done.returncode == 0:
            break
        shutil.rmtree(tree, ignore_errors=True)
        if last:
            raise SystemExit(f"debootstrap failed three times\n{done.stdout[-4000:]}")
    # Each image and each container is a copy of this; what nobody reads here is left out.
    for waste in "var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale":
        shutil.rmtree(os.path.join(tree, waste), ignore_errors=True)
    try:
        must(["tar", "--numeric-owner", "-C", tree, "-cf", fresh, "."])
        os.rename(fresh, path)
    finally:
        if os.path.exists(fresh):
            os.unlink(fresh)
    shutil.rmtree(tree)
    print(f"       the base was made in {time.monotonic() - began:.0f} s")
    return path


def build(target):
    began = time.monotonic()
    must([*BUILDAH, "bud", "--isolation", "chroot", "--format", "docker", "--target", target,
          "--build-arg", "BASE_IMAGE=localhost/base", "--build-context", f"bins={os.environ['FOREBAY_BINARIES']}",
          "--tag", f"localhost/forebay-{target}", ROOT])
    print(f"       {target} built in {time.monotonic() - began:.0f} s")
    return json.loads(must([*PODMAN, "image", "inspect", f"localhost/forebay-{target}"]))[0]["Config"]


def run_once(image, *arguments, options=()):
    return run([*PODMAN, "run", "--rm", "--network", "none", *BARE, *options, image, *arguments], timeout=PATIENCE)


def can_run():
    """Whether containers run here at all; a machine in a container often forbids it, and that is said."""
    done = run_once("localhost/base", "/bin/true")
    if done.returncode != 0:
        words = done.stdout.strip().splitlines()[-1:]
        skip(f"podman cannot run containers here: {words}; the images were built, and not run")
    return done.returncode == 0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(url):
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return answer.status, answer.headers, answer.read()


class Container:
    """Started in the background on this machine's network; stopped as an operator stops one."""

    def __init__(self, name, image, options, *arguments):
        self.name = f"forebay-test-{name}"
        must([*PODMAN, "run", "--detach", "--name", self.name, "--network", "host",
              "--log-driver", "k8s-file", *BARE, *options, image, *arguments])

    def log(self):
        return run([*PODMAN, "logs", self.name]).stdout

    def until_answers(self, url):
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return get(url)
            except (urllib.error.URLError, ConnectionError) as error:
                state = must([*PODMAN, "inspect", "--format", "{{.State.Status}}", self.name]).strip()
                if state == "exited" or time.monotonic() > deadline:
                    raise SystemExit(f"{self.name} ({state}) does not answer {url}: {error}\n{self.log()}") from error
                time.sleep(0.1)

    def exec(self, *arguments):
        return run([*PODMAN, "exec", self.name, *arguments], timeout=PATIENCE)

    def stop(self):
        """The exit status after the image's own stop signal."""
        must([*PODMAN, "stop", "--time", str(PATIENCE), self.name])
        return int(must([*PODMAN, "inspect", "--format", "{{.State.ExitCode}}", self.name]))


def serve(label, options, engine, wanted_engine, origin):
    """A node in a container: ready, on the engine that we think, with right bytes. Its caller stops it."""
    data, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    name = label.replace(" ", "-")
    node = Container(name, "localhost/forebay-node", [*options, "--volume", f"{name}:/var/lib/forebay"],
                     "serve", "--listen", data, "--admin", admin, "--memory", "64MiB", "--engine", engine,
                     "--drive", "path=/var/lib/forebay/drive,size=128MiB", "--anonymous",
                     "--accelerator", f"bucket=s3://bucket,endpoint={origin},region=us-east-1,freshness=immutable")
    status, _, body = node.until_answers(f"http://{admin}/readyz")
    check(f"{label}: /readyz", (status, body) == (200, b"ready\n"), body)
    state = json.loads(get(f"http://{admin}/v1/status")[2])
    check(f"{label}: the engine is {wanted_engine}", state["engine"] == wanted_engine, state["engine"] + node.log())
    check(f"{label}: the drive in the volume is in use", state["drives"][0]["state"] == "in use", state["drives"])
    if wanted_engine == "uring" and can_lock:
        check(f"{label}: buffers are registered", state["memory"]["registered"], node.log())
    direct = get(f"{origin}/bucket/{KEY}")[2]
    first, second = (get(f"http://{data}/bucket/{KEY}") for _ in range(2))
    check(f"{label}: bytes are the origin's", direct == first[2] == second[2] and len(direct) == SIZE, len(first[2]))
    check(f"{label}: the second answer is a hit", second[1]["x-forebay-cache"] in ("ram", "drive"),
          second[1]["x-forebay-cache"])
    return node


def images():
    """Builds all three, and looks at what they say of themselves."""
    for target, ports in ("node", {"7070/tcp", "7070/udp", "7071/tcp"}), ("control", {"7080/tcp"}), ("bench", set()):
        config = build(target)
        check(f"{target}: no root", config["User"] == "7070:7070", config["User"])
        check(f"{target}: ports", set(config.get("ExposedPorts") or {}) == ports, config.get("ExposedPorts"))
        check(f"{target}: its folder is a volume", list(config["Volumes"]) == ["/var/lib/forebay"], config["Volumes"])
        check(f"{target}: stops by SIGTERM", config.get("StopSignal") == "SIGTERM", config.get("StopSignal"))


def the_profile():
    """Ours is this machine's default one and three calls, whatever that one said of them."""
    script = os.path.join(ROOT, "deploy", "seccomp")
    print("       " + must([script, PROFILE]).strip())
    with open(PROFILE) as file:
        text = file.read()
    profile = json.loads(text)
    granting = [rule for rule in profile["syscalls"] if set(RING_CALLS) & set(rule["names"])]
    check("the profile grants the three calls, once, to all",
          len(granting) == 1 and granting[0]["names"] == RING_CALLS and granting[0]["action"] == "SCMP_ACT_ALLOW"
          and not granting[0]["args"] and not granting[0]["includes"] and not granting[0]["excludes"], granting)

    other = os.path.join(room, "other.json")
    rules = [{"names": ["read", "io_uring_enter"], "action": "SCMP_ACT_ERRNO", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
             {"names": ["io_uring_setup"], "action": "SCMP_ACT_ERRNO"}]
    with open(other, "w") as file:
        json.dump({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": rules}, file)
    must([script, other, "--from", other])
    with open(other) as file:
        made = json.load(file)
    check("rules that forbid them lose them, and keep the rest",
          made == {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{**rules[0], "names": ["read"]}, granting[0]]}, made)

    must([script, PROFILE, "--from", PROFILE])
    with open(PROFILE) as file:
        check("made from itself it stays as it is", file.read() == text)
    for name, arguments, words in [
        ("a default that is not there", ["--from", f"{room}/none.json"], "cannot read"),
        ("a default that is none", ["--from", os.path.join(ROOT, "Cargo.toml")], "is no profile"),
    ]:
        done = run([script, f"{room}/not-made.json", *arguments])
        check(f"{name} is refused in words", done.returncode == 1 and words in done.stdout
              and not os.path.exists(f"{room}/not-made.json"), done.stdout)


def run_them():
    done = run_once("localhost/forebay-control", "--version")
    check("control: its program runs", done.returncode == 0 and done.stdout.startswith("forebay-control "), done.stdout)
    address = f"127.0.0.1:{free_port()}"
    origin = f"http://{address}"
    bench = Container("origin", "localhost/forebay-bench", [], "origin", "--listen", address, "--profile", "raw",
                      "--dataset", DATASET)
    bench.until_answers(f"{origin}/_emu/stats")
    for program in "bench", "node", "control":
        done = bench.exec(f"/usr/bin/forebay-{program}", "--version")
        check(f"bench: forebay-{program} runs", done.stdout.startswith(f"forebay-{program} "), done.stdout)

    ours = ["--security-opt", f"seccomp={PROFILE}"]
    if can_lock:
        ours += ["--ulimit", "memlock=-1:-1"]
    else:
        print("       memlock cannot be raised here: whether buffers are registered is not looked at")
    node = serve("with the profile", ours, "uring", "uring", origin)
    done = node.exec("/usr/bin/forebay-node", "doctor")
    check("with the profile: doctor says that a ring is granted", "granted  io_uring" in done.stdout, done.stdout)
    check("with the profile: SIGTERM ends it cleanly", node.stop() == 0, node.log())

    done = bench.exec("/usr/bin/forebay-node", "doctor")  # it runs with the default profile
    if "granted  io_uring" in done.stdout:
        skip("this machine's default profile grants io_uring itself, so a node without ours was not tried")
        return
    check("doctor without the profile: refused, and it is named",
          "refused  io_uring" in done.stdout and "seccomp" in done.stdout, done.stdout)
    node = serve("without the profile", [], "auto", "portable", origin)
    check("without the profile: the log names it", "seccomp" in node.log(), node.log())
    done = node.exec("/usr/bin/forebay-node", "serve", "--engine", "uring", "--listen", "127.0.0.1:7070", "--memory",
                     "64MiB", "--anonymous", "--accelerator", "bucket=http://127.0.0.1:1/")
    check("without the profile: --engine uring refuses, and names it",
          done.returncode != 0 and "seccomp" in done.stdout, done.stdout)
    check("without the profile: SIGTERM ends it cleanly", node.stop() == 0, node.log())


def main():
    the_profile()
    must([*PODMAN, "import", base_archive(), "localhost/base"])
    images()
    if can_run():
        run_them()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
