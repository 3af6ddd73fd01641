"""The GPU suite: runs every test of this folder on the machine's GPU and, if all pass, writes the
receipt that stands for them where there is none. A test that fails keeps none of the others from
running. After a receipt a few trials run under compute-sanitizer, and the receipt tells of how many
each of its tools had nothing to say.

    suite.py BUILD RECEIPT

BUILD is a folder that the library and its tests were built in, by the reference compiler (the one
of receipt.json); RECEIPT is the file to write, receipt.json itself or one to put in its place.

FA3_GPU_TEST_SECONDS and FA3_GPU_SANITIZER_SECONDS limit the two halves. FA3_GPU_SANITIZED, a list
with commas, names the programs that run under compute-sanitizer (UNDER_A_TOOL): where time is
short, those whose kernels have changed. The receipt tells of no others then."""

import contextlib
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
# likely to fail comes first.
TESTS = {
    "gradients": ["test_gpu_differential", "backward"],
    "differential": ["test_gpu_differential", "forward"],
    "threads": ["test_gpu_threads"],
    "deterministic": ["test_gpu_deterministic"],
    "capture": ["test_gpu_capture"],
    "float8": ["test_gpu_float8"],
    "quantize": ["test_gpu_quantize"],
    "refusals": ["test_gpu_refusals"],
    "append": ["test_gpu_append"],
    "cache": ["test_gpu_cache"],
    "steps": ["test_gpu_steps"],
    "lse": ["test_gpu_lse"],
    "large": ["test_gpu_large"],
}
# The others run side by side. `large` takes most of a GPU's memory. A launch of `threads` may hang
# while processes share the GPU in turns (docs/notes/cuda-engine.md); `deterministic`, which has
# several streams too, did not end in its time then, for an unknown reason.
ALONE = ["threads", "deterministic", "large"]
SECONDS_OF_TESTS = int(os.environ.get("FA3_GPU_TEST_SECONDS", 300))
TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]
UNDER_A_TOOL = {
    "forward": ["test_gpu_differential", "forward"],
    "backward": ["test_gpu_differential", "backward"],
    "append": ["test_gpu_append"],
    "cache_64": ["test_gpu_cache", "64"],
    "cache_128": ["test_gpu_cache", "128"],
    "float8": ["test_gpu_float8"],
    "quantize": ["test_gpu_quantize"],
}
SANITIZED = os.environ.get("FA3_GPU_SANITIZED", ",".join(UNDER_A_TOOL)).split(",")
SECONDS_TO_END = 2
SECONDS_UNDER_A_TOOL = int(os.environ.get("FA3_GPU_SANITIZER_SECONDS", 300))
TRIALS_UNDER_A_TOOL = 15  # fewer than it has processes: one process alone
# Of 64 sequences each, which have every kernel of a cache once: enough for a minute of racecheck.
FEW_TRIALS = {"cache_64": 1, "cache_128": 1}
ACCURACY = pathlib.Path(__file__).with_name("accuracy.py")


def gpu():
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    return (
        subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip().split(", ")
    )


def start(command, environment=None):
    """The process and the file that its output goes to: a pipe would be full before it is read."""
    log = tempfile.TemporaryFile()
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # its program and processes go with it
    )
    return process, log


def print_processes(group):
    """What the processes of a group do: one whose time grows waits for a GPU or computes, one that
    sleeps waits for what WCHAN says."""
    columns = "pgid,pid,stat,wchan:24,time,args"
    listed = subprocess.run(["ps", "-eo", columns], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        if line.split()[0] in ("PGID", str(group)):
            print(line)


def finish(name, started, seconds):
    """What it printed; None if it failed or took longer. All of it is printed: a test that takes
    too long is asked to end first, so that it says which trial it is at."""
    process, log = started
    try:
        process.wait(timeout=max(0, seconds))
    except subprocess.TimeoutExpired:
        print(f"--- {name} takes too long")
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):  # a machine without ps
                print_processes(process.pid)
            time.sleep(2)
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=SECONDS_TO_END)
        with contextlib.suppress(ProcessLookupError):  # what it has left, if anything
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with log:
        log.seek(0)
        output = log.read().decode(errors="replace")
    print(f"--- {name}: {process.returncode}\n{output}", flush=True)
    return None if process.returncode else output


def run(commands):
    """Of each, how much it says has passed; 0 if it fails or skips."""
    running = {name: start(command) for name, command in commands.items()}
    end = time.monotonic() + SECONDS_OF_TESTS
    counts = {}
    for name, started in running.items():
        output = finish(name, started, end - time.monotonic())
        passed = output and re.search(r"^passed: (\d+)", output, re.MULTILINE)
        counts[name] = int(passed[1]) if passed else 0
    return counts


def sanitize(programs):
    """{tool and program: trials} of NVIDIA's compute-sanitizer over a few random trials; 0 where it
    objects or takes too long."""
    running, trials = {}, {}
    for tool in TOOLS:
        for name in SANITIZED:
            program, *arguments = UNDER_A_TOOL[name]
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
            count = trials[f"{tool}_{name}"] = FEW_TRIALS.get(name, TRIALS_UNDER_A_TOOL)
            running[f"{tool}_{name}"] = start(
                [*command, programs / program, *arguments],
                {**os.environ, "FA3_GPU_TRIALS": str(count)},
            )
    end = time.monotonic() + SECONDS_UNDER_A_TOOL
    return {
        name: 0 if finish(name, started, end - time.monotonic()) is None else trials[name]
        for name, started in running.items()
    }


def main(build, receipt):
    kernels = cubin.hashes(build)
    if not kernels:
        print("the library has no kernels: no receipt")
        return 1
    build = pathlib.Path(build).resolve()
    programs = build / "tests/gpu"
    with tempfile.NamedTemporaryFile(suffix=".json") as errors:
        commands = {name: [programs / test[0], *test[1:]] for name, test in TESTS.items()}
        commands["accuracy"] = [sys.executable, ACCURACY, build / "libfa3.so", errors.name]
        counts = run({name: commands[name] for name in commands if name not in ALONE})
        for name in ALONE:
            counts |= run({name: commands[name]})
        failed = [name for name, count in counts.items() if not count]
        if failed:
            print(f"no receipt: {counts}; failed: {', '.join(failed)}")
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
    tools = content["sanitizers"] = sanitize(programs)
    write()
    print(f"passed: {counts}; under compute-sanitizer: {tools}")
    return 0 if all(tools.values()) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
