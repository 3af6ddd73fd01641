"""Checks that every kernel of a build has passed the GPU suite (suite.py).

    receipt.py BUILD

BUILD is a folder that the library was built in. Build machines have no GPU: the suite's receipt,
receipt.json, is the proof that this very code has run and passed on one."""

import json
import pathlib
import sys

import cubin

SKIPPED = 77
RECEIPT = pathlib.Path(__file__).with_name("receipt.json")
# What must have passed, by the first word of the names of the kernels that it tests.
NEEDED = {"forward": ["differential"], "backward": ["gradients", "deterministic", "accuracy"]}


def main(build):
    receipt = json.loads(RECEIPT.read_text())
    compiler = cubin.compiler(build)
    if receipt["compiler"] != compiler:
        print(f"the receipt does not apply: it is for {receipt['compiler']}, this is {compiler}")
        return SKIPPED
    kernels = cubin.hashes(build)
    if not kernels:
        print(f"the library in {build} has no kernels")
        return 1
    missing = [name for name, digest in kernels.items() if receipt["kernels"].get(name) != digest]
    for name in missing:
        print(f"{name} has no passing receipt: run tests/gpu/suite.py on a machine with a GPU")
    kinds = {name.partition("_")[0] for name in kernels}
    untested = [
        test for kind in kinds for test in NEEDED.get(kind, []) if not receipt["passed"].get(test)
    ]
    for test in untested:
        print(f"the receipt has no passing {test}: run tests/gpu/suite.py on a machine with a GPU")
    if missing or untested:
        return 1
    objecting = [tool for tool, trials in (receipt.get("sanitizers") or {}).items() if not trials]
    if objecting:
        print(f"compute-sanitizer objected there, see docs/notes: {', '.join(objecting)}")
    print(f"{len(kernels)} kernels passed on {receipt['gpu']}, {receipt['date']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
