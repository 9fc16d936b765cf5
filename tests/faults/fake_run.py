"""A trainer reduced to its checkpoint calls, as it makes them: without torch, with tiny files."""

from dataclasses import dataclass

from checkpoint_fakes import commit
from test_checkpoint_rotation import Run

from trainer.checkpoint import choice, layout, retention
from trainer.checkpoint.manifest import verify_files
from trainer.checkpoint.retention import Retention


@dataclass
class FakeRun(Run):
    """`save` follows `trainer.checkpoint.save`; `restart` follows `trainer.checkpoint.start`
    and the load after it.
    """

    @property
    def kept(self) -> Retention:
        return Retention(keep=self.keep)

    def save(self) -> None:
        self.step += 1
        layout.clean_leftovers(self.run_dir)
        commit(self.run_dir, self.step)
        self.acknowledged.append(self.step)
        retention.settle(self.run_dir, self.step, self.kept)

    def restart(self) -> int | None:
        """The step continued from; None = nothing usable."""
        layout.clean_leftovers(self.run_dir)
        try:
            candidates = choice.select(self.run_dir).candidates
        except choice.NoUsableCheckpointError:
            return None
        for info in candidates:
            assert info.manifest is not None
            if problems := verify_files(info.path, info.manifest):
                layout.quarantine(info.path, problems[0])
                continue
            retention.settle(self.run_dir, info.step, self.kept, protect={info.step})
            self.step = info.step
            return info.step
        return None
