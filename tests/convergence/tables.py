"""What came of the cells: a table in Markdown, and two charts in SVG files that stand alone."""
import os
import statistics

CLASSES = ["exact", "consistent", "best_effort"]
OPTIMIZERS = {"sgd": "SGD with momentum", "adam": "Adam"}
HUES = {"exact": "#3b6fd4", "consistent": "#0c9a74", "best_effort": "#a3478f"}
W, H, LEFT, TOP, GAP, BOTTOM = 860, 330, 62, 44, 70, 62


def groups(cells):
    """{(optimizer, class, loss): the cells of all its seeds}, in the order of the table."""
    found = {}
    order = lambda cell: (list(OPTIMIZERS).index(cell["optimizer"]), CLASSES.index(cell["class"]), cell["loss"], cell["seed"])
    for cell in sorted(cells, key=order):
        found.setdefault((cell["optimizer"], cell["class"], cell["loss"]), []).append(cell)
    return found


def small(value):
    return "0" if value == 0 else f"{value:.1e}"


def percent(value):
    return "0" if value == 0 else f"{100 * value:.2f} %"


def table(cells):
    lines = ["| optimizer | class | loss | accuracy, mean (smallest .. largest) | seeds | parameter distance, largest | gauge | "
             "asked for again | not counted | missing | INCOMPLETE | after resync |",
             "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for (optimizer, op_class, loss), same in groups(cells).items():
        accuracy = sorted(cell["accuracy"] for cell in same)
        furthest = max(same, key=lambda cell: cell["distance"])
        lines.append(
            f"| {optimizer} | {op_class} | {100 * loss:.0f} % | {statistics.mean(accuracy):.4f} ({accuracy[0]:.4f} .. {accuracy[-1]:.4f}) "
            f"| {len(same)} | {small(furthest['distance'])} | {small(furthest['drift'])} "
            f"| {percent(statistics.mean(cell['repaired'] for cell in same))} "
            f"| {percent(statistics.mean(cell['uncounted'] for cell in same))} "
            f"| {percent(statistics.mean(cell['missing'] for cell in same))} "
            f"| {sum(cell['incomplete'] for cell in same)} of {sum(cell['ops'] for cell in same)} "
            f"| {small(max(cell['resynced'] for cell in same))} |")
    return "\n".join(lines) + "\n"


class Chart:
    """Two panels side by side, one per optimizer, over the losses."""

    def __init__(self, title, low, high, text_of, ticks):
        self.low, self.high, self.text_of, self.ticks = low, high, text_of, ticks
        # Both themes, since a browser draws it on the page's own ground.
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {H}" font-family="system-ui, sans-serif" '
                      f'font-size="12"><style>svg {{ background: #fff }} text {{ fill: #5c6570 }} .head {{ fill: #16191d; '
                      'font-weight: 600 }} .grid {{ stroke: #e3e6ea }} @media (prefers-color-scheme: dark) { svg { background: '
                      '#191d23 } text { fill: #a2abb6 } .head { fill: #e9ecf0 } .grid { stroke: #2a3038 } }</style>'
                      .replace("{{", "{").replace("}}", "}"),
                      f'<text class="head" x="{LEFT}" y="20" font-size="14">{title}</text>']
        self.width = (W - LEFT - GAP - 20) / 2

    def x(self, panel, loss):
        return LEFT + panel * (self.width + GAP) + 16 + loss / 0.10 * (self.width - 32)

    def y(self, value):
        return TOP + 18 + (self.high - value) / (self.high - self.low) * (H - TOP - 18 - BOTTOM)

    def frame(self, panel, optimizer):
        left = LEFT + panel * (self.width + GAP)
        self.parts.append(f'<text class="head" x="{left}" y="{TOP}">{OPTIMIZERS[optimizer]}</text>')
        for tick in self.ticks:
            self.parts.append(f'<line class="grid" x1="{left}" x2="{left + self.width}" y1="{self.y(tick):.1f}" y2="{self.y(tick):.1f}"/>'
                              f'<text x="{left - 8}" y="{self.y(tick) + 4:.1f}" text-anchor="end">{self.text_of(tick)}</text>')
        for loss in (0, 0.01, 0.05, 0.10):
            self.parts.append(f'<text x="{self.x(panel, loss):.1f}" y="{H - BOTTOM + 18}" text-anchor="middle">{100 * loss:.0f} %</text>')

    def line(self, panel, index, op_class, points):
        """points: [(loss, middle, lowest, highest)]"""
        shift, hue = (index - 1) * 5, HUES[op_class]
        path = " ".join(f"{self.x(panel, loss) + shift:.1f},{self.y(middle):.1f}" for loss, middle, _, _ in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{hue}" stroke-width="2"/>')
        for loss, middle, low, high in points:
            x = self.x(panel, loss) + shift
            self.parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.y(low):.1f}" y2="{self.y(high):.1f}" stroke="{hue}" '
                              f'stroke-width="5" stroke-opacity=".3" stroke-linecap="round"/><circle cx="{x:.1f}" '
                              f'cy="{self.y(middle):.1f}" r="3.5" fill="{hue}"/>')

    def text(self, shown, note):
        x = LEFT
        for op_class in shown:
            self.parts.append(f'<circle cx="{x + 5}" cy="{H - 20}" r="5" fill="{HUES[op_class]}"/><text x="{x + 16}" y="{H - 16}">'
                              f'{op_class}</text>')
            x += 110
        return "".join(self.parts) + f'<text x="{x + 20}" y="{H - 16}">{note}</text></svg>\n'


def draw(cells, title, note, value_of, low, high, text_of, ticks):
    chart, all_groups = Chart(title, low, high, text_of, ticks), groups(cells)
    shown = [op_class for op_class in CLASSES if any(key[1] == op_class for key in all_groups)]
    for panel, optimizer in enumerate(OPTIMIZERS):
        chart.frame(panel, optimizer)
        for op_class in shown:
            points = []
            for (o, c, loss), same in all_groups.items():
                if (o, c) == (optimizer, op_class):
                    values = [value_of(cell) for cell in same]
                    points.append((loss, statistics.mean(values), min(values), max(values)))
            chart.line(panel, CLASSES.index(op_class), op_class, points)
    return chart.text(shown, note)


def write(cells, folder):
    """table.md, accuracy.svg and distance.svg."""
    if not cells:
        return
    all_accuracies = [cell["accuracy"] for cell in cells]
    low, high = int(min(all_accuracies) * 50) / 50, int(max(all_accuracies) * 50 + 1) / 50
    ticks = [low + 0.01 * i for i in range(int(round((high - low) * 100)) + 1)]
    step = max(1, -(-len(ticks) // 8))
    found = {"table.md": table(cells),
             "accuracy.svg": draw(cells, "Test accuracy over loss", "over the loss of datagrams; bars: the seeds", lambda cell: cell["accuracy"],
                                  low, high, lambda value: f"{100 * value:.0f} %", ticks[::step])}
    furthest = max(cell["distance"] for cell in cells)
    top = furthest * 1.1 or 0.01
    found["distance.svg"] = draw(cells, "Distance between the ranks' parameters, relative", "over the loss of datagrams; bars: the seeds",
                                 lambda cell: cell["distance"], 0, top, lambda value: f"{value:.1e}" if value else "0",
                                 [top * i / 4 for i in range(5)])
    for name, text in found.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
