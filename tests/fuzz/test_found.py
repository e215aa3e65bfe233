"""What fuzzing has found, so that it stays found."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.traces import Rank, decode_rank, document, encode
from vllm_k25_instrument.analysis.capture import CaptureError
from vllm_k25_instrument.cli import app

CASES = Path(__file__).parents[1] / "data" / "cases"


def exit_of(path):
    result = CliRunner().invoke(app, ["analyze", str(path)])
    assert "internal error" not in result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code


def test_a_footer_that_is_cut_makes_a_table_incomplete(tmp_path):
    text = (CASES / "13-key-averages-double-count" / "profiler_out_0.txt").read_text()
    path = tmp_path / "table.txt"
    path.write_text(text.replace("Self CUDA time total: 10.000ms", "Self CUDA time total: 10"))
    assert exit_of(path) == 3


def test_a_world_size_beyond_all_bounds_costs_no_memory(tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(encode(document([decode_rank(2, rank=Rank(world_size=10**40))])))
    assert exit_of(path) == 0


@pytest.mark.parametrize("seed", [0xF4, 0xA9])
def test_an_error_of_sqlite_that_quotes_bytes_is_one_line(tmp_path, seed):
    data = bytearray((CASES / "22-nvtx-table-absent-or-suffixed" / "absent.sqlite").read_bytes())
    at = data.index(b"CREATE TABLE")
    data[at + 14 : at + 18] = bytes([seed]) * 4
    path = tmp_path / "export.sqlite"
    path.write_bytes(data)
    assert exit_of(path) in (2, 3)


def test_what_a_damaged_file_makes_a_message_say_stays_on_one_line_and_is_not_obeyed():
    error = CaptureError(Path("a\nb.sqlite"), 'unrecognized token: "\x0b\x1b[31m"', "export\r\nit")
    assert str(error) == 'a b.sqlite: unrecognized token: " \ufffd[31m": export it'
