"""The server that all ranks of tests are forked from: it has imported once what most of them
need.
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
