"""Machine code in which a product's registers are overwritten, or not."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

hazards = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "wgmma_hazards.py"))["hazards"]

LOOP = """
        /*0900*/                   LDS.64 R40, [R8] ;                                  /* 0x1 */
                                                                                       /* 0x2 */
        /*0910*/                   LOP3.LUT R{unpacked}, R40, 0x80008000, R41, 0xea, !PT ; /* 0x3 */
        /*0920*/                   WARPGROUP.ARRIVE ;                                  /* 0x4 */
        /*0930*/                   HGMMA.64x128x16.F32.BF16 R24, R{left}, gdesc[UR8], R24, gsb0 ; /* 0x5 */
        /*0940*/                   WARPGROUP.DEPBAR.LE gsb0, {waits} ;                 /* 0x6 */
        /*0950*/                   STS.128 [R12], R48 ;                                /* 0x7 */
        /*0960*/              @!P0 BRA 0x900 ;                                         /* 0x8 */
        /*0970*/                   IMAD.MOV.U32 R48, RZ, RZ, R17 ;                     /* 0x9 */
"""


@pytest.mark.parametrize(
    ("unpacked", "left", "waits", "found"),
    [
        (49, "48", "0x1", [(0x910, 0x930)]),  # the next step's unpacking, while one product is under way
        (51, "48", "0x1", [(0x910, 0x930)]),
        (52, "48", "0x1", []),
        (49, "48", "0x0", []),
        (41, "40", "0x1", [(0x900, 0x930), (0x910, 0x930)]),  # a load of two registers, too
        (49, "Z", "0x1", []),
    ],
)
def test_a_register_is_written_while_it_is_read(
    unpacked: int, left: str, waits: str, found: list[tuple[int, int]]
) -> None:
    assert hazards(LOOP.format(unpacked=unpacked, left=left, waits=waits)) == found


def test_code_without_such_loops() -> None:
    straight = "\n".join(line for line in LOOP.splitlines() if "BRA" not in line)
    assert hazards(straight.format(unpacked=49, left="48", waits="0x1")) == []
