"""The values of a normalization kernel (`devices/normalization_group.py`) as statements of CUDA C++."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlcompute.devices.cuda.codegen.functions import function
from mlcompute.devices.cuda.codegen.types import loaded, register_type
from mlcompute.devices.normalization_group import NormalizationGroup
from mlcompute.ops.op import Step, Value


class Group(NormalizationGroup):
    """The steps of a kernel, and the statements that compute their results."""

    def known_lines(self) -> list[str]:
        """Statements that compute the known values of result v from the known operands: `NAME_known[v]`."""
        lines = []
        for number, each in enumerate(self.steps):
            if each is self.core or not self.is_known(each.results[0]):
                continue
            lines.append(f"c{number}_known[v] = {self._expression(each, self.known_names('v'))};")
        return lines

    def known_arrays(self) -> list[str]:
        """Declarations of the known values: operands, then what is computed from them."""
        kinds = [(register_type(value.dtype), place.name) for value, place in self.known.items()]
        for number, each in enumerate(self.steps):
            if each is not self.core and self.is_known(each.results[0]):
                kinds.append((register_type(each.results[0].dtype), f"c{number}"))
        return [f"{kind} {name}_known[WIDTH];" for kind, name in kinds]

    def known_names(self, v: str) -> dict[Value, str]:
        """The registers of the known values of result v."""
        names = {value: f"{place.name}_known[{v}]" for value, place in self.known.items()}
        for number, each in enumerate(self.steps):
            if each is not self.core and self.is_known(each.results[0]):
                names[each.results[0]] = f"c{number}_known[{v}]"
        return names

    def lines(
        self, targets: Iterable[Value], loads: Mapping[Value, str], given: Mapping[Value, str], core: str = ""
    ) -> tuple[list[str], dict[Value, str]]:
        """Statements that compute values of column v, and the names of all registers.

        loads   elements in memory, by the values they belong to
        given   registers
        core    the core's result as an expression of `{0}` and `{1}`, the registers of `along`
        """
        names = {**self.known_names("ROWS ? 0 : v"), **given}
        lines = []
        steps = self.needed(targets, [*loads, *given])
        read = dict.fromkeys([*(value for each in steps for value in each.inputs), *targets])
        for number, value in enumerate(read):
            if value in loads and value not in names:
                lines.append(f"const {register_type(value.dtype)} x{number} = {loaded(value.dtype, loads[value])};")
                names[value] = f"x{number}"
        for each in steps:
            result = each.results[0]
            names[result] = f"y{self.steps.index(each)}"
            if each is self.core:
                expression = core.format(*(names[value] for value in self.along))
            else:
                expression = self._expression(each, names)
            lines.append(f"const {register_type(result.dtype)} {names[result]} = {expression};")
        return lines, names

    def _expression(self, step: Step, names: Mapping[Value, str]) -> str:
        types = [value.dtype for value in step.inputs]
        return function(step.op.name, [names[value] for value in step.inputs], types, step.results[0].dtype)
