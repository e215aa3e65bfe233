"""Source patches: to the letter or not at all, all files or none, and back to the byte."""

from __future__ import annotations

import difflib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.samples import ROOT
from vllm_k25_instrument.cli import app
from vllm_k25_instrument.patching import replace, series
from vllm_k25_instrument.patching.replace import SUFFIX, ReplaceError, bring_to
from vllm_k25_instrument.patching.series import FileState, PatchError, TreeState, find_tree, load_series, tree_state
from vllm_k25_instrument.patching.unified import DiffError, FileDiff, HunkError, lines_of, parse

# --- one diff ----------------------------------------------------------------------------------------------

DIFF = """Some words about it.

diff --git a/vllm/a.py b/vllm/a.py
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -1,2 +1,3 @@
 one
+one and a half
 two
@@ -4,2 +5,3 @@ class Here:
 four
+four and a half
 five
"""

BEFORE = "one\ntwo\nthree\nfour\nfive\nsix\n"
AFTER = "one\none and a half\ntwo\nthree\nfour\nfour and a half\nfive\nsix\n"


def one_diff() -> FileDiff:
    (diff,) = parse(DIFF)
    return diff


def test_a_diff_is_applied_and_reversed() -> None:
    diff = one_diff()
    assert diff.path == "vllm/a.py"
    assert diff.apply(BEFORE) == AFTER
    assert diff.reversed().apply(AFTER) == BEFORE


@pytest.mark.parametrize(
    ("text", "number", "line"),
    [
        ("zero\n" + BEFORE, 1, 1),  # everything is there, a line further down
        (BEFORE.replace("five", "5"), 2, 4),
        (BEFORE.replace("two\n", "two\r\n"), 1, 1),
        ("one\ntwo", 1, 1),
        ("", 1, 1),
        (AFTER, 1, 1),
    ],
)
def test_a_hunk_fits_to_the_letter_or_is_refused(text: str, number: int, line: int) -> None:
    with pytest.raises(HunkError) as refused:
        one_diff().apply(text)
    assert (refused.value.number, refused.value.line) == (number, line)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DIFF.replace("+++ b/vllm/a.py", "+++ b/vllm/b.py"), "renamed"),
        (DIFF.replace("--- a/vllm/a.py", "--- /dev/null"), "--- a/PATH"),
        (DIFF.replace("vllm/a.py", "../a.py"), "--- a/PATH"),
        (DIFF.replace("a/vllm/a.py", "a//etc/passwd"), "--- a/PATH"),
        (DIFF.replace("@@ -1,2 +1,3 @@", "@@ -1,9 +1,9 @@"), "ends too early"),
        (DIFF.replace(" two\n", " two"), "outside of any hunk"),
        (DIFF.replace("+one and a half\n", "+one and\n+a half\n"), "more lines than it says"),
        (DIFF[: DIFF.index("@@ -1")], "no hunks"),
    ],
)
def test_what_is_no_diff_of_existing_files_is_refused(text: str, said: str) -> None:
    with pytest.raises(DiffError, match=said.replace("+", r"\+")):
        parse(text)


LINES = st.lists(st.sampled_from(["def f(\n", "    self,\n", "\n", "x\x0c\n", "y\u2028z\n", "a\rb\n"]), max_size=30)


