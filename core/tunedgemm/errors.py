"""The exception tree; its messages are printable text.

::

    TunedGemmError
    |-- UserError              the user can fix it; the CLI prints it without a traceback
    |   |-- DtypeError         a dtype text outside the closed list          (also ValueError)
    |   |-- ShapeError         a shape no op describes                       (also ValueError)
    |   |-- OperandError       tensors that do not form the op asked for     (also ValueError)
    |   |-- UnknownOpError     an op that is not registered                  (also LookupError)
    |   |-- LibtypeError       a libtype that is unknown or not usable here  (also LookupError)
    |   `-- TableError         a table, untuned or trial file that cannot be used
    |-- PluginError            a plugin broke the contract: names the plugin and the hook
    `-- LaunchError            a solution could not run
        `-- OutOfResources     it needs more shared memory or registers than the device has
"""

from tunedgemm.text.printable import printable


class TunedGemmError(Exception):
    """Base class of every error that tunedgemm raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(TunedGemmError):
    """A mistake that the user can fix; the message has the remedy."""


class DtypeError(UserError, ValueError):
    """A dtype text is not in the closed list of dtypes."""


class ShapeError(UserError, ValueError):
    """A shape has a size or a field that its op does not allow."""


class OperandError(UserError, ValueError):
    """Tensors disagree in shape, dtype or device, or are not what the op takes."""


class UnknownOpError(UserError, LookupError):
    """No op of that name is registered."""


class LibtypeError(UserError, LookupError):
    """A libtype asked for by name is unknown or cannot be used here."""


class TableError(UserError):
    """A file cannot be read or written as a table of its op."""


class PluginError(TunedGemmError):
    """A plugin broke the contract."""


class LaunchError(TunedGemmError):
    """A solution could not be launched."""


class OutOfResources(LaunchError):
    """A solution needs more shared memory, registers or threads than the device has."""
