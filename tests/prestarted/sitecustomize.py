"""Commands and supervisors that tests start get their workers from the server of `prestarted`, if one serves."""

import os
import sys

_WORDS = sys.orig_argv[1:]
_STARTS = ("engine.run.supervise", "ipykernel_launcher", "workbench")
if "WORKBENCH_TESTS_ROOM" in os.environ and "-m" in _WORDS and _WORDS[_WORDS.index("-m") + 1] in _STARTS:
    import prestarted

    prestarted.install()
