import os
from datetime import date

import numpy as np
import pytest

from multigpu_cli.errors import RequestError
from multigpu_cli.trading.prices import read_prices
from tests.config.test_regular_files import within_seconds
from tests.trading.csv_files import HEAD, lines, write


def test_symbols_stand_in_the_order_of_their_names_or_as_asked_for(tmp_path):
    folder = write(tmp_path, B=lines(price=20), A=lines())
    (tmp_path / "._A.csv").write_bytes(b"macOS")
    found = read_prices(folder)
    assert found.symbols == ("A", "B")
    assert found.dates[0] == date(2020, 1, 6)
    np.testing.assert_allclose(found.close[:2], [[10, 20], [11, 21]])
    np.testing.assert_allclose(found.low[0], [9, 19])
    assert read_prices(folder, ["B", "A"]).symbols == ("B", "A")
    assert read_prices(folder, "B").symbols == ("B",)


def test_adjusted_prices_scale_the_whole_day_and_raw_ones_stay(tmp_path):
    folder = write(tmp_path, A=lines(dividends=0.5))
    adjusted, raw = read_prices(folder), read_prices(folder, adjusted=False)
    for name in ("open", "high", "low", "close"):
        np.testing.assert_allclose(getattr(adjusted, name), 0.5 * getattr(raw, name))
    assert "adjusted for dividends" in adjusted.remark
    assert "without dividends" in raw.remark


def test_one_file_without_an_adjusted_close_leaves_all_raw(tmp_path):
    write(tmp_path, A=lines(dividends=0.5))
    without = [row.rsplit(",", 2)[0] for row in lines()]
    folder = write(tmp_path, "date,open,high,low,close", B=without)
    np.testing.assert_allclose(read_prices(folder).close[0], [10, 10])


def test_dates_that_not_all_have_are_left_out_and_counted(tmp_path):
    rows = lines(6)
    found = read_prices(write(tmp_path, A=rows, B=rows[:2] + rows[3:]))
    assert len(found) == 5
    assert date(2020, 1, 8) not in found.dates
    assert "1 date left out, which not all symbols have" in found.remark


@pytest.mark.parametrize(
    ("head", "spoilt", "says"),
    [
        (HEAD.replace("Low", "Lowest"), {}, r"A.csv:1: has no column Low; it has date, open"),
        (HEAD, {1: "2020-01-06,1,1,1,1,1,1"}, r"A.csv:3: 2020-01-06 is repeated"),
        (HEAD, {2: "2020-01-01,1,1,1,1,1,1"}, r"A.csv:4: 2020-01-01 comes after 2020-01-07"),
        (HEAD, {2: "06.01.2020,1,1,1,1,1,1"}, r"A.csv:4: '06.01.2020' is not a date"),
        (HEAD, {1: "2020-01-07,1,1,1,0,1,1"}, r"A.csv:3: '0' is not a price above 0"),
        (HEAD, {1: "2020-01-07,1,1,1,-2,1,1"}, r"A.csv:3: '-2' is not a price"),
        (HEAD, {1: "2020-01-07,1,1_1,1,1,1,1"}, r"A.csv:3: '1_1' is not a price"),
        (HEAD, {1: "2020-01-07,1,\uff11,1,1,1,1"}, r"A.csv:3: '\uff11' is not a price"),
        (HEAD, {1: "2020-01-07,1,nan,1,1,1,1"}, r"A.csv:3: 'nan' is not a price"),
        (HEAD, {1: "2020-01-07,,1,1,1,1,1"}, r"A.csv:3: '' is not a price"),
        (HEAD, {1: "2020-01-07,1,1,2,1,1,1"}, r"A.csv:3: the low 2 is above the high 1"),
        (HEAD, {1: "2020-01-07,1,1"}, r"A.csv:3: 3 cells for 7 columns"),
    ],
)
def test_what_is_wrong_with_a_file_is_named_with_its_line(tmp_path, head, spoilt, says):
    rows = [spoilt.get(at, row) for at, row in enumerate(lines())]
    with pytest.raises(RequestError, match=says) as raised:
        read_prices(write(tmp_path, head, A=rows))
    assert raised.value.remedy


def test_all_faulty_files_are_named_at_once(tmp_path):
    write(tmp_path, A=["2020-01-06,1,1,1,0,1,1"], B=["2020-01-06,1,1,1,-1,1,1"], C=lines())
    with pytest.raises(RequestError) as raised:
        read_prices(str(tmp_path))
    assert "A.csv:2: '0'" in str(raised.value)
    assert "B.csv:2: '-1'" in str(raised.value)


def test_symbols_without_a_common_date_show_their_spans(tmp_path):
    folder = write(tmp_path, A=lines(), B=lines(first=date(2021, 1, 4)))
    with pytest.raises(RequestError, match=r"share 0 dates\n.*A.csv: 2020-01-06 to 2020-01-09\n.*B.csv: 2021-01-04"):
        read_prices(folder)


def test_a_folder_that_is_not_there_empty_or_lacks_a_symbol(tmp_path):
    with pytest.raises(RequestError, match="is not a folder"):
        read_prices(str(tmp_path / "none"))
    with pytest.raises(RequestError, match=r"contains no .csv file"):
        read_prices(str(tmp_path))
    folder = write(tmp_path, AAPL=lines())
    with pytest.raises(RequestError, match=r"contains no APPL.csv") as raised:
        read_prices(folder, ["APPL"])
    assert "'AAPL'" in raised.value.remedy
    with pytest.raises(RequestError, match="names a symbol twice"):
        read_prices(folder, ["AAPL", "AAPL"])
    (tmp_path / "AAPL.csv").write_text(HEAD + "\n")
    with pytest.raises(RequestError, match=r"AAPL.csv: contains no prices"):
        read_prices(folder)


def test_real_prices(real_data):
    found = read_prices(str(real_data("prices") / "stocknet"))
    assert found.symbols == ("AAPL", "AMZN", "JPM", "MSFT", "XOM")
    assert (len(found), str(found.dates[0]), str(found.dates[-1])) == (1258, "2012-09-04", "2017-09-01")
    np.testing.assert_allclose(found.close[0, 0], 87.121140)  # AAPL's adjusted close
    assert read_prices(str(real_data("prices")), ["STOCKS_GOOGL"]).close.shape == (2335, 1)
    with pytest.raises(RequestError, match=r"FOREX_EURUSD_1H_ASK.csv:1: has no column Date"):
        read_prices(str(real_data("prices")))


def test_a_fifo_in_place_of_prices_is_refused(tmp_path):
    folder = write(tmp_path, A=lines())
    os.mkfifo(tmp_path / "B.csv")
    with within_seconds(20), pytest.raises(RequestError, match=r"B\.csv is a FIFO"):
        read_prices(folder)
