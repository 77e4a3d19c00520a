"""A user's own files: which names mean one, which files are modes, what is refused, and that a copy is as recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testbed.rank.request import read_request
from testbed.results.folder import RunFolder
from testbed.spec.datasets import dataset_info
from testbed.spec.errors import SpecError, UsageError
from testbed.spec.mode import ALGORITHMS, SyncMode, algorithms, check_method, legal_modes, unusable_methods
from testbed.spec.own_files import METHODS_VARIABLE, digest_of, file_name, method_path, own_code, own_methods, own_text
from testbed.spec.run import RunSpec

MODEL = "def make(classes, channels):\n    pass\n"
METHOD = "def mean_(buffer, group): pass\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "book.txt").write_text("in the beginning")
    return tmp_path


def spec(**keys: Any) -> RunSpec:
    return RunSpec.load(keys, "")


@pytest.mark.parametrize("name", ["vgg11", "mine.py", "mine.py:", ":make", "a.py:b:c", "mine.py:2b", "text:a.py"])
def test_other_names_are_no_files(name: str) -> None:
    assert own_code(name) is None


def test_a_name_is_a_file_and_a_function_or_a_text() -> None:
    assert (own := own_code("../a b/mine.py:make")) and (own.path, own.function) == ("../a b/mine.py", "make")
    assert (text := own_text("text:a/book.txt")) and (text.path, text.function) == ("a/book.txt", "")
    assert own_text("text:") is None and own_text("text") is None


def test_the_spec_records_the_content_of_every_file(here: Path) -> None:
    found = spec(model="mine.py:make", data={"name": "text:book.txt"}).with_files()
    assert found.files == {"mine.py": digest_of(MODEL.encode()), "book.txt": digest_of(b"in the beginning")}
    assert RunSpec.from_json(found.to_json(), "") == found
    assert spec(model="vgg11").with_files().files == {}


def test_a_changed_file_is_another_run(here: Path) -> None:
    before = spec(model="mine.py:make").with_files()
    (here / "mine.py").write_text(MODEL + "# changed\n")
    assert spec(model="mine.py:make").with_files() != before


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        (MODEL, "mine.py:other", "--model 'mine.py:other': mine.py defines no other; it has make. Fix the file."),
        ("def make(:", "mine.py:make", "--model 'mine.py:make': mine.py, line 1: "),
        ("", "mine.py:make", "mine.py defines no make; it has no function. Fix the file."),
        (MODEL, "none.py:make", "--model 'none.py:make': there is no file none.py. Write its path from this folder."),
        ("x" * ((1 << 20) + 1), "mine.py:make", "mine.py has 1048577 bytes, and the limit is 1048576. Use a smaller"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(
    here: Path, content: str, name: str, reason: str
) -> None:
    (here / "mine.py").write_text(content)
    with pytest.raises(SpecError) as refusal:
        spec(model=name).with_files()
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    "content", ["from elsewhere import make", "from elsewhere import *", "import x as make", "make = lambda c, h: None"]
)
def test_a_function_may_be_imported_or_assigned(here: Path, content: str) -> None:
    (here / "mine.py").write_text(content)
    assert spec(model="mine.py:make").with_files().files


def test_names_that_were_meant_as_files_are_refused_with_the_form() -> None:
    with pytest.raises(SpecError, match=r"--model 'mine\.py': a model of your own is FILE\.py:FUNCTION\. Write e\.g"):
        spec(model="mine.py")
    with pytest.raises(SpecError, match=r"--data 'mine\.py': a data set of your own is FILE\.py:FUNCTION\. Write e\.g"):
        spec(data={"name": "mine.py"})


def test_an_empty_text_and_a_text_for_a_model_of_images_are_refused(here: Path) -> None:
    (here / "empty.txt").touch()
    with pytest.raises(SpecError, match=r"empty\.txt is empty\. Use a file with text"):
        spec(model="gpt", data={"name": "text:empty.txt"}).with_files()
    with pytest.raises(SpecError, match=r"takes images, and text:book\.txt has sequences"):
        spec(model="vgg11", data={"name": "text:book.txt"})


def test_how_much_is_in_a_file_is_not_known_from_its_name() -> None:
    assert dataset_info("text:book.txt").train is None and dataset_info("mine.py:load").unit == "samples"
    assert spec(data={"name": "mine.py:load", "subset": 10**6}).sample_shape() == ()


def test_the_folder_has_copies_and_a_rank_reads_only_what_was_recorded(here: Path) -> None:
    made = spec(model="mine.py:make").with_files()
    folder = RunFolder(here / "run")
    folder.create(made)
    copy = folder.own_file(made, "model")
    assert copy is not None and copy.read_text() == MODEL and copy.parent == folder.own_files
    assert folder.own_file(made, "mode") is None and folder.own_file(made, "data.name") is None
    copy.write_text("other")
    with pytest.raises(SpecError, match=r"is not the file mine\.py that the spec was made with\. Start a new run"):
        folder.own_file(made, "model")


def test_a_method_is_one_of_the_files_and_its_copy_keeps_its_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "my_way.py").write_text(METHOD)
    monkeypatch.setenv(METHODS_VARIABLE, str(here / "elsewhere"))
    made = spec(mode="my-way/param", model="mine.py:make").with_files()
    assert made.files == {"mine.py": digest_of(MODEL.encode()), "methods/my_way.py": digest_of(METHOD.encode())}
    folder = RunFolder(here / "run")
    folder.create(made)
    monkeypatch.setenv(METHODS_VARIABLE, str(folder.methods))  # as for a rank under a controller
    assert method_path("my-way").read_text() == METHOD and folder.read_spec() == made
    assert folder.own_file(made, "mode") == folder.methods / "my_way.py"
    method_path("my-way").write_text("other")
    with pytest.raises(SpecError, match=r"is not the file methods/my_way\.py that the spec was made with"):
        read_request(["--folder", str(folder.path)], {"RANK": "0"})


def test_a_method_that_cannot_be_used_is_refused_before_the_run(here: Path) -> None:
    (here / "methods").mkdir()
    (here / "methods" / "mine.py").write_text(MODEL)
    with pytest.raises(SpecError, match=r"mode 'mine': methods/mine\.py cannot be used: defines no mean_"):
        spec(mode="mine").with_files()


def test_a_file_that_changes_while_the_run_starts_is_refused(here: Path) -> None:
    made = spec(model="mine.py:make").with_files()
    (here / "mine.py").write_text("other")
    with pytest.raises(UsageError, match=r"mine\.py: was changed while the run started"):
        RunFolder(here / "run").create(made)
    assert not (here / "run").exists(), "the same --out can be used again"


def test_two_files_of_one_name_have_two_copies_and_odd_names_are_made_plain() -> None:
    assert file_name("a/m.py", "1" * 64) != file_name("b/m.py", "2" * 64)
    assert file_name("a/my model\n.py", "1" * 64) == "111111111111-my_model_.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TESTBED_METHODS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("stem", ["my_meth2", "plain", "v1_2_3"])
def test_a_method_may_be_spelled_like_its_file(folder: Path, stem: str) -> None:
    (folder / f"{stem}.py").write_text(METHOD)
    name = stem.replace("_", "-")
    assert SyncMode.parse(f"{stem}/param") == SyncMode.parse(f"{name}/param")
    assert str(SyncMode.parse(stem)) == name
    assert method_path(name) == folder / f"{stem}.py"


@pytest.mark.parametrize("stem", ["ring", "ring_reduce", "single", "ddp"])
def test_the_name_of_a_built_in_mode_is_named_with_the_reason(folder: Path, stem: str) -> None:
    (folder / f"{stem}.py").write_text(METHOD)
    name = stem.replace("_", "-")
    reason = f"{name} is a built-in mode. Rename the file"
    assert unusable_methods() == {str(folder / f"{stem}.py"): reason}
    assert name in {str(mode) for mode in legal_modes()} and algorithms() == ALGORITHMS
    with pytest.raises(SpecError) as refusal:  # who writes ring.py and runs --mode ring means that file
        check_method(SyncMode.parse(name))
    assert str(refusal.value) == f"mode '{name}': {folder / f'{stem}.py'} cannot be used: {reason}."


@pytest.mark.parametrize("stem", ["2fast", "MyMeth", "my-meth", "my meth", "größer"])
def test_a_name_that_cannot_be_spelled_is_named_with_the_rule(folder: Path, stem: str) -> None:
    (folder / f"{stem}.py").write_text(METHOD)
    rule = "a name begins with a lower-case letter and has letters, digits and _ only. Rename the file"
    assert unusable_methods() == {str(folder / f"{stem}.py"): rule}
    with pytest.raises(SpecError, match=rf"unknown algorithm .* {stem}\.py cannot be used: {rule}|{stem}\.py"):
        SyncMode.parse(stem)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def mean_(buffer, group)\n", "line 1: expected ':'. Fix the file"),
        ("x = 1\n", "defines no mean_(buffer, group). Add it"),
        ("def mean(buffer, group): ...\n", "defines no mean_(buffer, group). Add it"),
        ("def mean_(buffer): ...\n", "its mean_ does not take two arguments. Write mean_(buffer, group)"),
        ("def mean_(buffer, group, more): ...\n", "its mean_ does not take two arguments. Write mean_(buffer, group)"),
        ("x = '\udc80'\n", "Fix the file"),
    ],
)
def test_a_broken_file_is_not_listed_as_legal_and_refused_with_the_reason(folder: Path, code: str, reason: str) -> None:
    (folder / "mine.py").write_bytes(code.encode(errors="surrogateescape"))
    assert unusable_methods()[str(folder / "mine.py")].endswith(reason)
    assert not [mode for mode in legal_modes() if mode.algorithm == "mine"]
    with pytest.raises(SpecError, match=r"mode 'mine/param': .*mine\.py cannot be used: "):
        check_method(SyncMode.parse("mine/param"))
    with pytest.raises(SpecError) as unknown:
        SyncMode.parse("nosuch")
    known, _, others = str(unknown.value).partition("Known: ")[2].partition(". ")
    assert "mine" not in known.split(", ") and "mine.py cannot be used" in others


@pytest.mark.parametrize(
    "code",
    [
        "from elsewhere import mean_\n",
        "from elsewhere import fast as mean_\n",
        "mean_ = print\n",
        "def mean_(*all): ...\n",
        "def mean_(buffer, group, *, segments=4): ...\n",
        "if True:\n    mean_ = print\n",
    ],
)
def test_nothing_is_held_against_a_file_that_may_define_it(folder: Path, code: str) -> None:
    (folder / "mine.py").write_text(code)
    assert [method.problem for method in own_methods(ALGORITHMS)] == [""]
    check_method(SyncMode.parse("mine"))
