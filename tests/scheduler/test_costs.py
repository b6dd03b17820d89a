"""Cost tables: monotone, safe outside their grid, the same after a way through JSON."""

from __future__ import annotations

import dataclasses
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from neojax.scheduler.costs import CostTables, Table1, Table2
from neojax.scheduler.plan import Mode

costs = st.floats(0, 10)
grids = st.lists(st.integers(1, 5000), min_size=1, max_size=6, unique=True).map(sorted)


@st.composite
def tables1(draw: st.DrawFn) -> Table1:
    xs = draw(grids)
    return Table1(tuple(xs), tuple(draw(costs) for _ in xs))


@st.composite
def tables2(draw: st.DrawFn) -> Table2:
    xs, ys = draw(grids), draw(grids)
    return Table2(tuple(xs), tuple(ys), tuple(tuple(draw(costs) for _ in ys) for _ in xs))


@st.composite
def cost_tables(draw: st.DrawFn) -> CostTables:
    made: dict = {}
    for field in dataclasses.fields(CostTables):
        kind = field.type
        if kind == "Table1":
            made[field.name] = draw(tables1())
        elif kind == "Table2":
            made[field.name] = draw(tables2())
        elif field.name != "num_layers":
            made[field.name] = {mode: draw(tables1()) for mode in Mode}
    return CostTables(num_layers=draw(st.integers(1, 80)), **made)


work = st.floats(0, 20000)


@given(table=tables1(), a=work, b=work)
def test_more_work_is_never_cheaper(table: Table1, a: float, b: float):
    a, b = min(a, b), max(a, b)
    assert 0 <= table(a) <= table(b) * (1 + 1e-9) + 1e-9
    assert table(0) == 0


@given(table=tables2(), a=work, b=work, c=work)
def test_more_work_on_either_axis_is_never_cheaper(table: Table2, a: float, b: float, c: float):
    a, b = min(a, b), max(a, b)
    slack = 1e-9 * (1 + table(b, c) + table(c, b))
    assert 0 <= table(a, c) <= table(b, c) + slack
    assert 0 <= table(c, a) <= table(c, b) + slack
    assert table(0, c) == 0


def test_a_table_interpolates_and_goes_on_with_its_last_slope():
    table = Table1((10, 20, 40), (1.0, 2.0, 3.0))
    assert [table(x) for x in (1, 10, 15, 30, 60)] == [1.0, 1.0, 1.5, 2.5, 4.0]
    assert Table1((8,), (2.0,))(100) == 2.0
    plane = Table2((1, 3), (10, 30), ((1.0, 3.0), (2.0, 6.0)))
    assert plane(1, 10) == 1.0
    assert plane(2, 20) == 3.0
    assert plane(3, 50) == 10.0  # 6 + one more cell of 4
    assert plane(5, 30) == 9.0  # 6 + one more cell of 3
    assert plane(5, 50) == 13.0  # both, added up


@given(table=tables1(), x=st.floats(0.5, 5000))
def test_padding_costs_nothing_up_to_the_end_of_a_bucket(table: Table1, x: float):
    most = table.most_for(x)
    assert most >= x
    assert table(most) == pytest.approx(table(x))
    assert all(table(further) > table(x) for further in table.xs if further > most)


def test_noise_is_made_monotone():
    assert Table1((1, 2, 3), (1.0, 0.5, 2.0)).ys == (1.0, 1.0, 2.0)
    assert Table2((1, 2), (1, 2), ((1.0, 0.5), (0.2, 3.0))).values == ((1.0, 1.0), (1.0, 3.0))


@given(tables=cost_tables())
def test_json_round_trip(tables: CostTables):
    assert CostTables.from_json(tables.to_json()) == tables


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"num_layers": 1}', '{"num_layers": null'])
def test_damaged_text_is_a_value_error(text: str):
    with pytest.raises(ValueError):
        CostTables.from_json(text)


@pytest.mark.parametrize(
    ("xs", "ys"),
    [((), ()), ((0, 1), (1, 1)), ((2, 1), (1, 1)), ((1, 2), (1,)), ((1,), (-1,))]
    + [((1,), (bad,)) for bad in (math.nan, math.inf)],
)
def test_a_table_that_is_none_is_refused(xs: tuple, ys: tuple):
    with pytest.raises(ValueError, match="cost"):
        Table1(xs, ys)
    with pytest.raises(ValueError, match="cost"):
        Table2((1,), xs, (ys,))
