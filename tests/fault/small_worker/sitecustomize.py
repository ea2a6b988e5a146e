"""On the import path of a test's processes: `engine.worker` is the small worker beside this file, without torch.

`SMALL_BALLAST` is the room that a run holds, for disks of a few hundred KiB.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


class SmallWorker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "engine.worker":
            return importlib.util.spec_from_file_location(name, Path(__file__).with_name("small_worker.py"))
        return None


sys.meta_path.insert(0, SmallWorker())

if "SMALL_BALLAST" in os.environ:
    from engine.run import store

    store.BALLAST_BYTES = int(os.environ["SMALL_BALLAST"])
