#!/usr/bin/env python3
"""Which licences we build on. Reads `cargo metadata`; fails naming each crate whose terms we did not agree to.

An SPDX expression is judged as written: OR asks for one good side, AND for both, WITH binds to its licence.
`Apache-2.0 WITH LLVM-exception` is not on the list, so it passes only beside an alternative that is.
Advisory databases are not consulted: the machines that run this reach package registries only.
"""

import json
import re
import subprocess
import sys

AGREED = {
    "MIT", "MIT-0", "Apache-2.0", "BSD-1-Clause", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "ISC", "Zlib",
    "Unicode-3.0", "Unicode-DFS-2016", "MPL-2.0", "CDLA-Permissive-2.0",
    "CC0-1.0",  # a waiver that asks nothing: tiny-keccak, at build time, under the reader of AWS config files
}


def is_agreed(expression):
    """True if the SPDX expression can be satisfied by agreed licences alone."""
    words = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR "))

    def any_of():
        good = all_of()
        while words and words[0] == "OR":
            words.pop(0)
            good = all_of() or good
        return good

    def all_of():
        good = one()
        while words and words[0] == "AND":
            words.pop(0)
            good = one() and good
        return good

    def one():
        word = words.pop(0)
        if word == "(":
            good = any_of()
            words.pop(0)  # the closing one
            return good
        if words and words[0] == "WITH":
            words.pop(0)
            word = f"{word} WITH {words.pop(0)}"
        return word.removesuffix("+") in AGREED  # or any later one: this one will do

    return any_of()


def main():
    metadata = subprocess.run(
        ["cargo", "metadata", "--format-version", "1", "--locked", "--all-features"],
        check=True, stdout=subprocess.PIPE, text=True,
    )
    packages = json.loads(metadata.stdout)["packages"]
    strangers = [
        f"{package['name']} {package['version']}: {package['license'] or 'no licence named'}"
        for package in packages
        if not package["license"] or not is_agreed(package["license"])
    ]
    for stranger in strangers:
        print(f"not agreed: {stranger}")
    print(f"{len(packages)} packages, {len(strangers)} under terms that are not agreed")
    return 1 if strangers else 0


if __name__ == "__main__":
    assert is_agreed("MIT OR GPL-3.0") and is_agreed("(MIT OR Apache-2.0) AND Unicode-3.0") and is_agreed("MIT/X")
    assert not is_agreed("MIT AND GPL-3.0") and not is_agreed("Apache-2.0 WITH LLVM-exception")
    sys.exit(main())
