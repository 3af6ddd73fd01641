"""The GPU suite: runs every test of this folder on the machine's GPU and, if all pass, writes the
receipt that stands for them where there is none. Then a few trials run under compute-sanitizer, and
the receipt tells of how many each of its tools had nothing to say.

    suite.py BUILD RECEIPT

BUILD is a folder that the library and its tests were built in, by the reference compiler (the one
of receipt.json); RECEIPT is the file to write, receipt.json itself or one to put in its place."""

import datetime
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import cubin

# What is run, by the name that the receipt has for it: a program and its arguments. What is most
# likely to fail comes first, for a failure ends the suite.
TESTS = {
    "gradients": ["test_gpu_differential", "backward"],
    "differential": ["test_gpu_differential", "forward"],
    "threads": ["test_gpu_threads"],
    "deterministic": ["test_gpu_deterministic"],
    "capture": ["test_gpu_capture"],
    "float8": ["test_gpu_float8"],
    "refusals": ["test_gpu_refusals"],
    "cache": ["test_gpu_cache"],
    "large": ["test_gpu_large"],
}
TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]
SECONDS_UNDER_A_TOOL = int(os.environ.get("FA3_GPU_SANITIZER_SECONDS", 300))
TRIALS_UNDER_A_TOOL = 15  # fewer than it has processes: one process alone
ACCURACY = pathlib.Path(__file__).with_name("accuracy.py")


def gpu():
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    return (
        subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip().split(", ")
    )


def run(name, command):
    """How much it says has passed; 0 if it fails or skips."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"--- {name}: {result.returncode}\n{result.stdout}", flush=True)
    passed = re.search(r"^passed: (\d+)", result.stdout, re.MULTILINE)
    return int(passed[1]) if result.returncode == 0 and passed else 0


def sanitize(program):
    """{tool: trials} of NVIDIA's compute-sanitizer over a few random trials; 0 where it objects or
    takes too long."""
    environment = {**os.environ, "FA3_GPU_TRIALS": str(TRIALS_UNDER_A_TOOL)}
    running = {}
    for tool in TOOLS:
        for direction in ("forward", "backward"):
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
            running[f"{tool}_{direction}"] = subprocess.Popen(
                [*command, program, direction],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # its program goes with it
            )
    end = time.monotonic() + SECONDS_UNDER_A_TOOL
    counts = {}
    for name, process in running.items():
        try:
            output, _ = process.communicate(timeout=max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        print(f"--- {name}: {process.returncode}\n{output}", flush=True)
        counts[name] = 0 if process.returncode else TRIALS_UNDER_A_TOOL
    return counts


def main(build, receipt):
    kernels = cubin.hashes(build)
    if not kernels:
        print("the library has no kernels: no receipt")
        return 1
    build = pathlib.Path(build).resolve()
    programs = build / "tests/gpu"
    counts = {}
    with tempfile.NamedTemporaryFile(suffix=".json") as errors:
        commands = {name: [programs / test[0], *test[1:]] for name, test in TESTS.items()}
        commands["accuracy"] = [sys.executable, ACCURACY, build / "libfa3.so", errors.name]
        for name, command in commands.items():
            counts[name] = run(name, command)
            if not counts[name]:
                print(f"{name} failed: no receipt")
                return 1
        cases = json.load(errors)
    name, driver = gpu()
    content = {
        "compiler": cubin.compiler(build),
        "gpu": name,
        "driver": driver,
        "date": datetime.date.today().isoformat(),
        "passed": counts,
        "sanitizers": None,
        "largest_error_over_fa2": {
            of: max(case[of]["ratio"] for case in cases)
            for of in ("output", "grad_query", "grad_key", "grad_value")
        },
        "kernels": kernels,
    }

    def write():
        pathlib.Path(receipt).write_text(json.dumps(content, indent=2) + "\n")

    write()
    tools = content["sanitizers"] = sanitize(programs / "test_gpu_differential")
    write()
    print(f"passed: {counts}; under compute-sanitizer: {tools}")
    return 0 if all(tools.values()) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
