"""JSON Lines without end and without rows."""

from pipeline.data.formats import lines


def test_lines_without_end_and_without_rows_are_not_read_to_their_end(monkeypatch):
    monkeypatch.setattr(lines, "EMPTY", 100)
    rows = list(lines.rows_of(iter([b"{}\n", *[b"\n"] * 100, b"{}\n", *[b" \n"] * 5000])))
    assert [value for _, value, _ in rows[:2]] == [{}, {}] and len(rows) == 3
    assert rows[2][0] == 203 and "101 empty lines" in str(rows[2][1])
