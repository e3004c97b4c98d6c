"""What a LIBERO task wants, read from its scene description (BDDL)."""

import re
from typing import NamedTuple

_CONDITION = re.compile(r"\(\s*([^()\s]+)\s+([^()]+?)\s*\)")
_DECLARATIONS = r"\(:(?:objects|fixtures)(.*?)\)"


class Goal(NamedTuple):
    """A pick-and-place goal: which object has to be where.

    Attributes:
        predicate: ``In`` or ``On``.
        object_name: an instance, ``alphabet_soup_1`` for instance.
        object_kind: what it is an instance of, ``alphabet_soup``.
        target_name: an instance, ``plate_1``, or a region, ``basket_1_contain_region``.
        target_kind: kind of the instance, or of the one that the region belongs to.
    """

    predicate: str
    object_name: str
    object_kind: str
    target_name: str
    target_kind: str


def parse_kinds(bddl: str) -> dict[str, str]:
    """Kind of every object and fixture that a scene declares.

    Args:
        bddl: text of the scene description.

    Example:
        >>> parse_kinds("(:objects bowl_1 bowl_2 - bowl plate_1 - plate)")
        {'bowl_1': 'bowl', 'bowl_2': 'bowl', 'plate_1': 'plate'}
    """
    kinds = {}
    for block in re.findall(_DECLARATIONS, bddl, re.DOTALL):
        # Instances of one kind share a line: "bowl_1 bowl_2 - bowl".
        for names, kind in re.findall(r"((?:\S+\s+)+?)-\s+(\S+)", block):
            kinds |= dict.fromkeys(names.split(), kind)
    return kinds


def parse_conditions(bddl: str) -> list[tuple[str, ...]]:
    """Conditions of a goal, all of which must hold.

    Args:
        bddl: text of the scene description.

    Raises:
        ValueError: for a text without a goal of this form.

    Example:
        >>> parse_conditions("(:goal (And (Open drawer_1) (On bowl_1 plate_1)))")
        [('Open', 'drawer_1'), ('On', 'bowl_1', 'plate_1')]
    """
    goal = re.search(r"\(:goal(.*)", bddl, re.DOTALL)
    conditions = _CONDITION.findall(goal.group(1)) if goal else []
    if not conditions:
        raise ValueError("the scene description has no (:goal (And (...)))")
    return [(predicate, *names.split()) for predicate, names in conditions]


def parse_goal(bddl: str) -> Goal:
    """The goal of a scene that asks for one object in one place.

    Args:
        bddl: text of the scene description.

    Raises:
        ValueError: when there are several conditions, or one of another form.

    Example:
        >>> scene = "(:objects soup_1 - soup basket_1 - basket)"
        >>> parse_goal(scene + "(:goal (And (In soup_1 basket_1_contain_region)))")[3:]
        ('basket_1_contain_region', 'basket')
    """
    conditions = parse_conditions(bddl)
    if len(conditions) != 1 or len(conditions[0]) != 3:
        wanted = " ".join(f"({' '.join(condition)})" for condition in conditions)
        raise ValueError(
            f"the goal is {wanted}; known are goals of one condition, "
            "(In OBJECT REGION) or (On OBJECT OBJECT)"
        )
    kinds = parse_kinds(bddl)
    predicate, object_name, target_name = conditions[0]
    # A region is named after the instance it belongs to.
    owners = [name for name in kinds if f"{target_name}_".startswith(f"{name}_")]
    if object_name not in kinds or not owners:
        raise ValueError(
            f"the goal names {object_name} and {target_name}; the scene has "
            f"{', '.join(kinds)}"
        )
    target_kind = kinds[max(owners, key=len)]
    return Goal(predicate, object_name, kinds[object_name], target_name, target_kind)
