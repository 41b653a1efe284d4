"""The book's recorded outputs are what the commands print."""

import re
import sys

import pytest
from book_paths import BOOK


def shown_outputs() -> set[str]:
    pages = (page.read_text() for page in (BOOK / "src").rglob("*.md"))
    return {name for page in pages for name in re.findall(r"^```output (\S+)$", page, re.M)}


def test_every_shown_output_has_a_command_and_none_is_left_over():
    import outputs

    assert shown_outputs() == set(outputs.COMMANDS)
    assert {file.stem for file in outputs.FOLDER.iterdir()} == set(outputs.COMMANDS)


@pytest.mark.compiler
@pytest.mark.parametrize("name", sorted(shown_outputs()))
def test_recorded_output_is_what_the_command_prints(name):
    import outputs

    if sys.platform != "linux" and not outputs.COMMANDS[name].anywhere:
        pytest.skip("the virtual GPU's driver needs Linux")
    assert outputs.difference(name) == []


def test_a_changed_line_is_noticed(monkeypatch):
    import outputs

    text = outputs.load("diagonal_formula").text
    monkeypatch.setattr(outputs, "run", lambda command: text.replace("autograd", "autodiff"))
    assert any("autodiff" in line for line in outputs.difference("diagonal_formula"))
    monkeypatch.setattr(outputs, "run", lambda command: text.replace("0.871769", "0.871768"))
    assert outputs.difference("diagonal_formula") != []


def test_numbers_times_and_hashes_may_differ_but_words_may_not():
    import outputs

    assert outputs.machine_free("dx: 2.98e-08 in 1.23 s (a1b2c3d4)") == outputs.machine_free(
        "dx:  3.01e-08 in 10.5 s (0123abcd)"
    )
    table = (
        "   dx  1.1e-06  1.6e-06   0.7x  3.7e-06  wide\n   CPU / GPU (fused): no GPU: ratio not measured\nend"
    )
    assert outputs.machine_free(table) == outputs.machine_free(
        "   dx  1.2e-06  1.1e-06   1.1x  2.7e-06  odd sizes\nend"
    )
    assert outputs.machine_free("graph compiled in 12.3 s") == outputs.machine_free("graph cached")
    assert outputs.machine_free("dx: 2.98e-08 ok") != outputs.machine_free("dx: 2.98e-08 wrong")


def test_unknown_output_is_refused(capsys):
    import outputs

    with pytest.raises(SystemExit) as exit:
        outputs.main(["nothing"])
    assert exit.value.code == 2
    assert "no such output: nothing" in capsys.readouterr().err


def test_progress_lines_are_not_recorded():
    import outputs

    script = "print('Compiling the Mojo kernels (once) ...'); print(); print('done ...'); print()"
    assert outputs.run(outputs.Command("x", ("-c", script))) == "done ...\n"


def test_wrong_exit_code_is_not_recorded():
    import outputs

    with pytest.raises(RuntimeError, match="exit code 3"):
        outputs.run(outputs.Command("x", ("-c", "raise SystemExit(3)")))


def test_numbers_that_the_fusion_page_quotes_stand_in_the_profile():
    """The page reads the table aloud; these are the numbers that it names."""
    import outputs

    rows = [line.split() for line in outputs.load("profile").text.splitlines()]
    read = {row[0]: int(row[3].replace(",", "")) for row in rows if len(row) == 11 and row[1] != "blocks"}
    forward = ("row_statistics", "layernorm", "transpose", "add_bias")
    first_matmul = next(row for row in rows if row[:1] == ["matmul"])
    first = {row[0]: int(row[3].replace(",", "")) for row in reversed(rows) if row[:1] and row[0] in forward}
    unfused = sum(first.values()) + int(first_matmul[3].replace(",", ""))
    page = (BOOK / "src" / "fusion.md").read_text()
    for number in (f"{read['minimal_fused_forward']:,}", f"{unfused:,}", "24,868", "1,176", "2,560", "15.6"):
        assert number in page
        assert number == f"{unfused:,}" or number in outputs.load("profile").text
