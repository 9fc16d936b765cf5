"""What processes leave behind, and what shows that they live."""

from pathlib import Path

from trainer.runtime.files import locked, try_lock


def test_whoever_waits_for_a_lock_shows_that_it_lives(tmp_path: Path) -> None:
    waits: list[int] = []

    def let_go() -> None:
        waits.append(1)
        if len(waits) == 2:
            holder.close()

    holder = (tmp_path / "lock").open("a")
    assert try_lock(holder.fileno())
    with locked(tmp_path / "lock", on_wait=let_go) as is_locked:
        assert is_locked
    assert waits == [1, 1]
