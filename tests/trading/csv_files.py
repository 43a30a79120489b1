"""Small folders of prices for the tests."""

from datetime import date, timedelta

HEAD = "Date,Open,High,Low,Close,Adj Close,Volume"


def lines(count=4, first=date(2020, 1, 6), price=10.0, dividends=1.0):
    """Lines of a file: the price rises by one a day, the adjusted close is a share of the close."""
    rows = []
    for at in range(count):
        now = price + at
        day = first + timedelta(days=at)
        rows.append(f"{day},{now - 0.5:.4f},{now + 1:.4f},{now - 1:.4f},{now:.4f},{now * dividends:.4f},1000")
    return rows


def write(folder, head=HEAD, **symbols):
    """One file a symbol from its lines."""
    folder.mkdir(exist_ok=True)
    for name, rows in symbols.items():
        (folder / f"{name}.csv").write_text("\n".join([head, *rows]) + "\n")
    return str(folder)
