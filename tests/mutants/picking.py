"""Picks mutants of the product's source with the operators of cosmic-ray, which must be installed.
`python -m tests.mutants.picking --seed 1 --per-area 48 > mutants.jsonl`"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import cosmic_ray.mutating
import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.plugins import get_operator

from tests.mutants.areas import AREAS, Mutant

_BINARY: Final = (
    "Add_Sub",
    "Sub_Add",
    "Mul_Div",
    "Div_Mul",
    "FloorDiv_Mul",
    "Mod_FloorDiv",
    "BitOr_BitAnd",
    "BitAnd_BitOr",
    "LShift_RShift",
    "RShift_LShift",
)
_COMPARISON: Final = (
    "Eq_NotEq",
    "NotEq_Eq",
    "Lt_LtE",
    "LtE_Lt",
    "Gt_GtE",
    "GtE_Gt",
    "Lt_GtE",
    "GtE_Lt",
    "Is_IsNot",
    "IsNot_Is",
)
_OTHERS: Final = (
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_USub_UAdd",
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "NumberReplacer",
    "ZeroIterationForLoop",
)
OPERATORS: Final = (
    *(f"core/ReplaceBinaryOperator_{name}" for name in _BINARY),
    *(f"core/ReplaceComparisonOperator_{name}" for name in _COMPARISON),
    *(f"core/{name}" for name in _OTHERS),
)
_NUMBERS: Final = "core/NumberReplacer"
_NUMBERS_ONE_IN: Final = 4
"""Half of all possible mutants change numbers, many of them timeouts. This share of such mutants is
left out."""


def pick(root: Path, seed: int, per_area: int) -> list[Mutant]:
    """Picks this many mutants of each area, or all if there are fewer. The same seed and source
    give the same mutants."""
    found: list[Mutant] = []
    for area, covered in AREAS.items():
        places = [place for file in covered.files(root) for place in _places(root / file)]
        chosen = Random(f"{seed} {area}").sample(places, min(per_area, len(places)))
        for path, operator, occurrence in chosen:
            before = path.read_text()
            after = cosmic_ray.mutating.mutate_code(before, get_operator(operator)(), occurrence)
            found.append(Mutant.between(area, path.relative_to(root), operator, before, after))
    return found


def _places(path: Path) -> Iterator[tuple[Path, str, int]]:
    """The operators, each with the number of its occurrences in the file."""
    tree = parso.parse(path.read_text())
    nodes = list(ast_nodes(tree))
    for name in OPERATORS:
        operator = get_operator(name)()
        occurrence = 0
        for node in nodes:
            for _ in operator.mutation_positions(node):
                is_left_out = name == _NUMBERS and occurrence % _NUMBERS_ONE_IN
                if not is_left_out and not _is_in_annotation(node):
                    yield path, name, occurrence
                occurrence += 1


def _is_in_annotation(node: Any) -> bool:
    """Whether the node is part of an annotation. Annotations are not evaluated, so no test could
    catch such a mutant."""
    child, parent = node, node.parent
    while parent is not None:
        if parent.type == "tfpdef":  # The annotation of a parameter.
            return True
        if parent.type == "annassign" and child is parent.children[1]:
            return True
        if parent.type == "funcdef" and child is parent.annotation:
            return True
        child, parent = parent, parent.parent
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-area", type=int, default=48)
    arguments = parser.parse_args()
    mutants = pick(Path.cwd(), arguments.seed, arguments.per_area)
    for mutant in mutants:
        print(json.dumps(mutant.to_json()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
