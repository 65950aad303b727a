"""A Debian kernel under qemu, without hardware help: one guest, its memory file system, its network and its drive.

The guest is bare: a kernel of Debian's, busybox, the modules for a virtio network and an NVMe drive, and the programs under
test. It runs one job and ends. The host's end of its network is a tap device in a network namespace of the test's own,
where nothing else is; the tap takes whole segments and leaves sums to the receiver, as a NIC does, so what the guest
sends zero-copy is not copied in the guest.

Needs root, qemu-system-x86_64, busybox (static), kmod and cpio. Kernels are downloaded once, by apt from where this
machine's own sources point, and kept in FOREBAY_VM_CACHE.
"""

import atexit
import ctypes
import fcntl
import glob
import lzma
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PATIENCE = 240  # seconds: a bound, never a measure; this is emulation on a shared machine
HOST, GUEST = "10.73.0.1", "10.73.0.2"
# A module and what it needs; depmod says in which order.
MODULES = ["virtio_pci", "virtio_net", "nvme"]
# Without cmpxchg16b: as this emulator does it the kernel's allocator reads a wild pointer now and then (seen with qemu 7.2,
# two processors, 6.12: a panic in kmem_cache_alloc).
CPU = "max,cx16=off"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def run(*command, **options):
    """A command that must end well; its output, for people to read if it does not."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def room():
    path = tempfile.mkdtemp(prefix="forebay-vm.")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


# ---- kernels ------------------------------------------------------------------------------------------------


def kernel(series, cache):
    """A folder with `vmlinuz` and `modules/`: Debian's newest cloud kernel of this series, downloaded if it is not there."""
    folder = os.path.join(cache, f"kernel-{series}")
    if os.path.exists(os.path.join(folder, "vmlinuz")):
        return folder
    work = room()
    apt = private_apt(work)
    names = run("apt-cache", *apt, "pkgnames", f"linux-image-{series}.").split()
    wanted = re.compile(rf"linux-image-{re.escape(series)}\.[0-9.]+[-+][^-]*(-[0-9]+)?-?cloud-amd64-unsigned")
    names = [name for name in names if wanted.fullmatch(name)]
    if not names:
        raise SystemExit(f"no kernel of series {series} among the packages that apt knows here")
    newest = max(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    for attempt in range(3):
        if subprocess.run(["apt-get", *apt, "-qq", "download", newest], cwd=work).returncode == 0:
            break
        time.sleep(5 * (attempt + 1))
    packages = glob.glob(f"{work}/{newest}_*.deb")
    if not packages:
        raise SystemExit(f"{newest} could not be downloaded in three tries")
    run("dpkg-deb", "-x", packages[0], f"{work}/out")
    [image] = glob.glob(f"{work}/out/boot/vmlinuz-*")
    release = image.rpartition("vmlinuz-")[2]
    modules = f"{work}/out/lib/modules/{release}"
    for packed in glob.glob(f"{modules}/**/*.ko.xz", recursive=True):
        with lzma.open(packed) as source, open(packed.removesuffix(".xz"), "wb") as target:
            shutil.copyfileobj(source, target)
        os.unlink(packed)
    run("depmod", "-b", f"{work}/out", release)
    os.makedirs(cache, exist_ok=True)
    half = f"{folder}.{os.getpid()}"
    shutil.rmtree(half, ignore_errors=True)
    os.mkdir(half)
    shutil.move(image, f"{half}/vmlinuz")
    shutil.move(modules, f"{half}/modules")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(half, folder)
    return folder


def private_apt(work):
    """Options that let apt see this release's packages and its backports, and change nothing of the machine's own."""
    with open("/etc/os-release") as file:
        release = dict(line.strip().split("=", 1) for line in file if "=" in line)["VERSION_CODENAME"]
    known = run("apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", f"Codename: {release}")
    if not known:
        run("apt-get", "update", "-qq")
        known = run("apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", f"Codename: {release}")
    site = known.split()[0]
    os.makedirs(f"{work}/lists/partial")
    with open(f"{work}/sources.list", "w") as file:
        for suite in (release, f"{release}-backports"):
            file.write(f"deb [signed-by={KEYRING}] {site} {suite} main\n")
    options = [
        "-o", f"Dir::Etc::sourcelist={work}/sources.list", "-o", "Dir::Etc::sourceparts=-",
        "-o", f"Dir::State::lists={work}/lists", "-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=",
        "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3",
    ]
    run("apt-get", *options, "-qq", "update")
    return options


# ---- one guest ----------------------------------------------------------------------------------------------


def enter_network():
    """Puts this process into a network namespace of its own, with a tap device that leads to the guest."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x40000000) != 0:  # CLONE_NEWNET
        raise SystemExit(f"no network namespace: {os.strerror(ctypes.get_errno())}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    # TUNSETIFF: a tap (2) without packet information (0x1000), with virtio's header (0x4000).
    fcntl.ioctl(tap, 0x400454CA, struct.pack("16sH", b"guest", 0x0002 | 0x1000 | 0x4000))
    fcntl.ioctl(tap, 0x400454CB, 1)  # TUNSETPERSIST: for qemu to open; gone with the namespace
    os.close(tap)
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{HOST}/24", "dev", "guest")
    run("ip", "link", "set", "guest", "up")


def libraries(program):
    """Files that a program needs to be loaded."""
    return re.findall(r"(/\S+) \(0x", run("ldd", program))


class Machine:
    """A guest that runs `job`, a shell script; `files` are put into it by their path there. Ended with the block."""

    def __init__(self, kernel_folder, job, files):
        self.room = room()
        tree = f"{self.room}/tree"
        os.makedirs(f"{tree}/bin")
        shutil.copy("/bin/busybox", f"{tree}/bin/busybox")
        shutil.copy(f"{HERE}/init.sh", f"{tree}/init")
        os.chmod(f"{tree}/init", 0o755)
        with open(f"{tree}/job.sh", "w") as file:
            file.write(job)
        for inside, outside in files.items():
            self.put(tree, inside, outside)
            if os.access(outside, os.X_OK):
                for library in libraries(outside):
                    self.put(tree, library, library)
        with open(f"{tree}/modules", "w") as listed:
            for number, module in enumerate(self.modules(kernel_folder)):
                inside = f"/lib/{number}-{os.path.basename(module)}"
                self.put(tree, inside, module)
                listed.write(f"{inside}\n")
        names = subprocess.run(["find", "."], cwd=tree, capture_output=True, check=True).stdout
        with open(f"{self.room}/initrd", "wb") as file:
            subprocess.run(["cpio", "--quiet", "-o", "-H", "newc"], cwd=tree, input=names, stdout=file, check=True)
        with open(f"{self.room}/drive", "wb") as file:
            file.truncate(1 << 30)
        self.log_path = f"{self.room}/console"
        self.child = subprocess.Popen(
            ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", CPU, "-smp", "2", "-m", "1024",
             "-nodefaults", "-no-reboot", "-display", "none", "-serial", f"file:{self.log_path}",
             "-kernel", f"{kernel_folder}/vmlinuz", "-initrd", f"{self.room}/initrd",
             "-append", f"console=ttyS0 panic=-1 quiet mitigations=off GUEST={GUEST}",
             "-netdev", "tap,id=net,ifname=guest,script=no,downscript=no", "-device", "virtio-net-pci,netdev=net",
             "-drive", f"file={self.room}/drive,format=raw,if=none,id=drive",
             "-device", "nvme,drive=drive,serial=forebay"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )

    @staticmethod
    def put(tree, inside, outside):
        os.makedirs(os.path.dirname(tree + inside), exist_ok=True)
        shutil.copy(outside, tree + inside)

    @staticmethod
    def modules(kernel_folder):
        """What has to be loaded, each behind what it needs."""
        with open(f"{kernel_folder}/modules/modules.dep") as file:
            needs = dict(line.strip().split(":", 1) for line in file)
        places = {os.path.basename(place).removesuffix(".ko").replace("-", "_"): place for place in needs}
        ordered = []
        for module in MODULES:
            if module in places:
                ordered += [*reversed(needs[places[module]].split()), places[module]]
        return [f"{kernel_folder}/modules/{place}" for place in dict.fromkeys(ordered)]

    def log(self):
        try:
            with open(self.log_path, errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def until(self, what, question):
        """Asks until there is an answer."""
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = question()
            if answer:
                return answer
            if self.child.poll() is not None:
                raise SystemExit(f"the guest ended before {what}:\n{self.log()}")
            if time.monotonic() > deadline:
                raise SystemExit(f"waited {PATIENCE} s for {what}\n{self.log()}")
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        if kind is not None:
            print(f"--- console of the guest ---\n{self.log()[-20000:]}\n---")
        shutil.rmtree(self.room, ignore_errors=True)


def end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    sys.exit("this is a part of the tests beside it; run those")
