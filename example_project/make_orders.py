"""Write orders.jsonl: realistic orders, some of them invalid.

The same seed gives the same file::

    python -m example_project.make_orders > example_project/orders.jsonl
"""

# ruff: noqa: RUF001 (names contain letters that look like others)

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple

from .catalogue import CATALOGUE

SEED = 20261120
COUNT = 300
BEGIN = datetime(2026, 11, 1, 6, 30, tzinfo=UTC)

#: Units of the currency for a euro, and the step of its prices.
CURRENCIES = {
    "CHF": (Decimal("0.95"), Decimal("0.05")),
    "DKK": (Decimal("7.46"), Decimal("0.50")),
    "EUR": (Decimal(1), Decimal("0.01")),
    "GBP": (Decimal("0.86"), Decimal("0.01")),
    "ILS": (Decimal("3.95"), Decimal("0.10")),
    "JPY": (Decimal(162), Decimal(1)),
    "PLN": (Decimal("4.28"), Decimal("0.01")),
    "SEK": (Decimal("11.35"), Decimal(1)),
    "USD": (Decimal("1.08"), Decimal("0.01")),
}


class Place(NamedTuple):
    country: str
    currency: str
    weight: int
    cities: tuple[str, ...]
    streets: tuple[str, ...]
    names: tuple[str, ...]


PLACES = (
    Place("DE", "EUR", 26, ("10115 Berlin", "50667 Köln", "01067 Dresden", "20095 Hamburg"),
          ("Lindenstraße", "Am Mühlbach", "Goethestraße"),
          ("Jürgen Groß", "Anneliese Weiß", "Björn Lüdtke", "Ayşe Yıldız", "Käthe Schröder")),
    Place("FR", "EUR", 16, ("75011 Paris", "69002 Lyon", "13001 Marseille"),
          ("rue de l'Église", "avenue Foch", "impasse du Chêne"),
          ("François Lefèvre", "Zoé L'Hôpital", "Anaïs d'Aubigné", "Hélène Nuñez")),
    Place("IT", "EUR", 12, ("00184 Roma", "20121 Milano", "34121 Trieste"),
          ("via Garibaldi", "piazza dell'Unità", "corso Libertà"),
          ("Niccolò D'Angelo", "Chiara Esposito", "Ornella Dalla Libertà")),
    Place("ES", "EUR", 10, ("28013 Madrid", "08002 Barcelona", "15001 A Coruña"),
          ("calle de Atocha", "carrer de l'Àngel", "rúa Nova"),
          ("Íñigo Peña", "María del Mar Ibáñez", "Begoña Núñez Ortiz")),
    Place("NL", "EUR", 8, ("1012 AB Amsterdam", "3511 BN Utrecht"), ("Prinsengracht", "'t Zand"),
          ("Daniël van 't Hof", "Femke de Groot", "Chloë IJsbrandij")),
    Place("PL", "PLN", 8, ("00-001 Warszawa", "31-042 Kraków", "90-001 Łódź"),
          ("ulica Żwirki i Wigury", "plac Świętego Ducha"),
          ("Łukasz Wiśniewski", "Małgorzata Źdźbło", "Zażółć Gęśla")),
    Place("SE", "SEK", 6, ("111 20 Stockholm", "211 22 Malmö"),
          ("Ångströmsvägen", "Drottninggatan"), ("Åsa Öberg", "Göran Sjöström")),
    Place("DK", "DKK", 5, ("1050 København K", "8000 Aarhus C"), ("Nørregade", "Ærøvej"),
          ("Søren Kjær", "Maja Ørsted")),
    Place("AT", "EUR", 5, ("1010 Wien", "8010 Graz"), ("Bäckerstraße", "Murgasse"),
          ("Ödön Horváth", "Theres Mößmer")),
    Place("GB", "GBP", 8, ("London EC1A 1BB", "Edinburgh EH1 1YZ"),
          ("St. Mary's Road", "Mews Lane"),
          ("Siobhán O'Hara", "Nigel Featherstonehaugh", "Priya Raghunathan")),
    Place("IE", "EUR", 3, ("Dublin D02 X285", "Galway H91 E2K3"), ("Sráid na Móna",),
          ("Pádraig Ó Súilleabháin", "Caoimhe Ní Bhriain")),
    Place("CH", "CHF", 5, ("8001 Zürich", "1204 Genève"), ("Bahnhofstrasse", "rue du Rhône"),
          ("Reto Müller", "Cécile Rochat")),
    Place("GR", "EUR", 3, ("105 57 Αθήνα", "546 22 Θεσσαλονίκη"), ("Ερμού", "Τσιμισκή"),
          ("Γιώργος Παπαδόπουλος", "Ελένη Νικολαΐδου")),
    Place("CZ", "EUR", 3, ("110 00 Praha", "602 00 Brno"), ("Příční", "Údolní"),
          ("Jiří Dvořák", "Žofie Šťastná")),
    Place("IL", "ILS", 3, ("9414107 ירושלים", "6688102 תל אביב-יפו"),
          ("רחוב יפו", "שדרות רוטשילד"), ("נועה כהן", "אבי בן־דוד")),
    Place("AE", "USD", 2, ("Dubai", "أبو ظبي"), ("شارع الشيخ زايد",),
          ("فاطمة الزهراء", "محمد بن راشد العلي")),
    Place("JP", "JPY", 4, ("100-0001 東京都千代田区", "530-0001 大阪市北区"), ("千代田", "梅田"),
          ("佐藤 花子", "髙橋 健")),
    Place("US", "USD", 7, ("Portland, OR 97201", "New York, NY 10013"), ("NW 23rd Ave", "Canal St"),
          ("Mary-Jo O'Neil", "DeShawn Null", "X Æ A. Smith")),
)  # fmt: skip
VAT_IDS = {
    "AT": "ATU{:08d}", "DE": "DE{:09d}", "DK": "DK{:08d}", "ES": "ESB{:08d}", "FR": "FR{:011d}",
    "IE": "IE{:07d}K", "IT": "IT{:011d}", "NL": "NL{:09d}B01", "PL": "PL{:010d}", "SE": "SE{:012d}",
}  # fmt: skip


