"""The GPU suite: runs every test of this folder on the machine's GPU and, if all pass, writes the
receipt that stands for them where there is none.

    suite.py BUILD RECEIPT

BUILD is a folder that the library and its tests were built in, by the reference compiler (the one
of receipt.json); RECEIPT is the file to write, receipt.json itself or one to put in its place."""
import datetime
import json
import pathlib
import re
import subprocess
import sys

import cubin

TESTS = ["refusals", "capture", "threads", "large", "differential"]


def gpu():
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip().split(", ")


def run(program):
    """How much it says has passed; 0 if it fails or skips."""
    result = subprocess.run([program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"--- {program.name}: {result.returncode}\n{result.stdout}", flush=True)
    passed = re.search(r"^passed: (\d+)", result.stdout, re.MULTILINE)
    return int(passed[1]) if result.returncode == 0 and passed else 0


def main(build, receipt):
    kernels = cubin.hashes(build)
    programs = pathlib.Path(build).resolve() / "tests/gpu"
    counts = {name: run(programs / f"test_gpu_{name}") for name in TESTS}
    if not kernels or not all(counts.values()):
        print("failed: no receipt")
        return 1
    name, driver = gpu()
    content = {
        "compiler": cubin.compiler(build),
        "gpu": name,
        "driver": driver,
        "date": datetime.date.today().isoformat(),
        "passed": counts,
        "kernels": kernels,
    }
    pathlib.Path(receipt).write_text(json.dumps(content, indent=2) + "\n")
    print(f"passed: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
