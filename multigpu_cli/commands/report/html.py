"""A report as one self-contained HTML page: plots inside, no scripts, readable on a phone and on paper."""

import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape

from multigpu_cli.commands.report import tables
from multigpu_cli.commands.report.data import RunData
from multigpu_cli.commands.report.plots import Picture
from multigpu_cli.commands.report.tables import ReportTable, pick_headline
from multigpu_cli.monitor.plot_style import color_of_run

_CSS = """
:root { color-scheme: light; --ink: #22303c; --soft: #5d6d7e; --line: #dfe4e8; --back: #f5f7f8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 20px; background: #fff; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 26px; line-height: 1.2; margin: 8px 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 34px 0 10px; padding-bottom: 4px; border-bottom: 2px solid var(--line); }
p { margin: 4px 0 14px; color: var(--soft); }
.runs { display: flex; flex-wrap: wrap; gap: 6px 18px; font-weight: 600; }
.runs i { display: inline-block; width: 22px; height: 10px; border-radius: 5px; margin-right: 7px; }
.cards { display: grid; grid-template-columns: repeat(3, 1fr); gap: 10px; margin: 16px 0; }
.cards div { background: var(--back); border-radius: 8px; padding: 10px 14px; }
.cards b { display: block; font-size: 21px; line-height: 1.3; overflow-wrap: anywhere; }
.cards span { color: var(--soft); font-size: 13px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: 8px; break-inside: avoid; }
figure img { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; margin-bottom: 14px; }
table { border-collapse: collapse; min-width: 55%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 5px 16px 5px 0; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; }
tbody th { font-weight: 400; color: var(--soft); white-space: nowrap; }
td { overflow-wrap: anywhere; min-width: 92px; }
td.long { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; min-width: 180px; }
h3 { font-size: 15px; margin: 18px 0 4px; }
@media (max-width: 480px) { body { padding: 12px; } h1 { font-size: 21px; }
  .cards { grid-template-columns: repeat(2, 1fr); } .cards b { font-size: 18px; } }
@media print {
  body { max-width: none; padding: 0; font-size: 11pt; } h2 { break-after: avoid; } tr { break-inside: avoid; }
  .pictures { grid-template-columns: 1fr 1fr; } .wide { overflow: visible; }
}
"""
_FINGERPRINT = 64


def render_page(runs: Sequence[RunData], pictures: Sequence[Picture], overview: ReportTable | None = None) -> str:
    """The whole page.

    Args:
        runs: those with curves.
        overview: a table of all runs, where there are more.
    """
    title = f"{len(overview.rows)} runs" if overview else ", ".join(run.name for run in runs)
    body = "\n".join(_render_body(runs, pictures, title, overview))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _render_body(
    runs: Sequence[RunData], pictures: Sequence[Picture], title: str, overview: ReportTable | None
) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    contents = " · ".join(dict.fromkeys(str(run.history.plan.get("contents", "")) for run in runs))
    yield f"<p>{escape(contents)}<br>report of {time.strftime('%Y-%m-%d %H:%M')}</p>"
    if overview:
        yield from _render_table(overview, "h2")
        yield f"<p>The rest of this page is about the first {len(runs)}.</p>"
    if len(runs) > 1:
        chips = (
            f'<span><i style="background:{color_of_run(at)}"></i>{escape(run.name)}</span>'
            for at, run in enumerate(runs)
        )
        yield f'<div class="runs">{"".join(chips)}</div>'
    else:
        cards = (
            f"<div><b>{escape(text)}</b><span>{escape(name)}</span></div>" for name, text in pick_headline(runs[0])
        )
        yield f'<div class="cards">{"".join(cards)}</div>'
    yield "<h2>Curves</h2>"
    yield '<div class="pictures">' + "\n".join(map(_render_picture, pictures)) + "</div>"
    if not any(run.history.train for run in runs):
        yield "<p>The journal has no line of training yet.</p>"
    yield from _render_table(tables.tabulate_outcome(runs), "h2")
    yield "<h2>Plan against reality</h2>"
    several = "h3" if len(runs) > 1 else ""
    for run in runs:
        yield from _render_table(tables.tabulate_plan(run), several)
    if not all(run.forecast for run in runs):
        yield "<p>plan --save-dir RUN, with the settings of the run, puts a forecast of its speed and memory here.</p>"
    yield "<h2>Faults and restarts</h2>"
    for run in runs:
        yield from _render_table(tables.tabulate_events(run), several)
    for title, tabulate in (("Samples", tables.tabulate_samples), ("Classes", tables.tabulate_classes)):
        found = [table for table in map(tabulate, runs) if table.rows]
        yield f"<h2>{title}</h2>" if found else ""
        for table in found:
            yield from _render_table(table, several)
    settings, rest = tables.tabulate_settings(runs)
    yield from _render_table(settings, "h2")
    yield f"<p>Defaults: {escape(rest)}</p>" if rest else ""
    yield from _render_table(tables.tabulate_environment(runs), "h2")


def _render_picture(picture: Picture) -> str:
    data = b64encode(picture.svg).decode()
    return f'<figure><img alt="{escape(picture.says)}" src="data:image/svg+xml;base64,{data}"></figure>'


def _render_table(table: ReportTable, heading: str) -> Iterator[str]:
    if heading:
        yield f"<{heading}>{escape(table.title)}</{heading}>"
    head = "".join(f"<th>{escape(name)}</th>" for name in ["", *table.columns])
    rows = "".join(
        f"<tr><th>{escape(name)}</th>" + "".join(map(_render_cell, cells)) + "</tr>" for name, cells in table.rows
    )
    named = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    yield f'<div class="wide"><table>{named}<tbody>{rows}</tbody></table></div>'


def _render_cell(text: str) -> str:
    return f"<td{' class=long' if len(text) == _FINGERPRINT and ' ' not in text else ''}>{escape(text)}</td>"