def lines() -> Iterator[str]:
    """Yield the file's lines."""
    rng = random.Random(SEED)
    moment = BEGIN
    orders: list[dict[str, Any]] = []
    for index in range(COUNT):
        moment += timedelta(seconds=rng.randrange(120, 5400))
        orders.append(_order(rng, f"S-{20260001 + index}", moment))
    broken = _broken(orders)
    for index, order in enumerate(orders):
        yield broken.get(index) or _written(order)


def _order(rng: random.Random, number: str, moment: datetime) -> dict[str, Any]:
    place = rng.choices(PLACES, [place.weight for place in PLACES])[0]
    name = rng.choice(place.names)
    customer = {
        "name": name,
        "email": f"customer{rng.randrange(1000, 9999)}@mail.example",
        "address": f"{rng.choice(place.streets)} {rng.randrange(140)}, {rng.choice(place.cities)}",
        "country": place.country,
    }
    if place.country in VAT_IDS and rng.random() < 0.15:
        customer["vat_id"] = VAT_IDS[place.country].format(rng.randrange(10**6, 10**7))
    items = []
    for product in rng.sample(CATALOGUE, rng.choices((1, 2, 3, 4), (45, 30, 18, 7))[0]):
        items.append(
            {
                "sku": product.sku,
                "name": product.name,
                "quantity": rng.choices((1, 2, 3, 5, 10, 25), (60, 18, 9, 6, 5, 2))[0],
                "price": str(_price(product.price, place.currency)),
            }
        )
    order = {
        "number": number,
        "placed_at": moment.isoformat(),
        "customer": customer,
        "lines": items,
        "currency": place.currency,
    }
    return order | {"total": str(_total(order))}


def _price(euros: Decimal, currency: str) -> Decimal:
    rate, step = CURRENCIES[currency]
    return (euros * rate / step).quantize(Decimal(1), ROUND_HALF_UP) * step


def _total(order: dict[str, Any]) -> Decimal:
    return sum((Decimal(i["price"]) * i["quantity"] for i in order["lines"]), start=Decimal(0))


def _broken(orders: list[dict[str, Any]]) -> dict[int, str]:
    """Spoil some orders in place; return the lines that are not JSON any more."""
    # Refused by the contract, in the publisher.
    del orders[17]["customer"]["email"]
    del orders[41]["currency"]
    orders[66]["lines"] = [
        {"sku": "BK-0101", "name": "Return of S-20260012", "quantity": -3, "price": "12.90"}
    ]
    orders[66] |= {"currency": "EUR", "total": "-38.70"}
    orders[93]["total"] = f"{orders[93]['total'].replace('.', ',')}"
    orders[188]["total"] = str(Decimal(orders[188]["total"]) + 1)
    # The same order, sent twice by a browser.
    orders[120] = dict(orders[119])
    # Accepted, but one of the handlers fails.
    orders[58]["customer"] |= {"country": "HR", "address": "Ilica 12, 10000 Zagreb"}
    orders[101]["customer"] |= {"country": "DE", "vat_id": "DE 12 345"}
    orders[157]["customer"]["vat_id"] = "unknown"
    orders[203]["customer"]["name"] = "Marie Curie\n(deliver to the neighbour)"
    orders[230]["lines"][0]["quantity"] = 1_000_000
    orders[230]["total"] = str(_total(orders[230]))
    orders[266]["lines"] = [
        {"sku": "PN-9999", "name": "Discontinued pen", "quantity": 1, "price": "25.00"}
    ]
    orders[266]["total"] = "25.00"
    # Unusual, but valid.
    orders[250]["customer"]["name"] = "Дарья \u202eи \u202cСергей & Söhne <GmbH> '); DROP TABLE--"
    orders[281]["customer"]["name"] = "👩‍🚀 Zoë 𝒳 " + "long" * 40
    return {
        144: _written(orders[144])[:-40],
        222: "number;placed_at;customer;total",
    }


def _written(order: dict[str, Any]) -> str:
    return json.dumps(order, ensure_ascii=False)


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    for line in lines():
        print(line)
