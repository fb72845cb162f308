"""testing.siblings: modules next to tests, by their paths."""

from tunedgemm.testing.siblings import module_at


def test_a_file_and_a_package_are_imported_once(tmp_path):
    """Files of one name in two folders are two modules; a package finds its own modules."""
    (tmp_path / "other").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "one.py").write_text("VALUE = 1\n")
    (tmp_path / "other" / "one.py").write_text("VALUE = 2\n")
    (tmp_path / "package" / "part.py").write_text("VALUE = 3\n")
    (tmp_path / "package" / "__init__.py").write_text("from .part import VALUE\n")

    assert module_at(tmp_path / "one") is module_at(tmp_path / "one")
    assert [module_at(tmp_path / name).VALUE for name in ("one", "other/one", "package")] == [1, 2, 3]
