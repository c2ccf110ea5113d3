"""A rule for import-linter: a module whose name begins with an underscore belongs to its room alone."""

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output


class PrivateModules(Contract):
    """No room imports another room's underscore module."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        del verbose
        found = [
            f"{importer} imports {module}"
            for module in sorted(graph.modules)
            if any(part.startswith("_") and not part.startswith("__") for part in module.split("."))
            for importer in sorted(graph.find_modules_that_directly_import(module))
            if importer.split(".")[1:2] != module.split(".")[1:2]
        ]
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["found"]:
            output.print_error(line)
