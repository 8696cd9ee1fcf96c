"""Run code in a process without this project's modules and TorchTitan's, but with torch: python -m tests.fresh CODE.

In a fork of the test server this takes a tenth of the time of a new interpreter.
"""

import sys

PACKAGES = ("torchtitan", "torchtitan_scape", "scripts")

if __name__ == "__main__":
    for name in list(sys.modules):
        if name.split(".")[0] in PACKAGES:
            del sys.modules[name]
    exec(sys.argv[1], {"__name__": "__main__"})
