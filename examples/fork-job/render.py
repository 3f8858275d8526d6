#!/usr/bin/env python3
"""Renders the Mandelbrot set as text in copies of this machine: render.py CHILDREN [WIDTH]. With 0 children, this machine does all of it."""

import sys

import vmove_fork

SHADES = " .:-=+*#%@"
STEPS = 60


def line(row: int, width: int, height: int) -> str:
    text = ""
    for column in range(width):
        point = complex(3 * column / width - 2.2, 2.4 * row / height - 1.2)
        value, steps = point, 0
        while abs(value) < 2 and steps < STEPS:
            value, steps = value * value + point, steps + 1
        text += SHADES[steps * (len(SHADES) - 1) // STEPS]
    return text


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit("Usage: render.py CHILDREN [WIDTH]")
    children, width = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 72
    height = width // 3
    rows = range(height)
    if children > 0:
        lines = vmove_fork.map(lambda row: line(row, width, height), rows, children=children)
    else:
        lines = [line(row, width, height) for row in rows]
    print("\n".join(lines))


main()
