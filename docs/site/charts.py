"""Bar charts of measured figures, as SVG whose colours follow the page's."""

import html

import figures

WIDTH, BAR, GAP, LABEL = 360, 18, 10, 108


def bars(title, unit, rows, limit=None):
    """`rows` are (label, value, class of the bar); `limit` is (label, value), a line across."""
    most = max([value for _, value, _ in rows] + ([limit[1]] if limit else []))
    room = WIDTH - LABEL - 44
    top = 34 if limit else 12
    height = top + len(rows) * (BAR + GAP)
    parts = []
    for i, (label, value, kind) in enumerate(rows):
        y = top + i * (BAR + GAP)
        long = max(value / most * room, 1)
        parts.append(
            f'<text x="{LABEL - 6}" y="{y + 14}" text-anchor="end">{html.escape(label)}</text>'
            f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{long:.1f}" height="{BAR}"/>'
            f'<text x="{LABEL + long + 5:.1f}" y="{y + 14}">{figures.figure(value)}</text>'
        )
    if limit:
        x = LABEL + limit[1] / most * room
        parts.append(
            f'<path class="ink" stroke-dasharray="4 3" d="M{x:.1f} 22 V{height - GAP + 4}"/>'
            f'<text x="{x:.1f}" y="15" text-anchor="end">{html.escape(limit[0])}: '
            f"{figures.figure(limit[1])}</text>"
        )
    told = "; ".join(f"{label} {figures.figure(value)}" for label, value, _ in rows)
    if limit:
        told += f"; {limit[0]} {figures.figure(limit[1])}"
    return (
        f'<figure class="picture"><svg role="img" aria-label="{html.escape(title)}, in {unit}: '
        f'{html.escape(told)}" viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{html.escape(title)}, in {unit}</title>{''.join(parts)}</svg>"
        f"<figcaption>{html.escape(title)}, in {unit}.</figcaption></figure>"
    )


def ladder():
    results = figures.ladder()
    rows = []
    for one in results["steps"]:
        short, _, idea = one["name"].partition("_")
        speed = figures.step(short)["tflops"]
        rows.append((f"{short.upper()} {idea.split('_')[0]}", speed, "output"))
    limit = ("cuBLAS’s matrix product", figures.yardstick("gemm")["tflops"])
    setting = figures.step("k6")
    return bars(
        f"The steps of the ladder: bfloat16, head dim 128, {setting['seqlen']} tokens, "
        f"no mask, one {results['gpu']}",
        "TFLOP/s",
        rows,
        limit,
    )


def peers():
    card = "nvidia-h100"
    names = {"libfa3": "libfa3", "fa3": "FlashAttn.-3", "cudnn": "cuDNN", "fa2": "FlashAttn.-2"}
    one = figures.cell(card, "forward", 128, False, 8192)
    rows = [
        (label, one[name]["tflops"], "output" if name == "libfa3" else "query")
        for name, label in names.items()
    ]
    limit = ("cuBLAS’s matrix product", figures.bench(card)["gemm_after"]["tflops"])
    title = "Forward, head dim 128, 8192 tokens, no mask; the matrix product on the warm card"
    return bars(title, "TFLOP/s", rows, limit)


CHARTS = {"ladder": ladder, "peers": peers}


def draw(name):
    return CHARTS[name]()
