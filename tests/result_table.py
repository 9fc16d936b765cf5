"""Tables of docs/models.md whose rows are measured by a long command and kept as JSON."""

import argparse
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from repository import REPOSITORY
from result_file import write_result
from small_files import read_json

PAGE = REPOSITORY / "docs" / "models.md"
PACKAGES = ("torch", "transformers", "peft")
Entry = dict[str, Any]


@dataclass(frozen=True)
class ResultTable:
    """A table, and the command that measures it.

    `results` is the name of the JSON file, `key` the name of the entries in it. `measure` returns
    the entries of some names, `faults` what is wrong with an entry, `lines` the lines of the table.
    """

    command: str
    results: str
    key: str
    names: Sequence[str]
    measure: Callable[[list[str]], list[Entry]]
    faults: Callable[[Entry], list[str]]
    lines: Callable[[dict[str, Any]], list[str]]
    together: int = 1
    """Names that are measured together."""

    @property
    def file(self):
        return REPOSITORY / "benchmarks" / "results" / self.results

    def read(self):
        if not self.file.exists():
            return {self.key: {}}
        return read_json(self.file)

    def page(self, results, old):
        """Return docs/models.md with the table of these results between its markers."""
        begin, end = (f"<!-- {edge} of {self.command} -->" for edge in ("begin", "end"))
        before, _, rest = old.partition(begin)
        table = "\n".join(self.lines(results))
        return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"

    def main(self, argv):
        """Measure the names of the arguments, or those without an entry; return 1 for a fault."""
        parser = argparse.ArgumentParser(prog=f"python {self.command}", allow_abbrev=False)
        parser.add_argument("names", nargs="*", choices=[[], *self.names], metavar="NAME")
        results = self.read()
        missing = [name for name in self.names if name not in results[self.key]]
        names = parser.parse_args(argv).names or missing
        for begin in range(0, len(names), self.together):
            group = list(names[begin : begin + self.together])
            results[self.key] |= dict(zip(group, self.measure(group), strict=True))
            results |= {
                "command": f"python {self.command}",
                "versions": {"python": platform.python_version()}
                | {package: version(package) for package in PACKAGES},
            }
            found = results[self.key]
            results[self.key] = {name: found[name] for name in self.names if name in found}
            write_result(self.file, results)
            for name in group:
                faults = self.faults(results[self.key][name])
                print(f"{name}: {', '.join(faults) or 'as promised'}", flush=True)
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(self.page(results, page), encoding="utf-8")
        return int(any(map(self.faults, results[self.key].values())))
