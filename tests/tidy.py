#!/usr/bin/env python3
"""The house check: what compilers do not look after.

Each rule is one check with a name; a broken one is printed with the places. Ends with `N passed, N failed`.
The rules look only at files that git knows, so build products and scratch files are nobody's business.
"""

import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LINES_MAX = 1000

# The rooms that touch the kernel or lend memory to it; everywhere else the crate denies unsafe code.
UNSAFE_ROOMS = (
    "dataplane/src/engine/",
    "dataplane/src/arena/",
    "dataplane/src/store/",
)

# Who looks at bytes of a lease: sums before they leave and after they came, and the vectors of a send. A place more
# is a place where a copy could begin: let it go through a function that counts, and say so here.
LOOKS_AT_LEASES = {"dataplane/src/serve/stream.rs": 2, "dataplane/src/fill.rs": 1, "dataplane/src/engine/mod.rs": 1}
SIMULATION = "dataplane/src/engine/scripted.rs"

# Written in two halves so that this file passes its own check.
UNFINISHED = ["to" + "do!(", "unimple" + "mented!(", "FIX" + "ME", "XX" + "X", "db" + "g!(", "#[ig" + "nore"]
NOT_OURS = ["/wo" + "rk/", "crates" + ".io", "py" + "pi.org", "pythonhosted" + ".org", "npmjs" + ".org",
            "proxy.golang" + ".org", "repo.maven" + ".apache.org", "deb.debian" + ".org"]


def files(*suffixes):
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            check=True, capture_output=True).stdout.decode()
    names = [name for name in listed.split("\0") if name and os.path.isfile(os.path.join(ROOT, name))]
    return [name for name in names if not suffixes or name.endswith(suffixes)]


def text(name):
    with open(os.path.join(ROOT, name), encoding="utf-8", errors="replace") as file:
        return file.read()


def is_script(name):
    return text(name).startswith("#!") if os.path.getsize(os.path.join(ROOT, name)) else False


def rust_files_open_with_a_paragraph():
    for name in files(".rs"):
        if not text(name).startswith("//! "):
            yield f"{name}: begins without a `//!` paragraph"


def files_are_at_most_a_thousand_lines():
    for name in files(".rs", ".py", ".sh") + [name for name in files() if "." not in os.path.basename(name)]:
        count = text(name).count("\n")
        if count > LINES_MAX and name != "LICENSE":
            yield f"{name}: {count} lines; it wants to become a folder"


def code_of(line):
    return line.split("//", 1)[0]


def unsafe_code_stays_in_its_rooms():
    for name in files(".rs"):
        if name.startswith(UNSAFE_ROOMS):
            continue
        for number, line in enumerate(text(name).splitlines(), 1):
            if re.search(r"\bunsafe\s*(\{|fn\b|impl\b|extern\b|trait\b)", code_of(line)):
                yield f"{name}:{number}: unsafe outside {', '.join(UNSAFE_ROOMS)}"


def unsafe_blocks_argue():
    for name in files(".rs"):
        lines = text(name).splitlines()
        for index, line in enumerate(lines):
            if not re.search(r"\bunsafe\s*(\{|impl\b)", code_of(line)):
                continue
            above = index - 1
            argued = "SAFETY:" in line
            while not argued and above >= 0 and above >= index - 12:
                before = lines[above].strip()
                argued = "SAFETY:" in before
                # Upwards through comments, attributes and the statement's own first lines.
                if not argued and before.endswith(("}", ";")) and "unsafe" not in before:
                    break
                above -= 1
            if not argued:
                yield f"{name}:{index + 1}: no SAFETY sentence above"


def kept_bytes_are_touched_where_it_is_known():
    """A copy of a body on the way of a hit is counted; a place that looks at bytes of a lease could make one."""
    for name in files(".rs"):
        if not name.startswith("dataplane/src/") or name.endswith("tests.rs") or name == SIMULATION:
            continue
        code = text(name).split("#[cfg(test)]", 1)[0]
        places = [line for line in code.splitlines() if re.search(r"\b(lease|body|slice)\.bytes\([^)]", code_of(line))]
        if len(places) != LOOKS_AT_LEASES.get(name, 0):
            yield f"{name}: {len(places)} places look at bytes of leases, {LOOKS_AT_LEASES.get(name, 0)} are known"


def nothing_is_left_unfinished():
    for name in files(".rs", ".py", ".sh", ".toml") + [name for name in files() if "." not in os.path.basename(name)]:
        for number, line in enumerate(text(name).splitlines(), 1):
            for word in UNFINISHED:
                if word in line:
                    yield f"{name}:{number}: {word}"


def no_word_of_a_machine_or_registry():
    for name in files():
        if name == "Cargo.lock":  # its sources are cargo's own words
            continue
        for number, line in enumerate(text(name).splitlines(), 1):
            for word in NOT_OURS:
                if word in line:
                    yield f"{name}:{number}: {word}"


def lines_end_cleanly():
    for name in files(".rs", ".py", ".sh", ".md", ".toml") + [name for name in files() if is_script(name)]:
        whole = text(name)
        if whole and not whole.endswith("\n"):
            yield f"{name}: no newline at the end"
        for number, line in enumerate(whole.splitlines(), 1):
            if line != line.rstrip():
                yield f"{name}:{number}: blanks at the end of the line"


def documents_have_one_title_and_live_links():
    for name in files(".md"):
        outside = re.sub(r"```.*?```", "", text(name), flags=re.S)
        titles = re.findall(r"^# .+$", outside, flags=re.M)
        if len(titles) != 1:
            yield f"{name}: {len(titles)} titles"
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", outside):
            if re.match(r"[a-z]+:", target):
                continue
            path = os.path.normpath(os.path.join(ROOT, os.path.dirname(name), target))
            if not os.path.exists(path):
                yield f"{name}: link to {target}, which is not there"


def scripts_can_be_run():
    for name in files():
        if is_script(name) and not os.access(os.path.join(ROOT, name), os.X_OK):
            yield f"{name}: has a `#!` line and no run bit"


def the_image_compiles_with_our_toolchain():
    channel = re.search(r'^channel = "(.+)"$', text("rust-toolchain.toml"), flags=re.M)[1]
    if not re.search(rf"^ARG RUST_IMAGE=rust:{re.escape(channel)}-", text("Dockerfile"), flags=re.M):
        yield f"Dockerfile: RUST_IMAGE is not the {channel} of rust-toolchain.toml"


RULES = [
    rust_files_open_with_a_paragraph, files_are_at_most_a_thousand_lines, unsafe_code_stays_in_its_rooms,
    unsafe_blocks_argue, kept_bytes_are_touched_where_it_is_known, nothing_is_left_unfinished, no_word_of_a_machine_or_registry, lines_end_cleanly,
    documents_have_one_title_and_live_links, scripts_can_be_run, the_image_compiles_with_our_toolchain,
]


def main():
    failed = 0
    for rule in RULES:
        places = list(rule())
        failed += bool(places)
        print(f"{'FAILED' if places else 'ok':6} {rule.__name__.replace('_', ' ')}")
        for place in places[:20]:
            print(f"       {place}")
        if len(places) > 20:
            print(f"       and {len(places) - 20} more")
    print(f"{len(RULES) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
