"""Compiles the kernels in a folder elsewhere and compares their code with the build's: a path must
not get into it, or no receipt would hold on another machine.

    two_folders.py CMAKE NVCC SOURCE BUILD"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import cubin


def main(cmake, nvcc, source, built):
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = pathlib.Path(folder) / "another" / "place"
        for part in ["kernels", "src", "include", "cmake", "reference"]:
            shutil.copytree(pathlib.Path(source) / part, elsewhere / part)
        (elsewhere / "tests/gpu").mkdir(parents=True)
        for file in ["CMakeLists.txt", "tests/gpu/receipt.json"]:
            shutil.copy(pathlib.Path(source) / file, elsewhere / file)
        build = pathlib.Path(folder) / "build"
        configure = [cmake, "-S", elsewhere, "-B", build, "-G", "Ninja", f"-DFA3_NVCC={nvcc}"]
        subprocess.run(
            configure + ["-DFA3_CUDA=ON", "-DFA3_BUILD_TESTS=OFF", "-DFA3_BUILD_CLI=OFF"],
            check=True, stdout=subprocess.DEVNULL)
        jobs = str(os.cpu_count())
        subprocess.run([cmake, "--build", build, "--target", "fa3_cubins", "--parallel", jobs],
                       check=True, stdout=subprocess.DEVNULL)
        there = {path.stem: cubin.code_hash(path.read_bytes())
                 for path in (build / "kernels").glob("*.cubin")}
    here = cubin.hashes(built)
    differing = [name for name in here if here[name] != there.get(name)]
    for name in differing:
        print(f"{name}: its code depends on the folder that it is compiled in")
    if differing or len(here) != len(there) or not here:
        return 1
    print(f"{len(here)} kernels are the same in both folders")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
