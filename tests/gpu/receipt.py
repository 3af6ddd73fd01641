"""Checks that every kernel of a build has passed the GPU suite (suite.py).

    receipt.py BUILD

BUILD is a folder that the library was built in. Build machines have no GPU: the suite's receipt,
receipt.json, is the proof that this very code has run and passed on one."""

import json
import pathlib
import sys

import cubin
import suite

SKIPPED = 77
RECEIPT = pathlib.Path(__file__).with_name("receipt.json")
# What must have passed, for each kind of kernel.
GRADIENTS = ["gradients", "deterministic", "accuracy"]
NEEDED = {
    "strided": ["differential"],
    "forward": ["differential", "deterministic", "accuracy", "lse"],
    "forward_fp8": ["float8"],
    "transpose_values": ["float8"],
    "unpack": ["differential", "cache"],
    "decode": ["differential", "cache", "lse"],
    "decode_fp8": ["differential", "cache", "lse"],
    "chunk_fp8": ["differential", "cache", "lse"],
    "speculative_fp8": ["differential", "cache", "float8"],
    "combine": ["differential", "cache", "lse", "float8"],
    "append": ["append", "steps"],
    "quantize": ["quantize"],
    "quantize_rotated": ["quantize"],
    "backward_prepare": GRADIENTS,
    "backward": GRADIENTS,
    "backward_wide": GRADIENTS,
}


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
    # By what it is, whatever it was called.
    passed = set(receipt["kernels"].values())
    missing = [name for name, digest in kernels.items() if digest not in passed]
    for name in missing:
        print(f"{name} has no passing receipt: run tests/gpu/suite.py on a machine with a GPU")
    kinds = {cubin.kind(build, name) for name in kernels}
    unknown = kinds - NEEDED.keys()
    for kind in unknown:
        print(f"receipt.py does not say which tests a kernel of kind {kind} needs")
    untested = {
        test
        for kind in kinds & NEEDED.keys()
        for test in NEEDED[kind]
        if not receipt["passed"].get(test)
    }
    for test in untested:
        print(f"the receipt has no passing {test}: run tests/gpu/suite.py on a machine with a GPU")
    if missing or unknown or untested:
        return 1
    sanitizers = receipt.get("sanitizers") or {}
    objecting = [tool for tool, trials in sanitizers.items() if not trials]
    if objecting:
        print(f"compute-sanitizer objected there or did not end in its time: {', '.join(objecting)}")
    absent = {f"{tool}_{name}" for tool in suite.TOOLS for name in suite.UNDER_A_TOOL} - set(sanitizers)
    if absent:
        print(f"not run under compute-sanitizer there: {', '.join(sorted(absent))}")
    print(f"{len(kernels)} kernels passed on {receipt['gpu']}, {receipt['date']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
