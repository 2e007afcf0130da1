"""The one exception tree. A FullspanError is something a user caused and can mend: its message is
one line that says what was got, what is allowed, and which setting to change. Bugs of ours are
plain AssertionErrors and never caught.
"""


class FullspanError(Exception):
    """Base of all that a user can cause; the command line prints one line and exits with 2."""


class ConfigError(FullspanError, ValueError):
    """A setting, a command-line override or a model configuration that cannot be used."""


class LayoutError(FullspanError, ValueError):
    """A pack, its document bounds or its partition over ranks does not fit."""


class CheckpointError(FullspanError, ValueError):
    """A checkpoint, adapter or run folder that is missing, damaged or does not match the model."""


class BackendError(FullspanError, ValueError):
    """A named op backend that cannot run here."""


class DataError(FullspanError, ValueError):
    """Data that cannot be trained on. Of a training file the message names file, line and field."""


class LaunchError(FullspanError, RuntimeError):
    """Ranks could not be started or could not find each other."""


class TrainingError(FullspanError, RuntimeError):
    """Training cannot go on: a loss or a gradient norm that is not finite."""


class RankLostError(FullspanError, RuntimeError):
    """Another rank has ended or does not answer, and this one cannot go on without it."""
