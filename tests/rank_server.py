"""The server from which all ranks of tests are forked. It has imported most of the modules that
they need.
"""

import multiprocessing
import os
from pathlib import Path

# the server imports before it is told the parent's sys.path
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["rank_imports"])
