"""The safeguards of checkpoint and resume, and how to remove each of them (see mutations.py)."""


class Mutation:
    """`old`, which occurs once in `file` below trainer/, becomes `new`. Then one of `tests` below
    tests/ (a file, or a test in it) must fail.
    """

    def __init__(self, name, file, old, new, *tests):
        self.name = name
        self.file = file
        self.old = old
        self.new = new
        self.tests = tests


FSIO = "checkpoint/fsio.py"
LAYOUT = "checkpoint/layout.py"
MANIFEST = "checkpoint/manifest.py"
SAVE = "checkpoint/save.py"
MANAGER = "checkpoint/manager.py"
START = "checkpoint/start.py"
CHOICE = "checkpoint/choice.py"
LOCK = "checkpoint/lock.py"
SHARDS = "checkpoint/shards.py"
RETENTION = "checkpoint/retention.py"
UPLOAD = "tools/mirror/upload.py"
RESTORE = "tools/mirror/restore.py"
MIRROR = "unit/test_mirror_faults.py"
CRASH = "faults/test_crash_states.py"
SYNCED = "unit/test_checkpoint_fsio.py"

SAFEGUARDS = (
    Mutation(
        "no fsync of a file",
        FSIO,
        '                _announce("fsync", self._path)\n                '
        "os.fsync(self._file.fileno())\n",
        "",
        SYNCED,
        CRASH,
    ),
    Mutation(
        "the fsync of a file is only announced",
        FSIO,
        "os.fsync(self._file.fileno())",
        "pass",
        SYNCED,
    ),
    Mutation(
        "the fsync of a directory is only announced",
        FSIO,
        "            os.fsync(descriptor)\n",
        "            pass\n",
        SYNCED,
    ),
    Mutation(
        "no directory fsync after mkdir",
        FSIO,
        "    os.mkdir(path)\n    fsync_dir(path.parent)\n",
        "    os.mkdir(path)\n",
        SYNCED,
        CRASH,
    ),
    Mutation(
        "no directory fsync after the commit's rename",
        LAYOUT,
        "    fsio.fsync_dir(final.parent)\n",
        "",
        SYNCED,
        CRASH,
    ),
    Mutation(
        "no directory fsync after the pointer's rename",
        FSIO,
        "        raise\n    fsync_dir(path.parent)\n",
        "        raise\n",
        SYNCED,
        CRASH,
    ),
    Mutation(
        "no directory fsyncs before the commit",
        FSIO,
        "        fsync_dir(Path(directory))\n",
        "        pass\n",
        SYNCED,
        CRASH,
    ),
    Mutation(
        "no directory fsync after the mark",
        LAYOUT,
        "    fsio.fsync_dir(step_dir)\n",
        "",
        CRASH,
        "unit/test_checkpoint_layout.py",
    ),
    Mutation(
        "what a living reader has is removed",
        LAYOUT,
        "            return try_lock(file.fileno()) is not True\n",
        "            return False\n",
        "unit/test_checkpoint_reading.py",
    ),
    Mutation("a file may be overwritten", FSIO, 'open(path, "xb")', 'open(path, "wb")', SYNCED),
    Mutation(
        "the size on disk is not compared after writing",
        FSIO,
        "if found_bytes != self._size_bytes:",
        "if False:",
        SYNCED,
    ),
    Mutation(
        "no fsyncs of directories in a save",
        SAVE,
        "        fsio.fsync_tree(staging)\n",
        "",
        CRASH,
    ),
    Mutation(
        "no acknowledgement: an error of a rank is not reported",
        SAVE,
        'error = f"{type(failure).__name__}: {failure}"',
        "pass",
        "distributed/test_save_faults.py",
    ),
    Mutation(
        "no acknowledgement: the main rank ignores what others report",
        SAVE,
        "enumerate(reports) if error is not None\n",
        "enumerate(reports) if False\n",
        "distributed/test_save_faults.py",
    ),
    Mutation(
        "a silent rank counts as done",
        SAVE,
        '                raise NoAnswerError(f"rank {rank} {NO_ANSWER}") from None\n',
        "                pass\n",
        "distributed/test_save_faults.py",
    ),
    Mutation(
        "a group that was given up is used again",
        SAVE,
        "        self._group = None\n",
        "",
        "distributed/test_save_faults.py",
    ),
    Mutation(
        "the lock is not checked before the commit",
        SAVE,
        "        self.require_lock()\n        layout.commit",
        "        layout.commit",
        "distributed/test_save_guards.py",
    ),
    Mutation(
        "a save that failed removes that of another run",
        SAVE,
        "                    fsio.remove_tree(self._staging)\n",
        "                    layout.clean_leftovers(self.run_dir)\n",
        "distributed/test_save_guards.py",
    ),
    Mutation(
        "a run that was taken over goes back",
        MANAGER,
        "            self.saver.require_lock()\n            return",
        "            return",
        "distributed/test_save_guards.py",
    ),
    Mutation(
        "files are not awaited before the manifest",
        SAVE,
        "        self._await_files(staging, records)\n        manifest",
        "        manifest",
        "distributed/test_save_guards.py",
    ),
    Mutation(
        "the deadline is not checked before the commit",
        SAVE,
        "time.monotonic() > self._deadline",
        "False",
        "distributed/test_save_guards.py",
    ),
    Mutation(
        "hashes are not compared",
        MANIFEST,
        "fsio.sha256_of(root / record.path) != record.sha256",
        "False",
        "unit/test_checkpoint_manifest.py",
    ),
    Mutation(
        "sizes are not compared",
        FSIO,
        "    if found.st_size == record.size_bytes:\n",
        "    if True:\n",
        "unit/test_checkpoint_layout.py",
    ),
    Mutation(
        "the manifest does not prove itself",
        MANIFEST,
        'tree.pop(OWN_DIGEST, None) != digest_of({"format": version, **tree})',
        "tree.pop(OWN_DIGEST, None) is None",
        "unit/test_checkpoint_manifest.py",
    ),
    Mutation(
        "contents are not proven on resume",
        START,
        "        if not problems:\n",
        "        if True:\n",
        "distributed/test_checkpoint.py",
    ),
    Mutation(
        "a changed run is continued",
        START,
        "    for change in compare(",
        "    for change in () and compare(",
        "distributed/test_checkpoint.py",
    ),
    Mutation(
        "a directory that is not shared is used",
        START,
        "if blind := [rank for rank, rank_sees in enumerate(seen) if not rank_sees]:",
        "if blind := []:",
        "distributed/test_start.py",
    ),
    Mutation(
        "rotation takes what the pointer names",
        RETENTION,
        "steps[-keep:] + until_pointer[-keep:]",
        "steps[-keep:]",
        "unit/test_checkpoint_layout.py",
    ),
    Mutation(
        "a damaged checkpoint means step 0",
        CHOICE,
        "        _require_new(run_dir, found, pointer)\n",
        "",
        "unit/test_checkpoint_layout.py",
    ),
    Mutation(
        "a newer unpublished checkpoint is passed over",
        CHOICE,
        "    if unpublished:\n",
        "    if False:\n",
        "unit/test_checkpoint_layout.py",
        CRASH,
    ),
    Mutation(
        "a poisoned state is saved",
        MANAGER,
        "if not self._is_finite(snapshot):",
        "if False:",
        "distributed/test_checkpoint.py",
    ),
    Mutation(
        "a save behind training writes what later steps change",
        MANAGER,
        "            snapshot = buffers.copy(snapshot)\n",
        "            pass\n",
        "distributed/test_async_save.py",
    ),
    Mutation(
        "a failed save ends nothing",
        MANAGER,
        "if self._num_failed_in_a_row > len(RETRY_AFTER_S) and not is_required:",
        "if False:",
        "faults/test_exits.py",
    ),
    Mutation(
        "pickles may run code",
        SHARDS,
        "weights_only=True,",
        "weights_only=False,",
        "unit/test_checkpoint_security.py",
    ),
    Mutation(
        "a fenced run still holds the lock",
        LOCK,
        'is_same_file and str(self._record["nonce"]).encode() in content',
        "True",
        "unit/test_checkpoint_lock.py",
    ),
    Mutation(
        "a mirror is not asked for the sizes before the manifest",
        UPLOAD,
        "                self._require_whole(place, [logs, *manifest.files])\n",
        "",
        MIRROR,
    ),
    Mutation(
        "a machine uploads to a mirror that another one took over",
        UPLOAD,
        "        if self._has_begun and process not in (None, self._process):\n",
        "        if False:\n",
        "unit/test_mirror.py",
    ),
    Mutation(
        "what another upload left stays in the mirror",
        UPLOAD,
        "                    if info.step in held.steps:",
        "                    if False:",
        MIRROR,
    ),
    Mutation(
        "a mirror loses what a rollback discarded before its target is there",
        UPLOAD,
        "        for step in due:\n",
        "        for n in held.whole:\n            self._storage.remove_tree(layout.step_dir_name(n))\n"
        "        for step in due:\n",
        MIRROR,
    ),
    Mutation(
        "a mirror whose pointer is another counts as up to date",
        UPLOAD,
        "pointer not in held.whole or held.pointer != pointer",
        "pointer not in held.whole",
        MIRROR,
    ),
    Mutation(
        "a mirror points to a step before another of its past is gone",
        UPLOAD,
        "                if self._begun != manifest:\n",
        "                self._point(info.step)\n                if self._begun != manifest:\n",
        MIRROR,
    ),
    Mutation(
        "a mirror stops at an old checkpoint that is damaged",
        UPLOAD,
        "                if step == pointer:\n                    raise\n",
        "                raise\n",
        "unit/test_mirror.py",
    ),
    Mutation(
        "a machine waits for no other's mirror",
        "launch/mirroring.py",
        "        if arrived_bytes != before:\n",
        "        if False:\n",
        "unit/test_mirror.py",
    ),
    Mutation(
        "a download from a mirror that ends early is not read again",
        RESTORE,
        "NUM_READS = 2",
        "NUM_READS = 1",
        MIRROR,
    ),
    Mutation(
        "what comes from a mirror is not compared",
        RESTORE,
        "            if _fetched(storage, place, path, staging) == record:\n",
        "            if _fetched(storage, place, path, staging):\n",
        MIRROR,
    ),
    Mutation(
        "logs from a mirror are unpacked whatever their size",
        RESTORE,
        "        if num_bytes > limit_bytes:",
        "        if False:",
        MIRROR,
    ),
)
