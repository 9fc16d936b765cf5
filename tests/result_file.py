"""Results of long commands as JSON files for the repository: floats have four digits."""

import json

DIGITS = 4


def write_result(path, result):
    path.write_text(json.dumps(_rounded(result), indent=1, ensure_ascii=False) + "\n", "utf-8")


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
