"""What compiled programs do with large arrays."""

from __future__ import annotations

import math
import re

import jax


def sizes_copied(program: jax.stages.Compiled) -> set[int]:
    """Elements of every array that the optimised program copies."""
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", program.as_text())
    return {math.prod(int(n) for n in shape.split(",")) for shape in shapes}
