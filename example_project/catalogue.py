"""What the shop sells: article number, name, price in euros."""

from __future__ import annotations

from decimal import Decimal
from typing import NamedTuple


class Product(NamedTuple):
    sku: str
    name: str
    price: Decimal


def _product(sku: str, name: str, price: str) -> Product:
    return Product(sku, name, Decimal(price))


CATALOGUE = (
    _product("BK-0101", "Field notebook, dotted, A5", "12.90"),
    _product("BK-0102", "Sketchbook, 160 g/m², A4", "18.50"),
    _product("BK-0120", "Diary 2027, linen", "24.00"),
    _product("PN-0201", "Fountain pen, steel nib M", "49.00"),
    _product("PN-0202", "Fountain pen, gold nib F", "189.00"),
    _product("PN-0210", "Rollerball, brass", "34.50"),
    _product("IN-0301", "Ink, midnight blue, 50 ml", "9.80"),
    _product("IN-0302", "Ink, oak-gall black, 50 ml", "11.20"),
    _product("IN-0310", "Ink cartridges, 6 pieces", "3.40"),
    _product("PP-0401", "Letter paper, laid, 50 sheets", "16.70"),
    _product("PP-0402", "Envelopes C6, lined, 25 pieces", "8.90"),
    _product("PP-0410", "Blotting paper, 10 sheets", "4.20"),
    _product("DK-0501", "Desk mat, wool felt", "59.00"),
    _product("DK-0502", "Pen tray, walnut", "42.00"),
    _product("DK-0510", "Desk lamp, adjustable", "129.00"),
    _product("BG-0601", "Briefcase, vegetable-tanned leather", "349.00"),
    _product("BG-0602", "Pencil roll, canvas", "27.50"),
    _product("SL-0701", "Sealing wax, 4 sticks", "13.60"),
)
