#!/usr/bin/env python3
"""kernel-tuning's three scripts: what they say, what they set, and that it can be taken back.

Most is tried on a tree of plain files shaped like /proc and /sys, since no one machine has every knob. As root the
scripts also run on this machine, and its settings are put back whatever happens. Ends with `N passed, N failed`.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPTS = os.path.join(ROOT, "kernel-tuning")
STATE = "var/lib/forebay/kernel-tuning.state"
NOBODY = 65534
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 1048576              files
Max locked memory         8388608              8388608              bytes
"""
NVME = "sys/devices/pci0000:00/0000:01:00.0"
NIC = "sys/devices/pci0000:00/0000:02:00.0"
QUEUE = f"{NVME}/nvme/nvme0/nvme0n1/queue"
SDA = "sys/devices/pci0000:00/0000:03:00.0/ata1/block/sda"
WANTED = {  # what apply makes of the tree with `nvme0n1`
    "proc/sys/kernel/io_uring_disabled": "0",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force",
    "proc/sys/net/core/somaxconn": "4096",
    "proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t4194304",
    "proc/sys/net/core/wmem_max": "4194304",
    "proc/sys/net/core/rmem_default": "1048576",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance",
    "sys/devices/system/cpu/cpu2/cpufreq/scaling_governor": "performance",
    "sys/devices/system/cpu/cpu3/cpufreq/scaling_governor": "performance",
    f"{QUEUE}/scheduler": "[none] mq-deadline kyber",
    f"{QUEUE}/nr_requests": "256",
    f"{QUEUE}/read_ahead_kb": "128",
    **{f"proc/irq/{60 + queue}/smp_affinity_list": str(queue % 4) for queue in range(6)},
}


