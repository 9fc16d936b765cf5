"""What a run knows of its rollbacks: read as written, never guessed."""

import pytest

from trainer.checkpoint import rollback
from trainer.config import ConfigError


@pytest.mark.parametrize("text", ["{", "{}", '{"rollbacks": [{"onset": 1}]}', '{"rollbacks": [1]}'])
def test_a_file_that_cannot_be_read_ends_the_start(tmp_path, text):
    (tmp_path / rollback.FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"cannot read .*rollbacks\.json"):
        rollback.read(tmp_path)
