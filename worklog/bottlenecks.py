"""Profiles one launch of every step with Nsight Compute; writes bottlenecks.json.

A single launch on a cool card: the clock is higher than in results.json, where the
card has settled at its power limit. Cycles can be compared, times less so.
"""

import csv
import json
import pathlib
import re
import subprocess
import sys

STEPS = (
    "k0_naive k1_tiled k2_mma_sync k3_tma k4_wgmma k5_specialised k6_overlap k7_fp8 k8_incoherent"
).split()
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats")
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
METRICS = {
    "ms": "gpu__time_duration.sum",
    "cycles": "gpc__cycles_elapsed.max",
    "instructions_per_cycle": "sm__inst_executed.avg.per_cycle_active",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "l1_percent": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}


def number(text):
    return float(text.replace(",", "")) if text else None


def profile(program, step):
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    for section in SECTIONS:
        command += ["--section", section]
    answer = subprocess.run(
        [*command, program, "--once", step], stdout=subprocess.PIPE, text=True, check=True
    )
    lines = [line for line in answer.stdout.splitlines() if line.startswith('"')]
    header, _units, *rows = csv.reader(lines)
    for row in rows:
        values = dict(zip(header, row))
        found = {"step": step, "kernel": values["Kernel Name"].split("(")[0]}
        found.update({name: number(values.get(metric)) for name, metric in METRICS.items()})
        found["ms"] *= 1e-6
        stalls = {m[1]: number(values[name]) for name in header if (m := STALL.fullmatch(name))}
        found["stall"] = max(stalls.keys() - {"selected", "not_selected"}, key=stalls.get)
        found["stalled_cycles_per_instruction"] = stalls[found["stall"]]
        yield found


def main():
    found = [one for step in STEPS for one in profile(sys.argv[1], step)]
    path = pathlib.Path(__file__).with_name("bottlenecks.json")
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
