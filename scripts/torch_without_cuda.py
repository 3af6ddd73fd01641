"""Makes PyPI's PyTorch, which is the CUDA build, import without the 2 GB of CUDA libraries it asks
for: each one gets an empty stand-in whose functions return an error. CPU tensors are all that works
then, and all that the tests on a machine without a GPU need. Run by the Python that has it.
"""

import collections
import pathlib
import re
import subprocess
import sysconfig

NO_DEVICE = 100  # cudaErrorNoDevice, and an error in the other libraries too


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def missing_libraries(folder):
    """For each library that is asked for and not there, its functions by symbol version."""
    versions = {}  # of a version, the library that has it
    functions = collections.defaultdict(lambda: collections.defaultdict(set))
    unversioned, defined = set(), set()
    for library in sorted(folder.glob("*.so*")):
        header = output("objdump", "-p", library)
        for name in re.findall(r"NEEDED\s+(\S+)", header):
            if re.match(r"lib(cu|nv|nccl)", name):
                functions[name][""]
        required = re.findall(r"required from (\S+):\n((?:\s+0x.*\n)+)", header)
        for name, lines in required:
            versions.update((line.split()[3], name) for line in lines.splitlines())
        for line in output("nm", "-D", library).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            if kind != "U":
                defined.add(name)
            elif versions.get(version) in functions:
                functions[versions[version]][version].add(name)
            elif not version and re.match(r"cu|nccl|nv", name):
                unversioned.add(name)
    functions["libnccl.so.2"][""] |= unversioned - defined
    return {name: found for name, found in functions.items() if not (folder / name).exists()}


def build(folder, name, functions):
    script = folder / "stand_in.map"
    script.write_text("".join(f"{version} {{ global: *; }};\n" for version in functions if version))
    names = sorted(set().union(*functions.values()))
    labels = "".join(f".globl {label}\n.type {label}, @function\n{label}:\n" for label in names)
    code = f".text\n{labels} mov ${NO_DEVICE}, %eax\n ret\n.section .note.GNU-stack,\"\",@progbits\n"
    options = [f"-Wl,-soname,{name}"]
    if any(functions):
        options.append(f"-Wl,--version-script={script}")
    command = ["gcc", "-shared", "-nostdlib", "-x", "assembler", "-", "-o", folder / name, *options]
    subprocess.run(command, input=code, text=True, check=True)
    script.unlink()


def main():
    folder = pathlib.Path(sysconfig.get_path("platlib")) / "torch" / "lib"
    for name, functions in missing_libraries(folder).items():
        build(folder, name, functions)


main()
