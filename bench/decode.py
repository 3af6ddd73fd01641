"""Decode on the CPU: what `fa3 bench --decode` measures over caches and groups of heads, as one JSON.

    python bench/decode.py build/release/cli/fa3 > bench/results/NAME.json
"""
import json
import subprocess
import sys

BOTH = ("--seqlen", "1k,8k,32k,128k", "--dtype", "bf16,fp16,fp32,e4m3")
PARTS = {
    "a query head a key head": ("--heads", "8", "--heads-k", "8", *BOTH),
    "pages of 16": ("--heads", "8", "--heads-k", "8", "--page-size", "16", "--seqlen", "8k",
                    "--dtype", "bf16,e4m3"),
    "pages of 64": ("--heads", "8", "--heads-k", "8", "--page-size", "64", "--seqlen", "8k",
                    "--dtype", "bf16,e4m3"),
    "batch 16": ("--heads", "8", "--heads-k", "8", "--batch", "16", "--seqlen", "1k,4k", "--dtype",
                 "bf16"),
    "4 query heads a key head": ("--heads", "32", "--heads-k", "8", "--seqlen", "8k", "--dtype",
                                 "bf16,fp32,e4m3"),
    "8 query heads a key head": ("--heads", "64", "--heads-k", "8", "--seqlen", "8k", "--dtype",
                                 "bf16,fp32,e4m3"),
    "16 query heads, one key head": ("--heads", "16", "--heads-k", "1", "--seqlen", "32k", "--dtype",
                                     "bf16"),
}


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    program, *options = sys.argv[1:]
    reports = {}
    for name, part in PARTS.items():
        command = ("bench", "--decode", "--device", "cpu", "--head-dim", "128", "--json", "--repeat",
                   "15", *part, *options)
        done = subprocess.run((program, *command), check=True, stdout=subprocess.PIPE, text=True)
        reports[name] = {"command": " ".join(("fa3", *command)), **json.loads(done.stdout)}
    json.dump(reports, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
