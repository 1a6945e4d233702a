"""ggml's tensor types: number, name, elements a block, bytes a block.

The numbers are those of GGUF files (``ggml/include/ggml.h:389``), the names and blocks those of ``ggml/src/ggml.c:631`` with the structures
of ``ggml/src/ggml-common.h:180``, at b11312. Types that ggml has removed (4, 5, 31–33, 36–38) are left out: a file with one doesn't load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Type:
    """How elements of a row are packed: ``block`` elements into ``bytes`` bytes."""

    number: int
    name: str
    block: int
    bytes: int

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of ``elements``, which is a multiple of the block (``ggml_row_size``, ggml.c:1341)."""
        return elements // self.block * self.bytes


TYPES: Final = (
    Type(0, "f32", 1, 4),
    Type(1, "f16", 1, 2),
    Type(2, "q4_0", 32, 18),
    Type(3, "q4_1", 32, 20),
    Type(6, "q5_0", 32, 22),
    Type(7, "q5_1", 32, 24),
    Type(8, "q8_0", 32, 34),
    Type(9, "q8_1", 32, 36),
    Type(10, "q2_K", 256, 84),
    Type(11, "q3_K", 256, 110),
    Type(12, "q4_K", 256, 144),
    Type(13, "q5_K", 256, 176),
    Type(14, "q6_K", 256, 210),
    Type(15, "q8_K", 256, 292),
    Type(16, "iq2_xxs", 256, 66),
    Type(17, "iq2_xs", 256, 74),
    Type(18, "iq3_xxs", 256, 98),
    Type(19, "iq1_s", 256, 50),
    Type(20, "iq4_nl", 32, 18),
    Type(21, "iq3_s", 256, 110),
    Type(22, "iq2_s", 256, 82),
    Type(23, "iq4_xs", 256, 136),
    Type(24, "i8", 1, 1),
    Type(25, "i16", 1, 2),
    Type(26, "i32", 1, 4),
    Type(27, "i64", 1, 8),
    Type(28, "f64", 1, 8),
    Type(29, "iq1_m", 256, 56),
    Type(30, "bf16", 1, 2),
    Type(34, "tq1_0", 256, 54),
    Type(35, "tq2_0", 256, 66),
    Type(39, "mxfp4", 32, 17),
    Type(40, "nvfp4", 64, 36),
    Type(41, "q1_0", 128, 18),
    Type(42, "q2_0", 64, 18),
)
BY_NUMBER: Final = {type_.number: type_ for type_ in TYPES}
BY_NAME: Final = {type_.name: type_ for type_ in TYPES}
