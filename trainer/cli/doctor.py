"""What can be known before a run is started, as one list: `bash run_sft.sh doctor [N] [key=value ...]`.

Floor 5. Exit codes: 0 nothing fails (it may warn), 1 something fails, 2 wrong usage or configuration.
"""

import json
import sys
from dataclasses import asdict, replace

from trainer.cli.arguments import Parser, add_words, as_command, read_words
from trainer.doctor.recipe import examine, launch_of

EXIT_WELL, EXIT_FAILS = 0, 1


@as_command()
def main(argv: list[str]) -> int:
    parser = Parser(
        "doctor",
        usage="%(prog)s [N] [key=value ...] [--python PYTHON] [--json]",
        description="Everything that can be known before a run is started: each line ok, warn or fail, with the fix.",
    )
    add_words(parser)
    parser.add_argument("--json", action="store_true", help="the list as JSON, at the end")
    about = "an interpreter with vLLM, whose list of architectures is read (default: this one)"
    parser.add_argument("--python", metavar="PYTHON", default=sys.executable, help=about)
    options = parser.parse_intermixed_args(argv)
    asked, config = read_words(parser, options.words)
    said, waiting = [], []
    launch = replace(launch_of(config, asked.num_ranks), vllm_python=options.python)
    for name, found in examine(launch):
        if found is None:
            waiting.append(name)
            continue
        said.append({"check": name, **asdict(found)})
        if not options.json:
            fix = f"\n      fix: {found.fix}" if found.fix else ""
            print(f"{found.level:4}  {name}: {found.what}{fix}", flush=True)
    if options.json:
        print(json.dumps({"checks": said, "not_checked": waiting}, indent=1))
    elif waiting:
        print(f"not looked at before that is mended: {', '.join(waiting)}")
    return EXIT_FAILS if any(one["level"] == "fail" for one in said) else EXIT_WELL


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
