"""Doctor: diagnosis of the installation for users and bug reports, with remedies.

Each section examines one part; an exception in a section becomes a fault of it.
"""

from __future__ import annotations

from collections.abc import Callable

from tunedgemm.analysis.doctor.finding import Diagnosis, Fact, Fault, Section, fault_of_error
from tunedgemm.errors import UserError
from tunedgemm.process.plugin_guard import attempt

__all__ = ["Diagnosis", "Fact", "Fault", "Section", "examined", "fault_of_error"]


def examined(name: str, examine: Callable[[], Section]) -> Section:
    """Return a section, or a section with the exception as its fault."""

    def guarded() -> Section:
        try:
            return examine()
        except UserError as error:
            return Section(name, faults=(fault_of_error(error),))

    section, raised = attempt(guarded)
    if raised:
        return Section(name, faults=(Fault(name, f"could not be examined (got {raised})", "report this with the whole output"),))
    return section  # type: ignore[no-any-return]
