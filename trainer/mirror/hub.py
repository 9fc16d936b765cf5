"""A repository of the Hub as a mirror: a checkpoint is one commit; exports alone are a model to
load (floor 3).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fsspec import AbstractFileSystem

from trainer.checkpoint import rollback
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.manifest import Manifest
from trainer.config import TrainerConfig
from trainer.mirror.contents import HF_MODEL, MirrorState, in_model, look_at_model, mirrored
from trainer.mirror.storage import Storage, StorageError, is_repository
from trainer.mirror.upload import Uploaded, Uploader

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

SMALL_BYTES = 2**24
"""The Hub sends smaller files with the commit itself. One that is tried again must not need
them on the disk.
"""


class HubStorage(Storage):
    """What a block of `as_one` writes and removes is one commit. Its files are sent before; after a
    failure they are there, and the block is tried again with the same title.
    """

    def __init__(self, url: str, file_system: AbstractFileSystem | None = None) -> None:
        super().__init__(url, file_system)
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # this works beside training
        self._api = HfApi(endpoint=self._fs.endpoint, token=self._fs.token)
        self._title, self._is_open = "", False
        self._added: dict[str, CommitOperationAdd] = {}
        self._removed: set[str] = set()

    @contextmanager
    def as_one(self, title: str) -> Iterator[None]:
        from huggingface_hub import CommitOperationDelete

        if title != self._title:
            self._title, self._added, self._removed = title, {}, set()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
        gone = sorted(self._removed - self._added.keys())
        if gone or self._added:
            with self._told("commit", title):
                there = self._fs.resolve_path(self._root)
                places = [self._fs.resolve_path(self._path(name)).path_in_repo for name in gone]
                self._api.create_commit(
                    there.repo_id,
                    [*map(CommitOperationDelete, places), *self._added.values()],
                    commit_message=title,
                    repo_type=there.repo_type,
                    revision=there.revision,
                )
        self._title = ""

    def sizes(self) -> dict[str, int]:
        """Within `as_one`, what its commit will leave."""
        found = super().sizes()
        if not self._is_open:
            return found
        added = {name: addition.upload_info.size for name, addition in self._added.items()}
        return {name: size for name, size in found.items() if name not in self._removed} | added

    def write(self, name: str, data: bytes) -> None:
        self._add(name, data) if self._is_open else super().write(name, data)

    def put(self, local: Path, name: str) -> None:
        self._add(name, local) if self._is_open else super().put(local, name)

    def remove(self, name: str, *, is_tree: bool = False) -> None:
        if not self._is_open:
            return super().remove(name, is_tree=is_tree)
        self._removed |= {
            found for found in super().sizes() if found == name or found.startswith(f"{name}/")
        }

    def _add(self, name: str, content: Path | bytes) -> None:
        from huggingface_hub import CommitOperationAdd

        with self._told("write", name):
            there = self._fs.resolve_path(self._path(name))
            if isinstance(content, Path) and content.stat().st_size <= SMALL_BYTES:
                content = content.read_bytes()
            addition = CommitOperationAdd(there.path_in_repo, content)
            where = {"repo_type": there.repo_type, "revision": there.revision}
            self._api.preupload_lfs_files(there.repo_id, [addition], **where)
            self._added[name] = addition


class ModelUploader(Uploader):
    """Of exports alone: one lies at the URL, those before it in the history of the repository."""

    def _bring_up(self, pointer: int, local: list[CheckpointInfo]) -> None:
        """The best one of the evaluation `trainer.best_metric` lies there in the end; where it
        scored none, the newest, and before it what else is best.
        """
        (aim,) = rollback.best_scored(self._run_dir, self._trainer.best_metric, local) or {pointer}
        held, worth = self._look(), self._worth_keeping(local)
        for info in local:
            is_between = info.step in worth and (held.pointer or -1) < info.step < aim
            if (is_between or info.step == aim) and not _is_same(
                held.whole.get(info.step), info.manifest
            ):
                self._upload(info, held)
        if aim not in self._look().whole:
            raise StorageError(
                f"{self._storage.url} does not show step {aim} yet, although it was written"
            )
        self._note(pointer, [aim])

    def _look(self) -> MirrorState:
        model = look_at_model(self._storage, self._storage.sizes())
        return MirrorState(
            model.step if model else None, {model.step: model} if model else {}, {}, set()
        )

    def _name(self, step: int, path: str) -> str:
        return in_model(path)

    def _clear(self, manifest: Manifest, held: MirrorState) -> None:
        """An export of other files leaves none of them behind."""
        own = {record.path for record in manifest.files}
        for record in (
            record for other in self._look().whole.values() for record in mirrored(other, HF_MODEL)
        ):
            if record.path not in own:
                self._storage.remove(in_model(record.path))


def _is_same(held: Manifest | None, own: Manifest | None) -> bool:
    """Whether these are of one save."""
    return held is not None and own is not None and held.nonce == own.nonce


def storage_of(url: str, file_system: AbstractFileSystem | None = None) -> Storage:
    """Raises `ConfigError`."""
    return (HubStorage if is_repository(url) else Storage)(url, file_system)


def uploader_of(
    trainer: TrainerConfig, storage: Storage, *, tell: Uploaded | None = None
) -> Uploader:
    is_model = is_repository(storage.url) and trainer.checkpoint.mirror_contents == HF_MODEL
    return (ModelUploader if is_model else Uploader)(trainer, storage, tell=tell)
