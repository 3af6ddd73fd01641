"""The GPU suite: runs every test of this folder on the machine's GPU and, if all pass, writes the
receipt that stands for them where there is none.

    suite.py BUILD RECEIPT

BUILD is a folder that the library and its tests were built in, by the reference compiler (the one
of receipt.json); RECEIPT is the file to write, receipt.json itself or one to put in its place."""
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys

import cubin

TESTS = ["refusals", "capture", "threads", "large", "differential"]
TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]
TRIALS_UNDER_A_TOOL = 15  # fewer than it has processes: one process alone


def gpu():
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip().split(", ")


def run(program):
    """How much it says has passed; 0 if it fails or skips."""
    result = subprocess.run([program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"--- {program.name}: {result.returncode}\n{result.stdout}", flush=True)
    passed = re.search(r"^passed: (\d+)", result.stdout, re.MULTILINE)
    return int(passed[1]) if result.returncode == 0 and passed else 0


def sanitize(program):
    """{tool: trials} of NVIDIA's compute-sanitizer over a few random trials; 0 where it objects."""
    environment = {**os.environ, "FA3_GPU_TRIALS": str(TRIALS_UNDER_A_TOOL)}
    running = {}
    for tool in TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", program]
        running[tool] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    counts = {}
    for tool, process in running.items():
        output, _ = process.communicate()
        print(f"--- {tool}: {process.returncode}\n{output}", flush=True)
        counts[tool] = 0 if process.returncode else TRIALS_UNDER_A_TOOL
    return counts


def main(build, receipt):
    kernels = cubin.hashes(build)
    programs = pathlib.Path(build).resolve() / "tests/gpu"
    counts = {name: run(programs / f"test_gpu_{name}") for name in TESTS}
    counts.update(sanitize(programs / "test_gpu_differential"))
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