class Tree:
    """A machine of plain files: four slow CPUs, an NVMe drive, a NIC of six queues, and a disk below a mapped one."""

    def __init__(self):
        self.path = tempfile.mkdtemp(prefix="forebay-tuning.")
        for name, content in {
            "proc/sys/kernel/io_uring_disabled": "2",
            "proc/sys/kernel/random/boot_id": "first-boot",
            "proc/self/limits": LIMITS.rstrip("\n"),
            "proc/self/status": "Name:\tsed\nCapEff:\t000001ffffffffff",
            "proc/1/comm": "systemd",
            "proc/sys/vm/nr_hugepages": "16",
            "proc/sys/net/core/somaxconn": "128",
            "proc/sys/net/core/wmem_max": "212992",
            "proc/sys/net/core/rmem_max": "8388608",
            "proc/sys/net/core/rmem_default": "212992",
            "proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t1048576",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force",
            "sys/devices/system/cpu/online": "0-3",
            "sys/class/net/lo/address": "00:00:00:00:00:00",
        }.items():
            self.write(name, content)
        for cpu in range(4):
            self.write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor", "powersave")
        self.disk(f"{NVME}/nvme/nvme0/nvme0n1", "none [mq-deadline] kyber", requests=64, ahead=16, tags=1023)
        self.link(f"{NVME}/nvme/nvme0/nvme0n1/device", f"{NVME}/nvme/nvme0")
        # The drive's interrupts as its driver has spread them, the admin queue on any CPU.
        for number, (name, mask) in enumerate([("nvme0q0", "0-3"), ("nvme0q1", "0-1"), ("nvme0q2", "2-3")]):
            self.interrupt(NVME, 50 + number, name, mask)
        for queue in range(6):
            self.interrupt(NIC, 60 + queue, f"eth0-TxRx-{queue}", "0-3")
        self.interrupt(NIC, 66, "eth0-event", "0-3")
        self.link("sys/class/net/eth0/device", NIC)
        self.disk(SDA, "[none] mq-deadline", requests=32, ahead=4096, tags=32)
        self.disk("sys/devices/virtual/block/dm-0", "none", requests=128, ahead=128, tags=None)
        self.link("sys/devices/virtual/block/dm-0/slaves/sda", SDA)

    def disk(self, folder, scheduler, requests, ahead, tags):
        self.write(f"{folder}/queue/scheduler", scheduler)
        self.write(f"{folder}/queue/nr_requests", str(requests))
        self.write(f"{folder}/queue/read_ahead_kb", str(ahead))
        self.write(f"{folder}/queue/iosched/fifo_batch", "16")
        if tags:
            self.write(f"{folder}/mq/0/nr_tags", str(tags))
        self.link(f"sys/block/{os.path.basename(folder)}", folder)

    def interrupt(self, device, number, name, mask):
        self.write(f"{device}/msi_irqs/{number}", "msix")
        self.write(f"proc/irq/{number}/smp_affinity_list", mask)
        os.mkdir(os.path.join(self.path, f"proc/irq/{number}/{name}"))

    def lies_on(self, path, folder):
        """From now on the device that PATH lies on is the one in FOLDER."""
        number = os.stat(path).st_dev
        self.link(f"sys/dev/block/{os.major(number)}:{os.minor(number)}", folder)

    def write(self, name, content):
        path = os.path.join(self.path, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(content + "\n")

    def link(self, name, target):
        path = os.path.join(self.path, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(os.path.relpath(os.path.join(self.path, target), os.path.dirname(path)), path)

    def read(self, name):
        with open(os.path.join(self.path, name)) as file:
            return file.read().removesuffix("\n")

    def files(self):
        """Every file with its bytes; what tells whether anything at all was changed."""
        found = {}
        for folder, _, names in os.walk(self.path):
            for name in names:
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    found[os.path.relpath(path, self.path)] = file.read()
        return found


def run(script, *arguments, scripts=SCRIPTS, **how):
    return subprocess.run([os.path.join(scripts, script), *arguments], capture_output=True, text=True, timeout=120, **how)


class OnATree(unittest.TestCase):
    def setUp(self):
        self.tree = Tree()
        self.addCleanup(shutil.rmtree, self.tree.path)

    def on(self, script, *arguments, status=0):
        """Runs a script on the tree; its standard output."""
        done = run(script, "--root", self.tree.path, *arguments)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.assertEqual(done.stderr, "")
        return done.stdout

    def refused(self, script, *arguments, status=1):
        """Runs a script that turns back; what it says."""
        done = run(script, "--root", self.tree.path, *arguments)
        self.assertEqual((done.returncode, done.stdout), (status, ""), done.stderr)
        return done.stderr

    def knobs(self, *arguments, status):
        """check's answer by name."""
        return {knob["knob"]: knob for knob in json.loads(self.on("check", "--json", *arguments, status=status))}

    def test_apply_sets_what_is_wanted_and_check_agrees(self):
        before = self.tree.files()
        self.on("check", "nvme0n1", status=1)
        self.on("apply", "nvme0n1")
        after = self.tree.files()
        changed = {name: after[name].decode().removesuffix("\n") for name in before if before[name] != after[name]}
        self.assertEqual(changed, WANTED)
        self.assertEqual(set(after) - set(before), {STATE})
        knobs = self.knobs("nvme0n1", status=0)
        self.assertEqual({knob["verdict"] for knob in knobs.values()}, {"ok"})

    def test_revert_leaves_no_trace(self):
        before, said = self.tree.files(), self.on("check", "nvme0n1", status=1)
        self.on("apply", "nvme0n1")
        self.assertNotEqual(self.on("check", "nvme0n1"), said)
        self.on("revert")
        self.assertEqual(self.tree.files(), before)
        self.assertEqual(self.on("check", "nvme0n1", status=1), said)
        self.assertIn("there is no record", self.refused("revert"))

    def test_a_second_apply_keeps_the_first_record(self):
        before = self.tree.files()
        self.on("apply")
        first = self.tree.read(STATE)
        self.assertNotIn("set", [line["outcome"] for line in json.loads(self.on("apply", "--json"))])
        self.assertEqual(self.tree.read(STATE), first)
        self.tree.write("proc/sys/net/core/somaxconn", "1000")  # by somebody, between the two
        self.on("apply", "nvme0n1")
        record = self.tree.read(STATE)
        self.assertTrue(record.startswith(first), record)  # the drive's values are added, nothing is replaced
        self.assertIn("/sys/block/nvme0n1/queue/scheduler mq-deadline", record)
        self.assertEqual(record.count("/proc/sys/net/core/somaxconn "), 1)
        self.on("revert")
        self.assertEqual(self.tree.files(), before)

    def test_a_dry_run_changes_nothing(self):
        before = self.tree.files()
        said = self.on("apply", "--dry-run", "nvme0n1")
        self.assertIn("would set net.core.somaxconn: 128 -> 4096", said)
        self.assertEqual(said.count("would set"), len(WANTED))
        self.assertEqual(self.tree.files(), before)
        self.on("apply", "nvme0n1")
        applied = self.tree.files()
        said = self.on("revert", "--dry-run")
        self.assertEqual(said.count("would set"), len(WANTED))
        self.assertEqual(self.tree.files(), applied)

    def test_json_is_json_and_says_the_same(self):
        before = self.tree.files()
        text = self.on("check", "nvme0n1", status=1)
        for name, knob in self.knobs("nvme0n1", status=1).items():
            self.assertEqual(set(knob), {"knob", "value", "wanted", "verdict", "why", "change"})
            self.assertIn(f"{knob['verdict']:8} {name}: {knob['value']}\n", text)
            self.assertIn(f"wanted  {knob['wanted']}: {knob['why']}\n", text)
            self.assertIn(f"change  {knob['change']}\n", text)
            self.assertTrue(all(knob.values()), knob)
        applied = json.loads(self.on("apply", "--json", "nvme0n1"))
        self.assertEqual(sum(line["outcome"] == "set" for line in applied), len(WANTED))
        reverted = json.loads(self.on("revert", "--json"))
        self.assertEqual(sum(line["outcome"] == "restored" for line in reverted), len(WANTED))
        self.assertEqual(self.tree.files(), before)

    def test_nothing_is_lowered(self):
        better = {
            "proc/sys/net/core/somaxconn": "65535",
            "proc/sys/net/ipv4/tcp_wmem": "8192\t65536\t16777216",
            "proc/sys/net/core/rmem_default": "4194304",
            "sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [within_size] advise never deny force",
            f"{QUEUE}/nr_requests": "1023",
            f"{QUEUE}/read_ahead_kb": "4096",
        }
        for name, value in better.items():
            self.tree.write(name, value)
        self.on("apply", "nvme0n1")
        for name, value in better.items():
            self.assertEqual(self.tree.read(name), value, name)
        self.assertEqual(self.tree.read("proc/sys/net/core/rmem_max"), "8388608")
        self.assertEqual(self.tree.read("proc/sys/vm/nr_hugepages"), "16")

    def test_what_the_kernel_refuses_is_said_and_the_rest_is_done(self):
        # A number of the real kernel that nobody may write, root neither.
        somaxconn = os.path.join(self.tree.path, "proc/sys/net/core/somaxconn")
        os.remove(somaxconn)
        os.symlink("/proc/sys/kernel/cap_last_cap", somaxconn)
        before = self.tree.files()
        said = self.on("apply", "nvme0n1", status=1)
        self.assertRegex(said, r"(?m)^refused +net\.core\.somaxconn: \d+ -> 4096: Permission denied$")
        for name, value in WANTED.items():
            if "somaxconn" not in name:
                self.assertEqual(self.tree.read(name), value, name)
        self.on("revert")
        self.assertEqual(self.tree.files(), before)

    def test_without_a_place_for_the_record_nothing_is_changed(self):
        before = self.tree.files()
        said = self.refused("apply", "--state", "/dev/null/state", "nvme0n1")
        self.assertIn("nothing is changed", said)
        self.assertIn("--state", said)
        self.assertEqual(self.tree.files(), before)

    def test_a_record_of_an_earlier_boot_is_not_restored(self):
        self.on("apply")
        self.tree.write("proc/sys/kernel/random/boot_id", "second-boot")
        self.tree.write("proc/sys/net/core/somaxconn", "2048")  # what the new boot began with
        old = self.tree.read(STATE)
        self.on("apply")
        self.assertIn("somaxconn 2048", self.tree.read(STATE))
        self.on("revert")
        self.assertEqual(self.tree.read("proc/sys/net/core/somaxconn"), "2048")
        self.tree.write(STATE, old)
        before = self.tree.files()
        self.assertIn("of an earlier boot", self.on("revert"))
        del before[STATE]
        self.assertEqual(self.tree.files(), before)

    def test_a_record_that_is_not_ours_is_refused(self):
        ours = "forebay kernel-tuning 1, boot first-boot\n"
        for content in ["", "root:x:0:0", ours + "/etc/passwd x", ours + "/sys/../etc/passwd x", ours + "/sys/x"]:
            self.tree.write(STATE, content)
            before = self.tree.files()
            for script in "apply", "revert":
                self.assertIn(STATE, self.refused(script))
            self.assertEqual(self.tree.files(), before)

    def test_what_was_set_by_hand_as_wanted_is_not_reverted(self):
        self.tree.write("proc/sys/net/core/somaxconn", "4096")
        self.on("apply")
        self.tree.write("proc/sys/net/core/somaxconn", "9000")
        self.on("revert")
        self.assertEqual(self.tree.read("proc/sys/net/core/somaxconn"), "9000")

    def test_a_drive_that_went_does_not_hinder_the_rest(self):
        self.on("apply", "nvme0n1")
        shutil.rmtree(os.path.join(self.tree.path, NVME))
        os.remove(os.path.join(self.tree.path, "sys/block/nvme0n1"))
        self.assertRegex(self.on("revert"), r"gone +/sys/block/nvme0n1/queue/scheduler")
        self.assertEqual(self.tree.read("proc/sys/net/core/somaxconn"), "128")
        self.assertFalse(os.path.exists(os.path.join(self.tree.path, STATE)))

    def test_the_limits_are_the_operators_to_set(self):
        knobs = self.knobs(status=1)
        self.assertEqual(knobs["memlock"]["verdict"], "ok")  # CAP_IPC_LOCK
        self.assertEqual(knobs["nofile"]["verdict"], "ok")
        self.tree.write("proc/self/status", "CapEff:\t0000000000000000")
        self.tree.write("proc/self/limits", LIMITS.replace("1048576", "4096   ").rstrip("\n"))
        knobs = self.knobs(status=1)
        self.assertEqual((knobs["memlock"]["verdict"], knobs["memlock"]["value"]), ("differs", "8192 KiB"))
        self.assertIn("LimitMEMLOCK=infinity", knobs["memlock"]["change"])
        self.assertEqual((knobs["nofile"]["verdict"], knobs["nofile"]["value"]), ("differs", "4096"))
        said = self.on("apply")
        self.assertRegex(said, r"(?m)^yours +memlock: 8192 KiB; LimitMEMLOCK=infinity")
        self.assertRegex(said, r"(?m)^yours +nofile: 4096; LimitNOFILE=")
        self.tree.write("proc/self/limits", LIMITS.replace("8388608", "unlimited").rstrip("\n"))
        self.assertEqual(self.knobs(status=0)["memlock"]["verdict"], "ok")

    def test_interrupts_are_left_where_they_are_well_placed(self):
        knobs = self.knobs("nvme0n1", status=1)
        self.assertEqual(knobs["irq affinity of nvme0n1"]["value"], "51 on 0-1, 52 on 2-3")
        self.assertEqual(knobs["irq affinity of nvme0n1"]["verdict"], "ok")
        self.assertEqual(knobs["irq affinity of eth0"]["verdict"], "differs")
        self.assertNotIn("irq affinity of lo", knobs)
        self.tree.write("proc/77/comm", "irqbalance")
        knobs = self.knobs("nvme0n1", status=1)
        self.assertEqual(knobs["irq affinity of eth0"]["verdict"], "unknown")
        self.assertIn("irqbalance moves them", knobs["irq affinity of eth0"]["value"])
        self.on("apply")
        self.assertEqual(self.tree.read("proc/irq/60/smp_affinity_list"), "0-3")

    def test_a_file_stands_for_the_drives_below_it(self):
        self.tree.lies_on(self.tree.path, "sys/devices/virtual/block/dm-0")
        knobs = self.knobs(self.tree.path, status=1)
        self.assertEqual(knobs["scheduler of sda"]["verdict"], "ok")
        # Without a scheduler the drive's 32 tags are all there is; to ask for more would be refused.
        self.assertEqual(knobs["nr_requests of sda"]["verdict"], "ok")
        self.assertEqual(knobs["irq affinity of sda"]["verdict"], "unknown")
        self.assertNotIn("scheduler of dm-0", knobs)

    def test_a_partition_stands_for_its_drive(self):
        self.tree.write(f"{NVME}/nvme/nvme0/nvme0n1/nvme0n1p1/partition", "1")
        self.tree.lies_on(self.tree.path, f"{NVME}/nvme/nvme0/nvme0n1/nvme0n1p1")
        self.assertEqual(self.knobs(self.tree.path, status=1)["scheduler of nvme0n1"]["verdict"], "differs")

    def test_a_file_on_no_drive_is_said(self):
        knobs = self.knobs(self.tree.path, status=1)
        self.assertIn("no block device", knobs[f"drive of {self.tree.path}"]["value"])

    def test_what_is_absent_is_unknown_and_says_why(self):
        for name in "proc/sys/kernel/io_uring_disabled", "proc/sys/net/core/rmem_max":
            os.remove(os.path.join(self.tree.path, name))
        shutil.rmtree(os.path.join(self.tree.path, "sys/devices/system/cpu/cpu0/cpufreq"))
        knobs = self.knobs(status=1)
        self.assertIn("older than 6.6", knobs["kernel.io_uring_disabled"]["value"])
        self.assertEqual(knobs["net.core.rmem_max"]["verdict"], "unknown")
        self.assertEqual(knobs["cpu governor"]["value"], "powersave (3 of them)")
        self.on("apply")

    def test_a_wrong_call_is_told_what_is_right(self):
        self.assertIn("--json", self.refused("check", "--dry-run", status=2))
        self.assertIn("nvme0n1", self.refused("check", "nvme7n1", status=2))
        self.assertIn("nvme0n1", self.refused("apply", "/nowhere", status=2))
        self.assertIn("one word too many", self.refused("revert", "nvme0n1", status=2))
        self.assertIn("wants a path", self.refused("apply", "--state", status=2))
        self.assertIn("wants a folder", run("check", "--root", "/dev/null").stderr)
        for script in "check", "apply", "revert":
            self.assertIn(f"kernel-tuning/{script} [", self.on(script, "--help"))


class OnThisMachine(unittest.TestCase):
    def setUp(self):
        self.room = tempfile.mkdtemp(prefix="forebay-tuning.")
        self.addCleanup(shutil.rmtree, self.room)
        self.state = os.path.join(self.room, "state")
        # Two runs of this test on one machine would each see the other's settings.
        self.lock = open(os.path.join(tempfile.gettempdir(), "forebay-tuning.lock"), "a")
        self.addCleanup(self.lock.close)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def test_check_looks_at_the_machine(self):
        done = run("check", "--json", self.room)
        self.assertIn(done.returncode, (0, 1), done.stderr)
        self.assertEqual(done.stderr, "")
        knobs = {knob["knob"]: knob for knob in json.loads(done.stdout)}
        with open("/proc/sys/net/core/somaxconn") as file:
            self.assertEqual(knobs["net.core.somaxconn"]["value"], file.read().strip())

    def test_without_root_it_is_refused(self):
        # Copied, for the clone may lie where nobody else may look.
        os.chmod(self.room, 0o755)
        shutil.copytree(SCRIPTS, os.path.join(self.room, "scripts"))
        how = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
        for script in "apply", "revert":
            done = run(script, "--state", self.state, scripts=os.path.join(self.room, "scripts"), **how)
            self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
            self.assertIn("sudo", done.stderr)
            self.assertIn("--dry-run", done.stderr)
        self.assertFalse(os.path.exists(self.state))
        done = run("apply", "--dry-run", scripts=os.path.join(self.room, "scripts"), **how)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)

    def restore(self):
        if os.path.exists(self.state):
            done = run("revert", "--state", self.state)
            if os.path.exists(self.state):
                shutil.copy(self.state, tempfile.gettempdir())
                print(f"NOT RESTORED; the record is kept as {tempfile.gettempdir()}/state\n{done.stdout}{done.stderr}")

    def test_apply_and_revert_leave_this_machine_as_it_was(self):
        if os.getuid() != 0:
            self.skipTest("apply and revert on this machine need root")
        self.addCleanup(self.restore)
        for number in signal.SIGTERM, signal.SIGHUP:
            self.addCleanup(signal.signal, number, signal.signal(number, lambda *_: sys.exit(1)))
        before = run("check", self.room).stdout
        applied = run("apply", "--json", "--state", self.state, self.room)
        self.assertIn(applied.returncode, (0, 1), applied.stderr)
        outcomes = json.loads(applied.stdout)
        during = {knob["knob"]: knob for knob in json.loads(run("check", "--json", self.room).stdout)}
        reverted = run("revert", "--state", self.state)
        self.assertEqual(reverted.returncode, 0, reverted.stdout + reverted.stderr)
        self.assertEqual(run("check", self.room).stdout, before)
        self.assertFalse(os.path.exists(self.state))
        refused = {line["knob"] for line in outcomes if line["outcome"] == "refused"}
        was_set = {line["knob"] for line in outcomes if line["outcome"] == "set"} - refused
        for name in was_set:
            self.assertEqual(during[name]["verdict"], "ok", during[name])
        print(f"set and restored here: {', '.join(sorted(was_set)) or 'nothing, all was as wanted'}")
        if refused:
            print(f"refused by this kernel: {', '.join(sorted(refused))}")


def main():
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=1).run(
        unittest.defaultTestLoader.loadTestsFromModule(sys.modules[__name__]))
    for test, reason in result.skipped:
        print(f"SKIPPED {reason}")
        if os.environ.get("FOREBAY_SKIPS"):
            with open(os.environ["FOREBAY_SKIPS"], "a") as file:
                file.write(f"{reason}\n")
    failed = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - failed - len(result.skipped)} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
