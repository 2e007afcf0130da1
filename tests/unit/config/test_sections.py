"""The sections of a run's configuration stand apart from the code that they steer."""

import subprocess
import sys

from fullspan.ops.backend import BACKENDS
from fullspan.ops.options import BACKEND_NAMES


def test_reading_a_configuration_imports_no_torch():
    program = (
        "import sys; import fullspan.train.config, fullspan.models.dsa.config;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_the_names_that_ops_takes_are_those_of_the_registry():
    """In its order, which is that of "auto"."""
    assert {op: tuple(backends) for op, backends in BACKENDS.items()} == BACKEND_NAMES