@given(LINES, LINES, st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_any_two_texts_become_each_other(old: list[str], new: list[str], context: int) -> None:
    text = "".join(difflib.unified_diff(old, new, "a/f", "b/f", n=context))
    before, after = "".join(old), "".join(new)
    assert lines_of(before) == old
    for diff in parse(text):
        if old and new:  # difflib numbers the lines of an empty file from 0
            assert diff.apply(before) == after
            assert diff.reversed().apply(after) == before


# --- a tree ------------------------------------------------------------------------------------------------

FILES = {
    "vllm/plugins/__init__.py": "import os\n\n\ndef load():\n    pass\n",
    "vllm/a.py": "import os\n\n\nclass A:\n    def f(self):\n        return 1\n",
    "vllm/b.py": "import os\n\n\nclass B:\n    def f(self):\n        return 2\n\n    def g(self):\n        return 3\n",
}
PATCHED = {
    "vllm/plugins/__init__.py": "import os\n\nk25 = lambda hook: lambda function: function\n\n\ndef load():\n    pass"
    "\n",
    "vllm/a.py": FILES["vllm/a.py"]
    .replace("import os\n", "import os\n\nfrom vllm.plugins import k25\n")
    .replace("    def f", '    @k25("f")\n    def f'),
    "vllm/b.py": FILES["vllm/b.py"]
    .replace("import os\n", "import os\n\nfrom vllm.plugins import k25\n")
    .replace("    def g", '    @k25("g")\n    def g'),
}


def diff_text(path: str) -> str:
    lines = (lines_of(text[path]) for text in (FILES, PATCHED))
    return "".join(difflib.unified_diff(*lines, f"a/{path}", f"b/{path}", n=2))


class Tree:
    """A vLLM of three files, and a folder of patches for it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "site" / "vllm"
        for path, text in FILES.items():
            (self.root.parent / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root.parent / path).write_text(text)
        (self.root / "__init__.py").touch()
        (self.root / "_version.py").write_text("__version__ = version = '9.1.0+cpu'\n")
        self.patches = folder / "patches"
        (self.patches / "9.1.0").mkdir(parents=True)
        (self.patches / "9.10.0").mkdir()
        (self.patches / "9.1.0" / "0001-entry.patch").write_text(diff_text("vllm/plugins/__init__.py"))
        (self.patches / "9.1.0" / "0002-marks.patch").write_text(diff_text("vllm/a.py") + diff_text("vllm/b.py"))
        monkeypatch.setattr(series, "PATCHES", self.patches)
        monkeypatch.setattr(load_series, "__defaults__", (self.patches,))
        monkeypatch.setattr(series.releases, "__defaults__", (self.patches,))

    def texts(self) -> dict[str, str]:
        return {path: (self.root.parent / path).read_text() for path in FILES}

    def examine(self) -> list[series.FileReport]:
        return load_series("9.1.0").examine(self.root)

    def state(self) -> TreeState:
        return tree_state(self.examine())

    def bring_to(self, wanted: FileState) -> list[str]:
        return bring_to(self.root, self.examine(), wanted)

    def leftovers(self) -> list[Path]:
        return list(self.root.rglob(f"*{SUFFIX}"))

    def run(self, command: str, *options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["patch", command, "--vllm", str(self.root), *options])
        return result.exit_code, result.output


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_a_tree_is_patched_and_put_back_to_the_byte(tree: Tree) -> None:
    assert tree.state() is TreeState.NOT_APPLIED
    assert sorted(tree.bring_to(FileState.PATCHED)) == sorted(FILES)
    assert tree.texts() == PATCHED
    assert tree.state() is TreeState.APPLIED
    assert sorted(tree.bring_to(FileState.CLEAN)) == sorted(FILES)
    assert tree.texts() == FILES
    assert tree.leftovers() == []


def test_a_second_time_nothing_is_left_to_do(tree: Tree) -> None:
    assert tree.bring_to(FileState.CLEAN) == []
    tree.bring_to(FileState.PATCHED)
    before = {path: (tree.root.parent / path).stat().st_ino for path in FILES}
    assert tree.bring_to(FileState.PATCHED) == []
    assert {path: (tree.root.parent / path).stat().st_ino for path in FILES} == before


def test_modes_stay_bytecode_goes_and_files_shared_by_links_are_left_alone(tree: Tree, tmp_path: Path) -> None:
    a, b = tree.root / "a.py", tree.root / "b.py"
    a.chmod(0o640)
    os.link(a, tmp_path / "cached_a.py")
    b.rename(tmp_path / "cached_b.py")
    b.symlink_to(tmp_path / "cached_b.py")
    compiled = tree.root / "__pycache__" / "a.cpython-311.pyc"
    other = tree.root / "__pycache__" / "ab.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.touch()
    other.touch()
    tree.bring_to(FileState.PATCHED)
    assert tree.texts() == PATCHED
    assert stat.S_IMODE(a.stat().st_mode) == 0o640
    assert (tmp_path / "cached_a.py").read_text() == FILES["vllm/a.py"]
    assert (tmp_path / "cached_b.py").read_text() == FILES["vllm/b.py"]
    assert (compiled.exists(), other.exists()) == (False, True)


def test_a_file_that_is_not_the_releases_is_named_with_its_hunk_and_nothing_is_touched(tree: Tree) -> None:
    changed = tree.root / "b.py"
    changed.write_text(changed.read_text().replace("return 2", "return 22"))
    before = tree.texts()
    with pytest.raises(PatchError, match=r"b\.py: 0002-marks\.patch: hunk 2 does not fit at line 6: .*nothing was"):
        tree.bring_to(FileState.PATCHED)
    assert tree.texts() == before
    assert tree.state() is TreeState.MISMATCH


def test_a_change_that_the_patches_do_not_look_at_is_carried_along(tree: Tree) -> None:
    changed = tree.root / "b.py"
    changed.write_text(FILES["vllm/b.py"] + "\n\nLOCAL = 1\n")
    before = tree.texts()
    tree.bring_to(FileState.PATCHED)
    assert changed.read_text() == PATCHED["vllm/b.py"] + "\n\nLOCAL = 1\n"
    tree.bring_to(FileState.CLEAN)
    assert tree.texts() == before


def test_a_patched_file_that_was_edited_is_not_reverted(tree: Tree) -> None:
    tree.bring_to(FileState.PATCHED)
    changed = tree.root / "a.py"
    changed.write_text(changed.read_text().replace('@k25("f")', '@k25("h")'))
    before = tree.texts()
    with pytest.raises(PatchError, match=r"a\.py: 0002-marks\.patch: hunk 1"):
        tree.bring_to(FileState.CLEAN)
    assert tree.texts() == before


# --- cut short ---------------------------------------------------------------------------------------------

KILLED = """if True:
    import os, signal, sys
    from pathlib import Path
    from vllm_k25_instrument.patching import replace
    from vllm_k25_instrument.patching.replace import bring_to
    from vllm_k25_instrument.patching.series import FileState, load_series
    root, patches, wanted, left = Path(sys.argv[1]), Path(sys.argv[2]), FileState(sys.argv[3]), int(sys.argv[4])
    rename = os.replace
    def replaced(*args):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        rename(*args)
    replace.os.replace = replaced
    bring_to(root, load_series("9.1.0", patches).examine(root), wanted)
"""

IMPORT_ALL = "import vllm.plugins, vllm.a, vllm.b; print(vllm.a.A().f(), vllm.b.B().g())"


@pytest.mark.parametrize("wanted", [FileState.PATCHED, FileState.CLEAN])
@pytest.mark.parametrize("done", [0, 1, 2])
def test_killed_at_any_point_vllm_works_and_both_ways_are_open(tree: Tree, wanted: FileState, done: int) -> None:
    start = FILES
    if wanted is FileState.CLEAN:
        tree.bring_to(FileState.PATCHED)
        start = PATCHED
    arguments = [str(tree.root), str(tree.patches), wanted, str(done)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False, cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    assert sum(tree.texts()[path] != start[path] for path in FILES) == done
    assert tree.leftovers()
    works = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=tree.root.parent, capture_output=True, text=True, check=False
    )
    assert works.stdout == "1 3\n", works.stderr

    code, said = tree.run("check")
    assert code == (3 if done else {FileState.PATCHED: 1, FileState.CLEAN: 0}[wanted])
    assert ("run apply to finish, revert to undo" in said) == bool(done)
    assert tree.run("apply")[0] == 0
    assert tree.texts() == PATCHED
    assert tree.run("revert")[0] == 0
    assert tree.texts() == FILES
    assert tree.leftovers() == []


@pytest.mark.parametrize("wanted", [FileState.PATCHED, FileState.CLEAN])
@pytest.mark.parametrize("good", [0, 1, 2])
def test_what_cannot_be_written_is_undone(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, wanted: FileState, good: int
) -> None:
    if wanted is FileState.CLEAN:
        tree.bring_to(FileState.PATCHED)
    before = tree.texts()
    rename, calls = os.replace, 0

    def failing(source: str, target: str) -> None:
        nonlocal calls
        calls += 1
        if calls == good + 1:
            raise OSError(28, "No space left on device", str(source), None, str(target))
        rename(source, target)

    monkeypatch.setattr(replace.os, "replace", failing)
    with pytest.raises(ReplaceError, match="No space left on device: nothing was changed") as raised:
        tree.bring_to(wanted)
    assert raised.value.undone
    assert tree.texts() == before
    assert tree.leftovers() == []


@pytest.fixture
def open_to_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    """A tree that others may read: pytest's own folders are private."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Tree(Path(folder), monkeypatch)


def test_a_folder_that_may_not_be_written_to_is_named_and_nothing_is_changed(open_to_all: Tree) -> None:
    """In a child process that is nobody, since nothing is forbidden to root."""
    tree = open_to_all
    reports = tree.examine()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            if os.geteuid() == 0:
                os.setresuid(65534, 65534, 65534)
            else:
                (tree.root / "plugins").chmod(0o555)
            bring_to(tree.root, reports, FileState.PATCHED)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.waitpid(child, 0)
    (tree.root / "plugins").chmod(0o755)
    said = os.read(read, 10_000).decode()
    assert said.startswith(f"ReplaceError: {tree.root / 'plugins'}/")
    assert "Permission denied: nothing was changed; run it as the owner" in said
    assert tree.texts() == FILES


def test_two_at_once_are_one_too_many(tree: Tree) -> None:
    with replace._alone(tree.root), pytest.raises(PatchError, match="another `vllm-k25 patch` is at work"):
        tree.bring_to(FileState.PATCHED)
    assert tree.texts() == FILES


# --- the command -------------------------------------------------------------------------------------------


def test_the_command_applies_checks_and_reverts(tree: Tree) -> None:
    assert tree.run("check")[0] == 1
    code, said = tree.run("apply")
    assert (code, "2 patches of 3 files: applied, 3 changed now" in said) == (0, True)
    code, said = tree.run("check", "--json")
    document = json.loads(said)
    assert code == 0
    assert document["schema"] == "vllm_k25.patch/1"
    assert (document["release"], document["state"]) == ("9.1.0", "applied")
    assert document["files"] == dict.fromkeys(FILES, "patched")
    assert tree.run("revert")[0] == 0
    assert tree.run("check")[0] == 1


def test_a_release_without_patches_is_refused_and_those_with_are_named(tree: Tree) -> None:
    (tree.root / "_version.py").write_text("__version__ = version = '9.2.0'\n")
    code, said = tree.run("apply")
    assert code == 2
    assert "there are no patches for vLLM 9.2.0; there are for 9.1.0, 9.10.0" in said
    assert tree.run("apply", "--release", "9.1.0")[0] == 0
    assert tree.texts() == PATCHED


def test_a_tree_that_names_no_version_is_refused(tree: Tree) -> None:
    (tree.root / "_version.py").unlink()
    code, said = tree.run("check")
    assert code == 2
    assert "_version.py names no version: name the release with --release" in said
    assert tree.run("check", "--release", "9.1.0")[0] == 1


def test_a_changed_and_a_missing_file_make_check_say_so(tree: Tree) -> None:
    (tree.root / "a.py").write_text("something else\n")
    (tree.root / "b.py").unlink()
    code, said = tree.run("check")
    assert code == 2
    assert "vllm/a.py: 0002-marks.patch: hunk 1 does not fit at line 1" in said
    assert "vllm/b.py: it is not there" in said
    code, said = tree.run("apply")
    assert code == 2
    assert "nothing was changed" in said


def test_a_checkout_will_do_and_any_other_folder_will_not(tree: Tree, tmp_path: Path) -> None:
    assert find_tree(tree.root.parent, None) == tree.root
    assert find_tree(None, tree.root) == tree.root
    with pytest.raises(PatchError, match="is not vLLM's folder"):
        find_tree(tmp_path, tree.root)
    with pytest.raises(PatchError, match="name its folder with --vllm"):
        find_tree(None, None)


def test_patches_that_cannot_be_read_are_refused(tree: Tree) -> None:
    (tree.patches / "9.1.0" / "0002-marks.patch").write_text(textwrap.dedent(DIFF).replace("+++ b", "+++ c"))
    code, said = tree.run("apply")
    assert code == 2
    assert "cannot be used" in said
