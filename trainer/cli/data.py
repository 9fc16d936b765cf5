"""Show the prepared samples: `bash run_sft.sh data preview|stats [options] [overrides ...]`.

The tokens come from the cache that runs with the same overrides use. Missing tokens are prepared
and added to the cache. No weights are read. The exit codes are the same as for a run: 0 done, 2
wrong usage or configuration, 65 bad data, 73 cannot write, 130 interrupted.
"""

import json

from trainer.cli.arguments import Parser, add_words, as_command, at_least, read_words
from trainer.errors import EXIT_DONE

ABOUT = """Show the training data.

preview: samples as the model sees them, with the supervised parts marked
stats: JSON with tokens, supervised share, lengths, rows left out, exact duplicates"""


@as_command()
def main(argv: list[str]) -> int:
    parser = Parser("data", description=ABOUT)
    parser.add_argument("command", choices=("preview", "stats"))
    add_words(parser)
    about = "preview: number of longest, least supervised and random samples each (default: %(default)s)"
    parser.add_argument(
        "--samples",
        metavar="N",
        type=at_least(0),
        default=3,
        help=about,
    )
    arguments = parser.parse_intermixed_args(argv)
    _, _, config = read_words(arguments.words)

    from trainer.data import show
    from trainer.train.start.inputs import prepare_data_alone

    data = prepare_data_alone(config)
    if arguments.command == "stats":
        # JSON escapes characters that drive a terminal
        print(json.dumps(show.stats(data.train, data.validation), indent=1))
    else:
        number = arguments.samples
        seed = config.trainer.seed
        for line in show.shown(data.train, data.tokenizer, num_each=number, seed=seed):
            print(line)
    return EXIT_DONE
