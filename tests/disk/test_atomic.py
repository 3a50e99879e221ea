"""Files are written under a temporary name, and errors name the file that was asked for."""

from __future__ import annotations

import pytest

from keepleft.disk import atomic


def test_a_file_is_there_when_it_is_complete(tmp_path):
    with atomic.atomic_file(tmp_path / "out.txt") as temporary:
        temporary.write_text("a text")
        assert not (tmp_path / "out.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


def test_an_error_leaves_nothing_behind(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        atomic.write_text(tmp_path / "out.txt", "a text and a lone surrogate: \ud800")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_its_place_or_none_around_it(tmp_path):
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(IsADirectoryError, match="folder is a folder: name a file in it"),
        atomic.atomic_file(tmp_path / "folder"),
    ):
        pass
    with (
        pytest.raises(
            FileNotFoundError, match=r"out.txt cannot be written, as there is no folder .*such: create"
        ),
        atomic.atomic_file(tmp_path / "no" / "such" / "out.txt"),
    ):
        pass


def test_an_error_of_the_temporary_file_names_the_file(tmp_path):
    with pytest.raises(PermissionError) as caught, atomic.atomic_file(tmp_path / "out.txt") as temporary:
        raise PermissionError(13, "Permission denied", str(temporary))
    assert caught.value.filename == str(tmp_path / "out.txt")
