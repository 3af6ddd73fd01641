"""The programs in docs/ run: each block of Python and of C alone, a block of shell commands with the
program fa3. So does README's Python; another test has its C."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import fa3
import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = pathlib.Path(fa3.__file__).parent
CUDA = pathlib.Path("/usr/local/cuda")
BLOCKS = [
    pytest.param(language, text, id=f"{page.stem}-{index}")
    for page, languages in [
        *((page, "python|c|sh") for page in sorted((ROOT / "docs").glob("*.md"))),
        (ROOT / "README.md", "python"),
    ]
    for index, (language, text) in enumerate(
        re.findall(rf"^```({languages})\n(.*?)^```", page.read_text(), re.S | re.M)
    )
]


def run_python(text, folder):
    gpus = 2 if '"nccl")' in text else 1
    if '"cuda"' in text and torch.cuda.device_count() < gpus:
        pytest.skip(f"fewer than {gpus} GPUs here")
    for package in ("transformers", "jax"):
        if f"import {package}" in text:
            pytest.importorskip(package)
    if "torch.distributed" not in text:
        exec(text, {})
        return
    for host in ("localhost", socket.gethostname()):  # PyTorch's processes look for each other there
        try:
            socket.getaddrinfo(host, 80)
        except OSError:
            pytest.skip(f"{host} has no address here")
    program = folder / "program.py"
    program.write_text(text)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run([*launcher, "--nproc-per-node", "2", program], check=True, timeout=300)


def run_c(text, folder):
    source, program = folder / "program.c", folder / "program"
    source.write_text(text)
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-I", ROOT / "include"]
    library = [PACKAGE / "libfa3.so.0", f"-Wl,-rpath,{PACKAGE}"]
    on_gpu = "cuda_runtime_api.h" in text
    if on_gpu:
        if not (CUDA / "include/cuda_runtime_api.h").exists():
            pytest.skip(f"no CUDA toolkit in {CUDA}")
        flags += ["-isystem", CUDA / "include"]
        library += ["-L", CUDA / "lib64", "-lcudart", f"-Wl,-rpath,{CUDA / 'lib64'}"]
    subprocess.run(["gcc", *flags, source, "-o", program, *library], check=True)
    if on_gpu and not torch.cuda.is_available():
        pytest.skip("no GPU here: compiled, not run")
    subprocess.run([program], check=True, timeout=60)


def run_sh(text, folder):
    path = f"{PACKAGE}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    subprocess.run(["bash", "-euc", text], check=True, cwd=folder, env=environment, timeout=120)


@pytest.mark.parametrize("language, text", BLOCKS)
def test_block(language, text, tmp_path):
    {"python": run_python, "c": run_c, "sh": run_sh}[language](text, tmp_path)
