"""End a run: close its parts, write its report, and record its end."""

import json
import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from trainer.checkpoint import finished
from trainer.checkpoint.finished import Finished
from trainer.checkpoint.layout import HUGGINGFACE, step_dir_name
from trainer.errors import EXIT_CRASH, EXIT_DIVERGED, EXIT_DONE
from trainer.model.adapter_names import ADAPTER_CONFIG
from trainer.runtime.distributed import await_main
from trainer.runtime.environment import call
from trainer.runtime.exit_codes import DOCUMENTED, explain
from trainer.runtime.json_lines import read_object
from trainer.runtime.log import labelled
from trainer.runtime.signals import StopRequest, lost_ranks, reported_exit_code
from trainer.tracking import Tracking
from trainer.train.run import Run
from trainer.train.start.setup import RunSetup

logger = logging.getLogger(__name__)
REPORT = "report.html"
REPORT_TIMEOUT_S = 600.0
AWAIT_MAIN_S = 20.0
"""The other ranks wait this long for the main rank after an error that all ranks raise."""


@dataclass
class RunResources:
    """The resources that a run must close, and its exit code. Only the main rank has `tracking`."""

    setup: RunSetup
    tracking: Tracking | None = None
    run: Run | None = None
    exit_code: int = EXIT_CRASH

    def give_back(self) -> None:
        """Close all parts. The lock comes last: an empty lock file means that everything has been
        written.

        A background save gets a moment to finish before the logs end. The report reads the
        complete logs. `finished.json` follows the report, so that the next start repeats an end
        that was killed.
        """
        is_main = self.setup.world.is_main
        lock = self.setup.start.lock
        try:
            if self.run is not None:
                self.run.checkpoints.close()
            if self.tracking is not None:
                self.tracking.finish(self.exit_code)
            if is_main and self.exit_code in (EXIT_DONE, EXIT_DIVERGED):
                write_final_report(self.setup.run_dir)
            if is_main and self.exit_code == EXIT_DONE and self.run is not None:
                _record_end(self.setup, self.run.batches.step)
                _log_end(self.setup, self.run)
        finally:
            if lock is not None:
                lock.release()


@contextmanager
def giving_back(held: RunResources, stop: StopRequest) -> Iterator[None]:
    """When the block ends, set the exit code and close all parts. The main rank leaves first."""
    timeout_s: float = held.setup.config.trainer.dist_timeout_s
    try:
        yield
    except Exception as error:
        is_documented = isinstance(error, tuple(DOCUMENTED))
        # A killed rank counts as a crash, although torchrun then stops the others with a signal.
        is_crash = not is_documented and bool(lost_ranks())
        code = EXIT_CRASH if is_crash else explain(error, stop)[0]
        held.exit_code = reported_exit_code() or code
        # The main rank may be waiting for this rank.
        timeout_s = AWAIT_MAIN_S if is_documented else 0.0
        raise
    finally:
        # After a failure the launcher stops all ranks. Its signals must not cut this short.
        with stop.deferred():
            held.give_back()
            await_main(held.setup.world, "ended", timeout_s=timeout_s)


def _log_end(setup: RunSetup, run: Run) -> None:
    """Log the run's steps and best loss, its best model's path, and the command to serve it."""
    step = run.batches.step
    text = f"{step:,} steps in {timedelta(seconds=round(run.meter.elapsed_s))}"
    if best := run.guard.validation_scores():
        best_step = int(best["val/best_step"])
        text += f"; best val/loss {best['val/best_loss']:.4f} at step {best_step:,}"
        name = step_dir_name(best_step)
        if (setup.run_dir / name).is_dir():
            step = best_step
        else:
            fix = "for the next run, set trainer.save_freq to the value of trainer.test_freq"
            if mirror := setup.config.trainer.checkpoint.mirror:
                fix = f"copy {name} from the mirror {mirror}, if it is there"
            last = f"so the model below is from step {step:,}"
            text += f"\n  {setup.run_dir} has no {name}, {last}. Fix: {fix}"
    logger.info(labelled("done", text))
    export = setup.run_dir / step_dir_name(step) / HUGGINGFACE
    if not any(export.glob("*.safetensors")):
        command = call(f"checkpoint export {export.parent}")
        logger.info(labelled("model", f"not exported; run {command} to export it"))
        return
    logger.info(labelled("model", str(export)))
    served = f"vllm serve {shlex.quote(str(export))}"
    if settings := read_object(export / ADAPTER_CONFIG):
        base = shlex.quote(str(setup.inputs.source.path))
        served = f"vllm serve {base} --enable-lora --lora-modules {shlex.quote(f'tuned={export}')}"
        if settings["modules_to_save"]:
            command = call(f"checkpoint export {export.parent} TARGET")
            served = f"vLLM can serve only the merged model; run {command} to create it"
    logger.info(labelled("serve", served))


def _record_end(setup: RunSetup, step: int) -> None:
    """Record in the last checkpoint that the run has ended, and with which inputs."""
    checkpoint = setup.run_dir / step_dir_name(step)
    end = Finished(
        ended_early=step < setup.total_steps,
        message=already_complete(setup, checkpoint, step),
        config=setup.config.resolved,
        data_files=setup.inputs.data_files,
    )
    finished.write(checkpoint, end)


def already_complete(setup: RunSetup, checkpoint: Path, step: int) -> str:
    """Return the message of a run that ended with the checkpoint of `step`."""
    what = f"has all {setup.total_steps} steps; nothing to do"
    if step < setup.total_steps:
        what = (
            f"ended the run early, at step {step}; nothing to do (a larger "
            f"trainer.early_stop_patience continues the run)"
        )
    return f"already complete: {checkpoint} {what}"


def write_final_report(run_dir: Path) -> None:
    """Write `report.html` in a separate process, and log the report's verdict.

    A failure is only logged, because the run is over and saved.
    """
    page = run_dir / REPORT
    command = [sys.executable, "-m", "trainer.cli", "report", str(run_dir)]
    command += ["--json", "--html", str(page)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=REPORT_TIMEOUT_S,
        )
        if done.returncode != EXIT_DONE:
            told = re.search(r"ERROR: .*|[^\n]+\Z", done.stderr.strip(), re.DOTALL)
            raise OSError(told[0] if told else f"exit {done.returncode}")
        report, _ = json.JSONDecoder().raw_decode(done.stdout)
        verdict = report["verdict"]
        headline = report["headline"]
        prefix = f"{verdict}: " if verdict in ("ATTENTION", "FAIL") else ""
        logger.info(labelled("report", f"{prefix}{headline} ({page})"))
    except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        logger.warning(
            "cannot write the report: %s; %s tries again", error, call(f"report {run_dir}")
        )
