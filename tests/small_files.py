"""Reads, writes and damages small files of tests."""

import json


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


def read_lines(path):
    """Return the values of the lines of JSON."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path, rows):
    """Write each row as a line of JSON, and text as it is."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def change_json(path, **changes):
    write_json(path, read_json(path) | changes)


def flip(path):
    """Change one bit in the middle of the same file."""
    with path.open("r+b") as file:
        data = bytearray(file.read())
        data[len(data) // 2] ^= 1
        file.seek(0)
        file.write(data)
