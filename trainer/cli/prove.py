"""Prove that an export reproduces its validation loss when served: `bash run_sft.sh prove
CHECKPOINT`.

Exit codes: 0 equal, 1 refused, 2 wrong usage or nothing to compare, 65 bad data, 73 cannot write,
130 interrupted.
"""

from trainer.cli.arguments import Parser, add_engine, as_command, named_path
from trainer.cli.listing import checkpoint_to_export
from trainer.errors import EXIT_CRASH, EXIT_DONE


@as_command()
def main(argv: list[str]) -> int:
    parser = Parser(
        "prove",
        description="Prove that an export reproduces the validation loss of its step when served: give\n"
        "the engine the tokens of the validation, and compare its loss with val/loss.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=named_path,
        help="a global_step_<step>, or a run directory, for its newest checkpoint",
    )
    add_engine(parser)
    arguments = parser.parse_args(argv)
    checkpoint, notes = checkpoint_to_export(arguments.checkpoint)

    from trainer.tools.evaluate.prove import prove_serving

    for note in notes:
        print(note)
    found, path = prove_serving(checkpoint, engine=arguments.engine, python=arguments.python)
    tokens = f"{found.num_loss_tokens:,} supervised tokens of {found.num_samples:,} samples"
    print(f"step {found.step}: val/loss {found.val_loss:.6f} over {tokens}")
    difference = found.served_loss - found.val_loss
    print(
        f"{found.engine}: {found.served_loss:.6f}, difference {difference:+.1e}, tolerance "
        f"{found.tolerance:.1e} (from {found.dtype} and a wider dtype on these samples)"
    )
    if found.base_loss is not None:
        print(f"base model without the adapter: {found.base_loss:.6f}")
    for cause in found.causes:
        print(f"  {cause}")
    if found.first_difference:
        print(f"first sample that differs: {found.first_difference}")
    print(
        f"verdict: {'served loss equals trained loss' if found.is_equal else 'REFUSED'}; "
        f"certificate: {path}"
    )
    return EXIT_DONE if found.is_equal else EXIT_CRASH
