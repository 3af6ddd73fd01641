"""Bar charts of measured figures, as SVG whose colours follow the page's."""

import html

import figures

WIDTH, BAR, GAP, LABEL = 360, 18, 10, 108


def bars(title, unit, rows, limits, result_file):
    """`rows` are (label, value, class of the bar); `limits` are (label, value), lines across."""
    most = max([value for _, value, _ in rows] + [value for _, value in limits])
    room = WIDTH - LABEL - 44
    top = 14 + 20 * len(limits)
    height = top + len(rows) * (BAR + GAP)
    parts = []
    for i, (label, value) in enumerate(limits):
        x, y = LABEL + value / most * room, 15 + 18 * i
        parts.append(
            f'<path class="ink" stroke-dasharray="4 3" d="M{x:.1f} {y + 7} V{height - GAP + 4}"/>'
            f'<text class="over" x="{x:.1f}" y="{y}" text-anchor="end">{html.escape(label)}: '
            f"{figures.figure(value)}</text>"
        )
    for i, (label, value, kind) in enumerate(rows):
        y = top + i * (BAR + GAP)
        long = max(value / most * room, 1)
        parts.append(
            f'<text x="{LABEL - 6}" y="{y + 14}" text-anchor="end">{html.escape(label)}</text>'
            f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{long:.1f}" height="{BAR}"/>'
            f'<text class="over" x="{LABEL + long + 5:.1f}" y="{y + 14}">{figures.figure(value)}</text>'
        )
    told = "; ".join(
        f"{label} {figures.figure(value)}" for label, value in [row[:2] for row in rows] + limits
    )
    return (
        f'<figure class="picture"><svg role="img" aria-label="{html.escape(title)}, in {unit}: '
        f'{html.escape(told)}" viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{html.escape(title)}, in {unit}</title>{''.join(parts)}</svg>"
        f"<figcaption>{html.escape(title)}, in {unit} ({result_file}).</figcaption></figure>"
    )


def step_label(name):
    short, _, idea = name.partition("_")
    return f"{short.upper()} {idea.split('_')[0]}"


def ladder_bars(names, what, limits):
    rows = [
        (step_label(name), figures.step(name.split("_")[0])["tflops"], "output") for name in names
    ]
    setting, gpu = figures.step("k6"), figures.ladder()["gpu"]
    return bars(
        f"{what}, head dim 128, {setting['seqlen']} tokens, no mask, one {gpu}",
        "TFLOP/s",
        rows,
        limits,
        "worklog/results.json",
    )


def ladder():
    names = [one["name"] for one in figures.ladder()["steps"] if one["name"] < "k7"]
    limits = [("cuBLAS’s matrix product", figures.yardstick("gemm")["tflops"])]
    return ladder_bars(names, "The steps of the ladder: bfloat16", limits)


def fp8():
    names = [one["name"] for one in figures.ladder()["steps"] if one["name"] >= "k6"]
    limits = [
        ("cuBLAS’s matrix product in E4M3", figures.yardstick("gemm_fp8")["tflops"]),
        ("in bfloat16", figures.yardstick("gemm")["tflops"]),
    ]
    return ladder_bars(names, "K6 in bfloat16, K7 and K8 in E4M3", limits)


def errors():
    rows = [
        (step_label(one["step"]), one["rms_error"] * 1000, "query")
        for one in figures.outliers()["results"]
        if one["step"] >= "k6"
    ]
    return bars("Errors on inputs with outliers", "thousandths", rows, [], "worklog/results.json")


def decode():
    results = figures.flash_decode()
    rows = [
        (step_label(one["name"]), figures.decode(one["name"][:2])["gb_per_s"], "output")
        for one in results["steps"]
    ]
    setting = figures.decode("d0")
    title = (
        f"Flash decode: one sequence of {setting['keys']} keys, {setting['heads_q']} query heads, "
        f"{setting['heads_k']} heads of keys, one {results['gpu']}"
    )
    limits = [("a plain read of memory", results["read_gb_per_s"])]
    return bars(title, "GB/s of cache", rows, limits, "worklog/decode/results.json")


def peers():
    card = "nvidia-h100-graphs"
    names = {"libfa3": "libfa3", "fa3": "FlashAttn.-3", "cudnn": "cuDNN", "fa2": "FlashAttn.-2"}
    one = figures.cell(card, "forward", 128, False, 8192)
    rows = [
        (label, one[name]["tflops"], "output" if name == "libfa3" else "query")
        for name, label in names.items()
        if name in one
    ]
    limits = [("cuBLAS’s matrix product", figures.bench(card)["gemm"]["tflops"])]
    title = "Forward, head dim 128, 8192 tokens, no mask"
    return bars(title, "TFLOP/s", rows, limits, f"bench/results/{card}.json")


CHARTS = {
    "ladder": ladder,
    "fp8": fp8,
    "errors": errors,
    "decode": decode,
    "peers": peers,
}


def draw(name):
    return CHARTS[name]()
