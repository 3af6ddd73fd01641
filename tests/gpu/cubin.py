"""The kernels in a build of the library, and a hash of each one's code."""
import hashlib
import json
import pathlib
import re
import struct


def sections(elf):
    """(name, type, contents) of every section of a 64-bit ELF file."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    texts = headers[names][4]
    for header in headers:
        start = texts + header[0]
        name = elf[start : elf.index(b"\0", start)].decode()
        contents = b"" if header[1] == 8 else elf[header[4] : header[4] + header[5]]
        yield name, header, contents


def code_hash(cubin):
    """Of what decides how the kernels run: their instructions, what the driver is told of them, and
    their constants. The rest of a cubin holds flags and paths."""
    parts = []
    for name, header, contents in sections(cubin):
        if name.startswith((".text", ".nv.info", ".nv.constant")):
            parts.append((name, contents))
    if not any(name.startswith(".text") for name, _ in parts):
        raise ValueError("a cubin without code")
    digest = hashlib.sha256()
    for name, contents in sorted(parts):
        digest.update(struct.pack("<QQ", len(name), len(contents)) + name.encode() + contents)
    return digest.hexdigest()


def embedded(library):
    """{name: bytes} of a shared library, by its symbols fatbin_NAME: compressed cubins."""
    with open(library, "rb") as file:
        elf = file.read()
    found = list(sections(elf))
    fatbins = {}
    for name, header, contents in found:
        if name != ".symtab":
            continue
        texts = found[header[6]][2]
        for at in range(0, len(contents), 24):
            text, _, _, section, value, size = struct.unpack_from("<IBBHQQ", contents, at)
            symbol = texts[text : texts.index(b"\0", text)].decode()
            if not symbol.startswith("fatbin_") or not section:
                continue
            address = found[section][1][3]
            start = value - address
            fatbins[symbol[len("fatbin_") :]] = found[section][2][start : start + size]
    return fatbins


def hashes(build):
    """{name: hash} of the library in a build folder, which has the cubins that went into it."""
    build = pathlib.Path(build)
    found = {}
    for name, fatbin in sorted(embedded(build / "libfa3.so").items()):
        if (build / "kernels" / f"{name}.fatbin").read_bytes() != fatbin:
            raise ValueError(f"{name}.fatbin is not what the library has")
        found[name] = code_hash((build / "kernels" / f"{name}.cubin").read_bytes())
    return found


def kind(build, name):
    """The kind of a kernel of a build folder, as kernels/variants.def has it."""
    return json.loads((pathlib.Path(build) / "kernels" / f"{name}.json").read_text())["kind"]


def compiler(build):
    """What compiled the kernels of a build folder; None if it has none."""
    cache = (pathlib.Path(build) / "CMakeCache.txt").read_text()
    found = re.search(r"^FA3_NVCC_COMPILER:INTERNAL=(.+)$", cache, re.MULTILINE)
    return found and found[1]
