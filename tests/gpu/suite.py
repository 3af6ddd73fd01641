"""The GPU suite: runs every test of this folder on the machine's GPU and, if all pass, writes the
receipt that stands for them where there is none. A test that fails keeps none of the others from
running. After a receipt a few trials run under compute-sanitizer, and the receipt tells of how many
each of its tools had nothing to say.

    suite.py BUILD RECEIPT

BUILD is a folder that the library and its tests were built in, by the reference compiler (the one
of receipt.json); RECEIPT is the file to write, receipt.json itself or one to put in its place.

What has passed is also kept beside RECEIPT, in a file that ends in .part: should the suite be cut
off, a run of the same library and tests on the same kind of GPU goes on from there. But where a test
has failed, all are run again: another try may not hide what fails now and then.

FA3_GPU_TEST_SECONDS and FA3_GPU_SANITIZER_SECONDS limit the two halves. FA3_GPU_SANITIZED, a list
with commas, names the programs that run under compute-sanitizer (UNDER_A_TOOL): where time is
short, those whose kernels have changed. The receipt tells of no others then."""

import contextlib
import datetime
import hashlib
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
# while processes share the GPU in turns (docs/notes/cuda-engine.md); `deterministic` has several
# streams too.
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


def run(commands, passed, keep):
    """Puts into `passed` how much each says has passed; 0 if it fails or skips."""
    running = {name: start(command) for name, command in commands.items()}
    end = time.monotonic() + SECONDS_OF_TESTS
    for name, started in running.items():
        output = finish(name, started, end - time.monotonic())
        count = output and re.search(r"^passed: (\d+)", output, re.MULTILINE)
        passed[name] = int(count[1]) if count else 0
        keep()


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


def hash_files(files):
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def resume(part, tested, content):
    """`content`, or what is kept of an earlier run of the same files, in which nothing failed."""
    with contextlib.suppress(FileNotFoundError):
        kept = json.loads(part.read_text())
        before = kept["content"]
        same = kept["tested"] == tested and all(before[x] == content[x] for x in ("gpu", "driver"))
        if same and all(before["passed"].values()):
            print(f"passed before: {before['passed']}")
            return before
    return content


def main(build, receipt):
    if not set(SANITIZED) <= set(UNDER_A_TOOL):
        print(f"FA3_GPU_SANITIZED takes {', '.join(UNDER_A_TOOL)}")
        return 1
    kernels = cubin.hashes(build)
    if not kernels:
        print("the library has no kernels: no receipt")
        return 1
    build = pathlib.Path(build).resolve()
    programs = build / "tests/gpu"
    part = pathlib.Path(f"{receipt}.part")
    tests = sorted({programs / test[0] for test in TESTS.values()})
    tested = hash_files([build / "libfa3.so", ACCURACY, *tests])
    name, driver = gpu()
    content = {
        "compiler": cubin.compiler(build),
        "gpu": name,
        "driver": driver,
        "date": datetime.date.today().isoformat(),
        "passed": {},
        "sanitizers": None,
        "largest_error_over_fa2": None,
        "kernels": kernels,
    }
    content = resume(part, tested, content)
    passed = content["passed"]
    with tempfile.NamedTemporaryFile(suffix=".json") as errors:
        commands = {name: [programs / test[0], *test[1:]] for name, test in TESTS.items()}
        commands["accuracy"] = [sys.executable, ACCURACY, build / "libfa3.so", errors.name]

        def keep():
            if passed.get("accuracy") and not content["largest_error_over_fa2"]:
                cases = json.load(errors)
                content["largest_error_over_fa2"] = {
                    of: max(case[of]["ratio"] for case in cases)
                    for of in ("output", "grad_query", "grad_key", "grad_value")
                }
            part.write_text(json.dumps({"tested": tested, "content": content}))

        left = [name for name in commands if name not in passed]
        together = [name for name in left if name not in ALONE]
        for names in [together, *([name] for name in left if name in ALONE)]:
            run({name: commands[name] for name in names}, passed, keep)
        failed = [name for name in commands if not passed[name]]
        if failed:
            print(f"no receipt: {passed}; failed: {', '.join(failed)}")
            return 1

    def write():
        pathlib.Path(receipt).write_text(json.dumps(content, indent=2) + "\n")

    write()
    part.unlink()
    tools = content["sanitizers"] = sanitize(programs)
    write()
    print(f"passed: {passed}; under compute-sanitizer: {tools}")
    return 0 if all(tools.values()) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
