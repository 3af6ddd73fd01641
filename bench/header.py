"""The structs and constants of include/fa3.h for ctypes, read from the header itself."""

import ctypes
import pathlib
import re

HEADER = pathlib.Path(__file__).resolve().parent.parent / "include" / "fa3.h"
TYPES = {
    "char": ctypes.c_char,
    "float": ctypes.c_float,
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
}


def fields_of(declaration, types):
    """The names and types of `int64_t shape[4]`, `void *data`, `float a, b` and so on."""
    base, names = re.fullmatch(r"(?:const )?(\w+) (.+)", " ".join(declaration.split())).groups()
    for star, name, count in re.findall(r"(\*?)(\w+)(?:\[(\d+)\])?", names):
        kind = ctypes.c_void_p if star else types[base]
        yield name, kind * int(count) if count else kind


def read_header(path=HEADER):
    """Structs and constants, each by name; a later type may be made of an earlier one."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    types = dict(TYPES)
    alias = r"typedef (\w+) (\w+);"
    struct = r"typedef struct (\w+) \{(.*?)\} \w+;"
    for base, name, tag, body in re.findall(f"{alias}|{struct}", text, flags=re.DOTALL):
        if base:
            types[name] = types[base]
            continue
        fields = [field for part in body.split(";")[:-1] for field in fields_of(part, types)]
        types[tag] = type(tag, (ctypes.Structure,), {"_fields_": fields})
    constants = {}
    for body in re.findall(r"enum \{(.*?)\};", text, flags=re.DOTALL):
        for name, value, shift in re.findall(r"(\w+) = (\d+)(?: << (\d+))?", body):
            constants[name] = int(value) << int(shift or 0)
    return types, constants
