"""The page of a comparison: one HTML file that needs no other."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from string import Template

from pace_lightning.compare.plots import PLOTS

Table = list[list[str]]
"""Rows of cells; the first is the head, empty cells if there is none."""

FRAME = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --line: #d0d7de; --head: #f3f5f7; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --line: #444c56; --head: #262c34; --bad: #ff8a7a; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid var(--line); padding: 0.3rem 0.6rem; }
th, td { text-align: left; vertical-align: top; }
th { background: var(--head); }
ul { font-size: 0.9rem; padding-left: 1.2rem; }
.missing { color: var(--bad); font-weight: 600; }
img { display: block; max-width: 100%; margin: 1rem 0; background: #fff; }
img { border: 1px solid var(--line); border-radius: 6px; }
</style>
</head>
<body>
$body
</body>
</html>
""")


def page(
    *,
    title: str,
    subtitle: str,
    tables: Sequence[tuple[str, Table]],
    notes: Sequence[str],
    pictures: Mapping[str, bytes],
    details: Sequence[tuple[str, Table]],
) -> str:
    """The whole page.

    Args:
        title: what is compared.
        subtitle: the line below it.
        tables: with their titles; shown first.
        notes: what stands under each of them.
        pictures: PNG, by the name of the plot; embedded.
        details: tables at the end, with their titles.
    """
    body = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(subtitle)}</p>"]
    for heading, table in tables:
        body += [f"<h2>{html.escape(heading)}</h2>", _table(table), _list(notes)]
    body += ["<h2>Plots</h2>"] if pictures else []
    for name, picture in pictures.items():
        alt = html.escape(PLOTS[name].title.replace("\n", " "))
        data = base64.b64encode(picture).decode()
        body.append(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
    for heading, table in details:
        body += [f"<h2>{html.escape(heading)}</h2>", _table(table)]
    return FRAME.substitute(title=html.escape(title), body="\n".join(body))


def _table(table: Table) -> str:
    head, *rows = ["".join(_cell(cell) for cell in row) for row in table]
    head = head.replace("td>", "th>") if any(table[0]) else ""
    lines = "".join(f"<tr>{row}</tr>" for row in (head, *rows) if row)
    return f'<div class="wide"><table>{lines}</table></div>'


def _cell(text: str) -> str:
    return f"<td>{html.escape(text)}</td>"


def _list(lines: Sequence[str]) -> str:
    items = [
        f"<li{' class=missing' if line.startswith('MISSING') else ''}>{html.escape(line)}</li>"
        for line in lines
    ]
    return f"<ul>{''.join(items)}</ul>" if items else ""
